"""`kvguard overlay`: the same weights with other KV scales, or without the checkpoint's KV directive."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvguard.canonical import sha256_of
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.json_config import strict_json
from kvguard.engine.checkpoint_files import digest_files, read_checkpoint, resolve_model
from kvguard.engine.find import installed_version
from kvguard.engine.sealed import Sealed, is_sealed, open_sealed, write_sealed
from kvguard.facts.versions import KNOWN, NEWEST, examined
from kvguard.files import printable, read_regular_file
from kvguard.reference.artefact import checkpoint_identity
from kvguard.reference.overlay import attach, attention_modules, strip, why_dropped
from kvguard.reference.scales import Scales, parse_scales, unit_scales
from kvguard.vocabulary import Json, PolicyRefusal, UsageError

_SCALES_LIMIT = 16 << 20
NONE, UNIT = "none", "unit"


def overlay(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, or a name in the local hub cache.")],
    *,
    kv: Annotated[
        str,
        typer.Option(
            metavar="none|unit|FILE",
            help="none: strip the KV directive; unit: attach scale 1.0; FILE: attach these scales (JSON lists k and v).",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The directory to write.")],
    engine_version: Annotated[
        str, typer.Option(help="The vLLM that shall load it; default: the one that `vllm` means here, else the newest known.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace an overlay at OUT that is another one.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a directory of links to a checkpoint's files in which only its KV declaration differs.

    Refused (exit 3), with the reason, where that vLLM would drop the scales. The directory appears whole or not at all,
    and is read-only. An overlay that is there is replaced only by the same one, or with --force.

    Example: kvguard overlay MODEL --kv none --out MODEL-16bit
    """
    if engine_version and not examined(engine_version):
        raise UsageError(f"--engine-version {printable(engine_version)}: unknown version; those that were examined: {KNOWN}")
    directory = os.path.abspath(resolve_model(model, os.environ))
    files = read_checkpoint(directory)
    declared = declare(files)
    version = engine_version or installed_version() or NEWEST
    about: dict[str, Json] = {
        "kind": "stripped",
        "checkpoint": [list(item) for item in checkpoint_identity(digest_files(directory, files))],
    }
    if kv == NONE:
        made = strip(files, os.listdir(directory))
    else:
        if reason := why_dropped(version, files, declared):
            raise PolicyRefusal(f"{printable(directory)}: {reason}")
        scales = _scales(kv, tuple(sorted(attention_modules(version, files, declared))))
        made = attach(version, files, declared, os.listdir(directory), scales)
        about |= {"kind": "attached", "scales": scales.as_document()}
    links = {name: os.path.join(directory, name) for name in made.links}
    there = None if force else _there(out, sha256_of(about))
    sealed = write_sealed(out, about=about, source=directory, files=made.files, links=links)
    notes = [*made.notes]
    if there is not None:
        same = there.manifest == sealed.manifest
        notes.append("was there already, with this digest: " + ("left as it is" if same else "written again"))
    if as_json:
        document = {"path": sealed.path, "digest": sealed.digest, "files": sorted(made.files), "notes": notes}
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"{sealed.path}  {sealed.digest[:19]}  {len(links)} links, {len(made.files)} files")
    for note in notes:
        typer.echo(f"  {printable(note)}")


def _there(out: Path, digest: str) -> Sealed | None:
    """The overlay at `out`, if there is one. UsageError when it is another one than that of this digest, or damaged."""
    if not is_sealed(out):
        return None
    try:
        found = open_sealed(out)
    except UsageError as error:
        raise UsageError(f"{error} (--force replaces it)") from error
    if found.digest != digest:
        raise UsageError(
            f"{printable(str(out))}: is there already and is another overlay: found {found.digest[:19]}, to be written "
            f"{digest[:19]}; name another place, or replace it with --force"
        )
    return found


def _scales(kv: str, layers: tuple[int, ...]) -> Scales:
    if kv == UNIT:
        return unit_scales(layers)
    return parse_scales(strict_json(read_regular_file(Path(kv), _SCALES_LIMIT, "scales file"), kv), printable(kv))
