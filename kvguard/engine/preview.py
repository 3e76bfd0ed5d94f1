"""What one command and one checkpoint become on a vLLM version: the upgrade preview, and the static half of a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvguard.checkpoint.declared import declare, written_config
from kvguard.checkpoint.geometry import bytes_per_token
from kvguard.checkpoint.models import CheckpointFiles, Declared
from kvguard.engine.command import Command, parse_command, split_words
from kvguard.engine.plan import degraded_modes, refused_modes
from kvguard.engine.resolve import Resolution, check_typed, model_dtype_of, resolve
from kvguard.evidence.prediction import Prediction, predict
from kvguard.facts.devices import Device, model_dtype_rule
from kvguard.facts.versions import EXAMINED, KNOWN, OLDEST_GUARDED, examined, plain_version, too_old
from kvguard.policy.models import Policy, ScalesRule
from kvguard.verdict.before_start import judge_before_start
from kvguard.verdict.runtime_scales import RuntimeScales
from kvguard.vocabulary import Check, CheckResult, Frozen, ScaleState, UsageError


class Outcome(Frozen):
    """One version's answer. `problem`: why vLLM's parser or its start would refuse; then the rest says nothing.

    `dtype` and `scales` are what runs, `echo` what log and metrics show, `bytes_per_token` of the whole model.
    """

    version: str
    problem: str = ""
    dtype: str = "unknown"
    scales: str = "unknown"
    echo: str | None = None
    honoured: bool | None = None
    bytes_per_token: float | None = None
    reason: str = ""


def full_version(text: str) -> str:
    """An examined version from a text such as "0.22", which means the newest patch of it that was examined.

    Any other version is returned in its plain spelling: it is recognised, and everything about it is unknown.
    """
    text = plain_version(text)
    patches = [version for version in EXAMINED if version.startswith(text + ".")]
    return patches[-1] if patches and text.count(".") == 1 else text


def preview(
    argv: Sequence[str],
    version: str,
    files: CheckpointFiles,
    read: Callable[[str], bytes],
    device: Device | None = None,
) -> Outcome:
    """What this version makes of the command. Never raises for what the version refuses: `problem` says it.

    `read` returns the bytes of the command's --config file.
    """
    try:
        command = parse_command(split_words(argv), version, read)
        check_typed(command, version)
        declared = declare(files, command.json_object("--hf-overrides"))
    except UsageError as error:
        return Outcome(version=version, problem=str(error))
    found = _predicted(command, version, declared, command.value("--kv-cache-dtype"), device)
    return Outcome(
        version=version,
        problem=found.reason.removeprefix("expected not to start: ") if found.fails else "",
        dtype=found.dtype,
        scales=found.scales.value,
        echo=found.echo,
        honoured=found.explicit_honoured,
        bytes_per_token=bytes_per_token(declared.geometry, found.dtype),
        reason=found.reason,
    )


def _predicted(command: Command, version: str, declared: Declared, typed: str | None, device: Device | None) -> Prediction:
    return predict(
        version,
        typed,
        declared,
        model_dtype=model_dtype_of(command, declared, device),
        calculate_kv_scales=command.present("--calculate-kv-scales"),
        device=device,
    )


def differences(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """What changes from each version to the next, one sentence a field."""
    found = []
    for before, after in pairwise(outcomes):
        pair = f"{before.version} → {after.version}"
        if not (examined(before.version) and examined(after.version)):
            found.append(f"{pair}: unknown, because the facts cover {KNOWN}")
            continue
        if bool(before.problem) != bool(after.problem):
            runs = f"starts, with a KV cache of {after.dtype}{', not as typed' if after.honoured is False else ''}"
            found.append(f"{pair}: {f'no longer starts: {after.problem}' if after.problem else runs}")
            continue
        for field, name in (("dtype", "KV cache"), ("scales", "scales"), ("echo", "log and metrics show")):
            old, new = getattr(before, field), getattr(after, field)
            if old != new and not after.problem:
                found.append(f"{pair}: {name} {old or 'unknown'} → {new or 'unknown'}")
        if before.honoured != after.honoured and after.honoured is False and not after.problem:
            found.append(f"{pair}: the typed value is not what runs any more")
    return tuple(found)


class StaticVerdict(Frozen):
    """What can be judged without an engine. `checks` are those of a start, with the device's where one is named."""

    command: Command
    declared: Declared
    resolution: Resolution
    checks: tuple[Check, ...]
    degraded: tuple[str, ...]


