"""Which way a start gets runtime scales on this version, and the calibration it uses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvguard.checkpoint.models import CheckpointFiles, Declared
from kvguard.engine.checkpoint_files import FileDigest
from kvguard.engine.command import Command
from kvguard.engine.resolve import Resolution
from kvguard.facts.calibration import Flag, calculate_flag, flag_ignored
from kvguard.files import printable
from kvguard.policy.models import Policy, ScalesRule
from kvguard.reference.artefact import (
    FORMAT,
    Calibration,
    at_home,
    find_calibrations,
    load_calibration,
    overlays_directory,
    stale,
)
from kvguard.reference.overlay import why_dropped
from kvguard.reference.prompts import PromptSet, default_prompts
from kvguard.verdict.runtime_scales import RuntimeScales
from kvguard.vocabulary import DYNAMIC_SCALE_DTYPES, UsageError, is_quantized

_NO_COMPILATION = ("0", "none", "None", "NONE")


def decide(
    *,
    policy: Policy | None,
    command: Command,
    version: str,
    platform: str | None,
    resolution: Resolution,
    files: CheckpointFiles,
    declared: Declared,
    digests: Sequence[FileDigest],
    scales: Path | None,
    prompts: PromptSet,
    env: Mapping[str, str],
    write: bool = True,
) -> tuple[RuntimeScales, Calibration | None] | None:
    """The way and, for an overlay that can be had, its calibration; None where no runtime scales are wanted.

    `scales` is a calibration that was named. Prompts other than the default ones are required of it, named or found. With
    `write`, a calibration whose links lead elsewhere is written again for the checkpoint here; without it nothing is
    written. Raises UsageError for one that is corrupt, or given for a 16-bit cache.
    """
    quantized = bool(is_quantized(resolution.target))
    wanted = policy is not None and policy.kv_cache.scales is ScalesRule.RUNTIME
    if scales is not None and not quantized:
        raise UsageError(
            f"--scales {printable(str(scales))}: the cache is {resolution.target}, which has no scales; "
            f"require {FORMAT} in the policy, or type --kv-cache-dtype {FORMAT}"
        )
    if not quantized or not (wanted or scales is not None) or resolution.target in DYNAMIC_SCALE_DTYPES:
        return None
    flag = calculate_flag(version, platform=platform, eager=is_eager(command))
    ignored = flag_ignored(
        version,
        dynamic_dtype=False,
        query_scale=declared.scales.query,
        compressed_tensors_scheme=resolution_has_scheme(declared),
        hybrid=declared.geometry.hybrid,
    )
    if scales is None and flag is not None and flag.result == "real" and ignored is None:
        found = f"runtime_once: the engine calibrates on its first batch, prompt set {prompts.digest[:19]}"
        return RuntimeScales(way="flag", reason=flag.reason, found=found, where=f"facts: {flag.source}"), None
    reason = _why_not_the_flag(version, ignored or flag, named=scales is not None)
    obstacle = _obstacle(version, command, resolution, files, declared)
    if obstacle:
        return RuntimeScales(way="overlay", reason=reason, problem=obstacle, where=declared.directory, action=_OTHERWISE), None
    wanted_prompts = prompts.digest if prompts.digest != default_prompts().digest else None
    return _calibrated(version, reason, resolution, files, declared, digests, scales, wanted_prompts, command, env, write=write)


_OTHERWISE = "use a checkpoint with calibrated scales and `scales: checkpoint`, or a per-token-head dtype"


def is_eager(command: Command) -> bool:
    """Whether the command turns compilation off."""
    if command.present("--enforce-eager") or command.value("--optimization-level") == "0":
        return True
    level = next((use for use in command.uses if use.name == "--optimization-level"), None)
    if level is not None and level.where.rstrip("`").endswith("-O0"):
        return True
    try:
        compilation = command.json_object("--compilation-config") or {}
    except UsageError:
        return False
    return str(compilation.get("mode", "")) in _NO_COMPILATION


def resolution_has_scheme(declared: Declared) -> bool:
    """Whether the checkpoint declares a compressed-tensors KV scheme."""
    return declared.kv_scheme is not None and declared.kv_scheme.producer == "compressed-tensors"


def _why_not_the_flag(version: str, flag: Flag | None, *, named: bool) -> str:
    if named:
        return "the calibration was named"
    if flag is None:
        return f"what --calculate-kv-scales does on vLLM {version} was not read"
    return f"--calculate-kv-scales is no way on vLLM {version}: {flag.reason}"


def _obstacle(version: str, command: Command, resolution: Resolution, files: CheckpointFiles, declared: Declared) -> str:
    """Why no overlay with scales can be loaded, or ""."""
    if resolution.target != FORMAT:
        return f"kvguard calibrates for {FORMAT}, the cache is {resolution.target}"
    if command.present("--quantization") and declared.quant_method is None:
        return "--quantization quantizes the weights at start, and with it an overlay's quantization_config is refused by vLLM"
    overrides = command.json_object("--hf-overrides") or {}
    if "quantization_config" in overrides:
        return "--hf-overrides replaces quantization_config, with which an overlay declares its scales"
    return why_dropped(version, files, declared)


def _calibrated(
    version: str,
    reason: str,
    resolution: Resolution,
    files: CheckpointFiles,
    declared: Declared,
    digests: Sequence[FileDigest],
    named: Path | None,
    prompts: str | None,
    command: Command,
    env: Mapping[str, str],
    *,
    write: bool,
) -> tuple[RuntimeScales, Calibration | None]:
    directory = overlays_directory(env)
    again = f"run `kvguard calibrate {command.model}` (once for all replicas), or start with --calibrate"
    if named is not None:
        found = load_calibration(named)
        if why := stale(found, digests, version, resolution.model_dtype):
            problem = f"the calibration {found.digest[:19]} is stale: {why}"
            return RuntimeScales(way="overlay", reason=reason, problem=problem, where=str(named), action=again), None
        if prompts not in (None, found.prompts):
            problem = f"the calibration {found.digest[:19]} was made with prompt set {found.prompts[:19]}"
            problem += f", --calibration-prompts is {prompts[:19] if prompts else ''}"
            return RuntimeScales(way="overlay", reason=reason, problem=problem, where=str(named), action=again), None
    else:
        all_fitting, problems = find_calibrations(directory, digests, version, resolution.model_dtype)
        fitting = [one for one in _by_digest(all_fitting, files) if prompts in (None, one.prompts)]
        if len(fitting) != 1:
            problem, action = f"no calibration of this checkpoint for vLLM {version}", f"{again}, or name one: --scales PATH"
            problem += f" with prompt set {prompts[:19]}" if prompts else ""
            problem += "".join(f"; {one}" for one in problems[:2])
            if fitting:
                names = ", ".join(one.digest[7:19] for one in fitting)
                problem = f"{len(fitting)} calibrations of this checkpoint ({names}), and which is meant is not said"
                action = "name one: --scales PATH"
            missing = not fitting
            return RuntimeScales(
                way="overlay", reason=reason, problem=problem, where=str(directory), action=action, missing=missing
            ), None
        found = fitting[0]
    home = at_home(found, files, declared, directory) if write else found
    what = f"runtime_once: calibration {home.digest[:19]}, prompt set {home.prompts[:19]}"
    return RuntimeScales(way="overlay", reason=reason, overlay=home.path, found=what, where=home.path), home


def _by_digest(found: Sequence[Calibration], files: CheckpointFiles) -> list[Calibration]:
    """One of each digest: where the same calibration stands for several places of a checkpoint, the one for this place."""
    ours = os.path.realpath(files.directory)
    chosen: dict[str, Calibration] = {}
    for one in found:
        if one.digest not in chosen or os.path.realpath(one.source) == ours:
            chosen[one.digest] = one
    return list(chosen.values())
