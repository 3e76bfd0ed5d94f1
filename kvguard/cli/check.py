"""`kvguard check`: the static half of `kvguard serve`, for a pull request's CI. Starts nothing and needs no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvguard.checkpoint.models import CheckpointFiles, Declared
from kvguard.engine.accelerators import Detected, device_for
from kvguard.engine.checkpoint_files import digest_files
from kvguard.engine.command import Command, parse_command, split_words
from kvguard.engine.find import installed_engine
from kvguard.engine.hub import locate
from kvguard.engine.preview import StaticVerdict, full_version, judge_statically
from kvguard.engine.resolve import Resolution
from kvguard.engine.sealed import PREFIX
from kvguard.facts.devices import Device
from kvguard.facts.versions import KNOWN, examined
from kvguard.files import printable, read_regular_file, shown
from kvguard.guard.runtime_scales import decide
from kvguard.policy.models import Policy
from kvguard.policy.parse import load_policy
from kvguard.reference.prompts import default_prompts
from kvguard.verdict.checks import describe, violates
from kvguard.verdict.runtime_scales import RuntimeScales
from kvguard.vocabulary import Check, ExitCode, UsageError

_YAML_LIMIT = 1 << 20


def check(
    context: typer.Context,
    *,
    policy: Annotated[Path | None, typer.Option(help="Policy file (YAML). Without one, only integrity is checked.")] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Judge for this vLLM version (default: the installed one).")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Judge for this accelerator: h100, b200, rtx5090, a100, mi300x, cpu, sm90, gfx942, or none for no "
            "particular one (default: the one that is found here)."
        ),
    ] = None,
    scales: Annotated[
        Path | None, typer.Option(help="Calibration that the start will be given (default: the one in kvguard's cache).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge a command and its checkpoint against a policy without starting anything. Exit 0, 2 or 3 as `serve` would.

    Example: kvguard check --policy policy.yaml --engine-version 0.32.0 -- vllm serve ./my-model --port 8000
    """
    required = load_policy(policy) if policy else None
    engine = None if engine_version else installed_engine()
    version = full_version(engine_version) if engine_version else engine.version if engine is not None else ""
    if not version:
        raise UsageError(f"no vLLM was found, so its version is unknown; give --engine-version (facts cover {KNOWN})")
    argv = tuple(context.args)
    command = parse_command(split_words(argv), version, read_config)
    located = locate(command.model, os.environ, command.value("--revision"))
    found = device_for(device, engine, os.environ)
    where = found.device
    runtime = None if located.published else _calibrations(required, version, where, located.files, scales)
    if scales is not None and runtime is None:
        raise UsageError(f"--scales {printable(str(scales))}: belongs to files on this disk; {command.model} was read on a hub")
    verdict = judge_statically(argv, version, required, located.files, read_config, os.environ, where, runtime)
    if engine_version:
        verdict = verdict.model_copy(update={"checks": tuple(_typed_version(one) for one in verdict.checks)})
    refused = violates(verdict.checks)
    if as_json:
        hub = located.published and located.published.model_dump(mode="json")
        typer.echo(json.dumps({**_document(verdict, version, found, refused), "hub": hub}, indent=2))
    else:
        _print(verdict, version, found, refused)
    raise typer.Exit(ExitCode.POLICY_VIOLATION if refused else ExitCode.CLEAN)


def _calibrations(
    policy: Policy | None, version: str, device: Device | None, files: CheckpointFiles, scales: Path | None
) -> Callable[[Command, Declared, Resolution], RuntimeScales | None]:
    """How `serve` would get runtime scales, looked up and not written."""

    def found(command: Command, declared: Declared, resolution: Resolution) -> RuntimeScales | None:
        decision = decide(
            policy=policy,
            command=command,
            version=version,
            platform=device.platform if device else None,
            resolution=resolution,
            files=files,
            declared=declared,
            digests=tuple(one for one in digest_files(files.directory, files) if not one.name.startswith(PREFIX)),
            scales=scales,
            prompts=default_prompts(),
            env=os.environ,
            write=False,
        )
        return decision[0] if decision is not None else None

    return found


def read_config(path: str) -> bytes:
    """The bytes of a --config file. UsageError when it cannot be read."""
    return read_regular_file(Path(path), _YAML_LIMIT, "vLLM --config file")


def _typed_version(check: Check) -> Check:
    """The check of a version that no installed engine names."""
    return check.model_copy(update={"where": "--engine-version"}) if check.name == "engine_version" else check


def _document(verdict: StaticVerdict, version: str, found: Detected, refused: bool) -> dict[str, Any]:
    resolution = verdict.resolution
    return {
        "model": verdict.declared.directory,
        "engine_version": version,
        "device": found.device and found.device.name,
        "device_where": found.where,
        "kv_cache_dtype": resolution.target if examined(version) else "unknown",
        "stated": resolution.stated,
        "reason": resolution.reason,
        "scales": resolution.prediction.scales.value,
        "checks": [one.model_dump(mode="json") for one in verdict.checks],
        "warnings": list(verdict.command.warnings),
        "degraded": list(verdict.degraded),
        "violates": refused,
    }


def _print(verdict: StaticVerdict, version: str, found: Detected, refused: bool) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    resolution = verdict.resolution
    target = resolution.target if examined(version) else "unknown"
    stated = f"stated as --kv-cache-dtype {resolution.stated}" if resolution.stated else "the command stays as it is"
    if resolution.strip_scheme:
        stated = "the checkpoint's KV scheme is stripped with --hf-overrides, because this version would apply it"
    on = f" on {found.device.name} ({found.where})" if found.device else ""
    console.print(shown(f"vLLM {version}{on}: KV cache {target}, scales {resolution.prediction.scales.value}; {stated}"))
    for one in verdict.checks:
        console.print(printable(describe(one), 1 << 20))
    for text in (*verdict.command.warnings, *verdict.degraded):
        console.print(f"warning: {printable(text, 1 << 20)}")
    console.print("refused: kvguard serve would not start this" if refused else "allowed: nothing known speaks against it")