def judge_statically(
    argv: Sequence[str],
    version: str,
    policy: Policy | None,
    files: CheckpointFiles,
    read: Callable[[str], bytes],
    env: Mapping[str, str],
    device: Device | None = None,
    runtime: Callable[[Command, Declared, Resolution], RuntimeScales | None] | None = None,
) -> StaticVerdict:
    """The checks before a start, from the command, the files and this version's facts.

    `runtime` decides how runtime scales are had, None where they are not wanted; without it that is left to the start.
    UsageError for what vLLM's parser would reject, and for launch modes that are not guarded.
    """
    words = split_words(argv)
    if words.subcommand != "serve":
        raise UsageError(f"`vllm {words.subcommand}`: required is `vllm serve MODEL …`")
    if too_old(version):
        raise UsageError(f"vLLM {version}: kvguard serve needs {OLDEST_GUARDED} or newer; name such a version, and install it")
    command = parse_command(words, version, read)
    for mode in refused_modes(command, env):
        raise UsageError(f"launch mode {mode.id}: not guarded, because {mode.because}; {mode.do}")
    check_typed(command, version)
    declared = declare(files, command.json_object("--hf-overrides"))
    _, written = written_config(files)
    block: Any = written.get("quantization_config") or written.get("compression_config") or {}
    platform = device.platform if device else None
    block = block if isinstance(block, dict) else {}
    resolution = resolve(command, version, declared, policy, block, platform=platform, device=device)
    decided = runtime(command, declared, resolution) if runtime is not None else None
    if decided is not None and not decided.problem:
        promised = resolution.prediction.model_copy(update={"scales": ScaleState.RUNTIME_ONCE})
        resolution = resolution.model_copy(update={"prediction": promised})
    checks = judge_before_start(
        policy,
        prediction=resolution.prediction,
        target=resolution.target,
        typed=resolution.typed,
        typed_by=resolution.typed_by,
        problem=resolution.problem,
        declared=declared,
        model_dtype=resolution.model_dtype,
        engine_version=version,
        typed_skip_layers=command.values("--kv-cache-dtype-skip-layers"),
        calculate_kv_scales=command.present("--calculate-kv-scales"),
        runtime=decided,
    )
    more = [_start_check(command, version, declared, resolution, device)]
    if not any(check.name == "kv_scales" for check in checks):
        more.append(_scales_left(policy, resolution.prediction))
    return StaticVerdict(
        command=command,
        declared=declared,
        resolution=resolution,
        checks=(*checks, *more),
        degraded=tuple(f"{mode.id}: {mode.because}" for mode in degraded_modes(command, env)),
    )


def _scales_left(policy: Policy | None, prediction: Prediction) -> Check:
    """Scales that only a running engine shows."""
    rule = policy.kv_cache.scales if policy is not None else ScalesRule.ANY
    why = next((claim.note for claim in prediction.claims if claim.field == "scales"), "") or prediction.reason
    known = f"{prediction.scales}{'' if prediction.scales is ScaleState.UNKNOWN else ' is expected'}: {why}"
    runtime = rule is ScalesRule.RUNTIME
    return Check(
        name="kv_scales",
        result=CheckResult.UNVERIFIED,
        required="valid scales on every layer" if rule is ScalesRule.ANY else f"{rule.value} scales",
        found="decided when the engine starts: by its flag, or by a calibration that fits" if runtime else known,
        where="kvguard serve",
        action="" if runtime else "the running engine decides",
        enforced=False,
    )


def _start_check(command: Command, version: str, declared: Declared, resolution: Resolution, device: Device | None) -> Check:
    """Whether the facts expect such an engine to start, on the device where one is named."""
    if resolution.strip_scheme:
        declared = declared.model_copy(update={"kv_scheme": None})
    found = _predicted(command, version, declared, resolution.stated or resolution.typed, device)
    rule = model_dtype_rule(version, device, resolution.model_dtype, declared.model_type)
    if rule is not None and rule.typed_fails and not found.fails:
        typed = command.value("--dtype")
        reason = f"expected not to start with --dtype {typed}: {rule.reason} unless that is typed (instead: {rule.do})"
        found = found.model_copy(update={"dtype": "unknown", "fails": True, "reason": reason})
    name = f"vLLM {version}" + (f" on {device.name}" if device else "")
    if found.fails:
        result, action = CheckResult.FAIL, "change the command, the checkpoint, the version or the device"
    elif found.dtype == "unknown":
        result, action = CheckResult.UNVERIFIED, "" if device else "name the device with --device"
    else:
        result, action = CheckResult.PASS, ""
    return Check(
        name="start",
        result=result,
        required=f"{name} starts with this cache",
        found=found.reason if result is not CheckResult.PASS else found.dtype,
        where=f"facts ({KNOWN})",
        action=action,
        enforced=found.fails,
    )
