"""A calibration as one artefact: an overlay of the checkpoint, named by the digest of all that made it.

The digest covers the checkpoint's files, the prompt set, the engine's version, the options and the scales. It does not
cover the checkpoint's place, so that the same calibration has the same name on every machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvguard.canonical import sha256_of
from kvguard.checkpoint.models import CheckpointFiles, Declared
from kvguard.engine.checkpoint_files import FileDigest
from kvguard.engine.find import cache_directory
from kvguard.engine.sealed import PREFIX, Sealed, is_sealed, open_sealed, write_sealed
from kvguard.files import printable
from kvguard.reference.overlay import attach
from kvguard.reference.scales import Scales, parse_scales
from kvguard.vocabulary import Frozen, Json, UsageError

KIND = "calibration"
FORMAT = "fp8_e4m3"
"""The cache format that calibrations are for."""

REPORT = f"{PREFIX}report.json"


class Options(Frozen):
    """What else decides the scales."""

    headroom: float
    model_dtype: str


class Calibration(Frozen):
    """A calibration that agrees with its manifest. `path` is its overlay; `source` the checkpoint that was linked."""

    path: str
    digest: str
    source: str
    checkpoint: tuple[tuple[str, str, str], ...]
    engine: str
    prompts: str
    options: Options
    scales: Scales

    def summary(self) -> dict[str, Json]:
        """What a run record says about it: everything but scales, places and the checkpoint's own digests."""
        return {
            "way": "overlay",
            "artefact": self.digest,
            "prompts": self.prompts,
            "engine": self.engine,
            "options": {"format": FORMAT, **self.options.model_dump()},
        }


def overlays_directory(env: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/kvguard/overlays`."""
    return cache_directory(env) / "overlays"


def checkpoint_identity(digests: Sequence[FileDigest]) -> tuple[tuple[str, str, str], ...]:
    """(name, kind, sha256) of a checkpoint's files, kvguard's own left out."""
    return tuple(sorted((item.name, item.kind, item.sha256) for item in digests if not item.name.startswith(PREFIX)))


def save_calibration(
    *,
    files: CheckpointFiles,
    declared: Declared,
    digests: Sequence[FileDigest],
    engine: str,
    prompts: str,
    options: Options,
    scales: Scales,
    report: Mapping[str, Json],
    directory: Path,
    out: Path | None = None,
) -> Calibration:
    """Write a calibration's overlay to `out`, by default to `directory`/<digest>. Raises as `attach` and `write_sealed`."""
    about = {
        "kind": KIND,
        "checkpoint": [list(item) for item in checkpoint_identity(digests)],
        "engine": engine,
        "prompts": prompts,
        "options": {"format": FORMAT, **options.model_dump()},
        "scales": scales.as_document(),
    }
    content = (json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode()
    return _write(about, engine, files, declared, scales, content, directory, out)


def load_calibration(path: Path) -> Calibration:
    """The calibration in an overlay directory. UsageError, naming what is wrong, when it is corrupt or none."""
    return _calibration(open_sealed(path))


def stale(calibration: Calibration, digests: Sequence[FileDigest], engine: str, model_dtype: str | None) -> str:
    """Why a calibration is not for this checkpoint, engine and dtype; "" when it is."""
    now = {name: (kind, sha256) for name, kind, sha256 in checkpoint_identity(digests)}
    then = {name: (kind, sha256) for name, kind, sha256 in calibration.checkpoint}
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            what = "is new" if name not in then else "is gone" if name not in now else "has changed"
            return f"the checkpoint's {printable(name)} {what} since it was calibrated"
    if calibration.engine != engine:
        return f"it was made on vLLM {calibration.engine}, the engine is vLLM {engine}"
    if model_dtype is not None and calibration.options.model_dtype != model_dtype:
        return f"it was made in {calibration.options.model_dtype}, the model runs in {model_dtype}"
    return ""


def find_calibrations(
    directory: Path, digests: Sequence[FileDigest], engine: str, model_dtype: str | None
) -> tuple[tuple[Calibration, ...], tuple[str, ...]]:
    """The calibrations in `directory` for this checkpoint and engine, by digest; and what is wrong with others of it.

    Corrupt directories are named, since one of them may be the one that was meant.
    """
    fitting, problems = [], []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if entry.name.startswith(".") or not is_sealed(entry):
            continue
        try:
            found = load_calibration(entry)
        except UsageError as error:
            problems.append(str(error))
            continue
        if not stale(found, digests, engine, model_dtype):
            fitting.append(found)
    return tuple(fitting), tuple(problems)


def at_home(calibration: Calibration, files: CheckpointFiles, declared: Declared, directory: Path) -> Calibration:
    """The calibration as an overlay of the checkpoint in `files.directory`.

    Itself when its links lead there; else written again into `directory`, under its own digest: it may come from another
    machine, where the checkpoint lies elsewhere. Where an overlay for another place stands under that digest already, a
    server may be using it: this one's name then tells its place as well.
    """
    if os.path.realpath(calibration.source) == os.path.realpath(files.directory):
        return calibration
    place = directory / calibration.digest.removeprefix("sha256:")
    if place.is_dir() and not _leads_to(place, files.directory):
        place = place.with_name(f"{place.name}-{sha256_of(os.path.abspath(files.directory))[7:15]}")
    sealed = open_sealed(Path(calibration.path))
    report = (Path(calibration.path) / REPORT).read_bytes()
    return _write(sealed.manifest.about, calibration.engine, files, declared, calibration.scales, report, directory, place)


def _leads_to(overlay: Path, directory: str) -> bool:
    try:
        return os.path.realpath(open_sealed(overlay).manifest.source) == os.path.realpath(directory)
    except UsageError:
        return True  # broken, so that nobody starts from it: written anew


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, so that several starts on a machine calibrate one after another, and only the first does.

    Raises UsageError, naming it, for a directory that cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(
            f"{printable(str(directory))}: calibrations cannot be kept there: {error.strerror or error}; "
            "set XDG_CACHE_HOME to a place that can be written"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(
    about: Mapping[str, Json],
    engine: str,
    files: CheckpointFiles,
    declared: Declared,
    scales: Scales,
    report: bytes,
    directory: Path,
    out: Path | None,
) -> Calibration:
    source = os.path.abspath(files.directory)
    overlay = attach(engine, files, declared, os.listdir(source), scales)
    place = out if out is not None else directory / sha256_of(dict(about)).removeprefix("sha256:")
    links = {name: os.path.join(source, name) for name in overlay.links}
    sealed = write_sealed(place, about=about, source=source, files={**overlay.files, REPORT: report}, links=links)
    return _calibration(sealed)


def _calibration(sealed: Sealed) -> Calibration:
    about: dict[str, Any] = sealed.manifest.about
    name = printable(sealed.path)
    if about.get("kind") != KIND:
        raise UsageError(f"{name}: an overlay of kvguard's, but no calibration; make one with `kvguard calibrate`")
    try:
        options = {key: value for key, value in about["options"].items() if key != "format"}
        return Calibration(
            path=os.path.abspath(sealed.path),
            digest=sealed.digest,
            source=sealed.manifest.source,
            checkpoint=tuple(tuple(item) for item in about["checkpoint"]),
            engine=about["engine"],
            prompts=about["prompts"],
            options=Options.model_validate(options),
            scales=parse_scales(about["scales"], name),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"{name}: written by another version of kvguard ({type(error).__name__}); make it again") from None
