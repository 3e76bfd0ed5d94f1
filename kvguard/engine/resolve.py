"""From what was typed, declared and required to the one KV dtype the engine is told to run.

Explicit wherever this version honours it; where it does not, `auto` is kept if that gives what is required,
else the checkpoint's scheme is stripped, else the start is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kvguard.checkpoint.models import Declared
from kvguard.engine.command import Command
from kvguard.evidence.prediction import Prediction, predict
from kvguard.evidence.question import model_dtype_declared
from kvguard.facts import cli_flags, kv_dtypes
from kvguard.facts.devices import Device
from kvguard.files import printable
from kvguard.policy.models import Policy
from kvguard.vocabulary import Frozen, UsageError, canonical_dtype, is_quantized

_DTYPE_WORDS = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}


class Resolution(Frozen):
    """The KV dtype of the plan.

    `target` is what the engine shall run ("unknown" if nothing can be said); `stated` is the value written
    into the command, None when the command stays as it is; `prediction` is what this version makes of it.
    `typed_by` names where a typed value was read. `problem` says why the target cannot be made to hold.
    """

    target: str
    stated: str | None
    reason: str
    prediction: Prediction
    typed: str | None
    typed_by: str
    model_dtype: str | None
    strip_scheme: bool = False
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    problem: str = ""


def model_dtype_of(command: Command, declared: Declared, device: Device | None = None) -> str | None:
    """The model's own dtype: `--dtype`, else the checkpoint's as it runs on `device`.

    A float32 checkpoint under `auto` depends on the platform (vLLM picks a 16-bit type), so it is None.
    """
    typed = command.value("--dtype")
    if typed and typed != "auto":
        return _DTYPE_WORDS.get(typed)
    own, _ = model_dtype_declared(command.version, declared, device)
    return own if own in ("bfloat16", "float16") else None


def check_typed(command: Command, version: str) -> None:
    """Reject what vLLM's own parser would reject about the KV cache and about numbers. Raises UsageError (exit 2)."""
    for flag in cli_flags.numeric_flags():
        number = command.last(flag)
        wrong = cli_flags.number_problem(version, flag, number.values[-1]) if number and number.values else ""
        if number and wrong:
            raise UsageError(f"{number.where}: {flag} {printable(number.values[-1])!r}: {wrong}")
    typed = command.last("--kv-cache-dtype")
    accepted = kv_dtypes.accepted(version)
    if typed is None or not typed.values or accepted is None or typed.values[-1] in accepted:
        return
    value = typed.values[-1]
    elsewhere = kv_dtypes.versions_accepting(value)
    raise UsageError(
        f"{typed.where}: vLLM {version} does not know the KV cache dtype {value!r} and would exit; "
        + (f"vLLM {elsewhere} does; " if elsewhere else "no examined vLLM does; ")
        + f"this version knows {', '.join(accepted)}"
    )


def resolve(
    command: Command,
    version: str,
    declared: Declared,
    policy: Policy | None,
    quantization_config: Mapping[str, Any],
    *,
    platform: str | None = None,
    calculate: bool | None = None,
    device: Device | None = None,
) -> Resolution:
    """Decide the KV dtype. Never raises for a policy conflict: `problem` carries it, for the record.

    `quantization_config` is the checkpoint's block as written, for the case that its KV scheme must be stripped;
    `platform` is "cpu" for a CPU build; `calculate` whether --calculate-kv-scales will be on, None: as written;
    `device` decides the model's own dtype where that depends on it.
    """
    use = command.last("--kv-cache-dtype")
    written = use.values[-1] if use and use.values else None
    typed = None if written in (None, "auto") else written
    typed_by = use.where if use else ""
    model_dtype = model_dtype_of(command, declared, device)
    calculated = command.present("--calculate-kv-scales") if calculate is None else calculate

    def predicted(value: str | None, files: Declared = declared) -> Prediction:
        return predict(version, value, files, model_dtype=model_dtype, calculate_kv_scales=calculated, platform=platform)

    required = _required(policy, model_dtype)
    as_written = predicted(typed)

    def outcome(target: str, reason: str, *, prediction: Prediction, **more: Any) -> Resolution:
        return Resolution(
            target=target,
            reason=reason,
            prediction=prediction,
            typed=typed,
            typed_by=typed_by,
            model_dtype=model_dtype,
            **{"stated": None, **more},
        )

    if typed is not None:
        target = canonical_dtype(typed)
        if as_written.explicit_honoured is not False:
            return outcome(target, "as typed", prediction=as_written)
    elif policy is None or not policy.kv_cache.dtype:
        target = as_written.dtype
        if target == "unknown":
            return outcome(target, "left as written: " + as_written.reason, prediction=as_written)
    elif as_written.dtype in required:
        target = as_written.dtype
    elif required:
        target = required[0]
    else:
        return outcome(
            "unknown",
            "left as written",
            prediction=as_written,
            problem=_unknown_model_dtype(command, declared),
        )

    explicit = predicted(target)
    accepted = kv_dtypes.accepted(version)
    if explicit.explicit_honoured is not False and (accepted is None or target in accepted):
        reason = (
            f"the policy requires it; as written, {as_written.reason}"
            if policy is not None and policy.kv_cache.dtype
            else f"made explicit: {as_written.reason}"
        )
        stated = None if typed is not None else target
        return outcome(target, reason, prediction=explicit, stated=stated)
    automatic = predicted(None)
    if automatic.dtype == target:
        stated = None if typed is None else "auto"
        reason = f"kept at auto, which gives {target}: {explicit.reason}"
        return outcome(target, reason, prediction=automatic, stated=stated)
    if declared.kv_scheme is not None and declared.kv_scheme.producer == "compressed-tensors":
        bare = declared.model_copy(update={"kv_scheme": None})
        stripped = predicted(None, bare)
        if stripped.dtype == target:
            return outcome(
                target,
                f"the checkpoint's scheme is stripped, because {explicit.reason}",
                prediction=stripped,
                stated="auto" if typed is not None else None,
                strip_scheme=True,
                hf_overrides=_overrides_without_scheme(command, quantization_config),
            )
    known = f"vLLM {version} accepts {', '.join(accepted)}" if accepted else explicit.reason
    return outcome(
        target,
        "cannot be stated",
        prediction=as_written,
        problem=f"{target} cannot be had on vLLM {version}: {explicit.reason or known}"
        + (f"; {known}" if accepted and target not in accepted else ""),
    )


def _unknown_model_dtype(command: Command, declared: Declared) -> str:
    """Why a 16bit cache is out of reach of a model whose dtype is not 16 bit, "" where only the engine can tell what it is."""
    typed = command.value("--dtype") not in (None, "auto")
    if not typed and (declared.model_dtype in (None, "bfloat16", "float16") or declared.model_dtype_inferred):
        return ""
    return (
        "the policy asks for 16bit, and the model's own dtype is not known from config.json or --dtype; "
        "say it, such as --dtype bfloat16"
    )


def _required(policy: Policy | None, model_dtype: str | None) -> list[str]:
    if policy is None:
        return []
    names = [model_dtype if name == "16bit" else canonical_dtype(name) for name in policy.kv_cache.dtype]
    return [name for name in names if name]


def _overrides_without_scheme(command: Command, quantization_config: Mapping[str, Any]) -> dict[str, Any]:
    """--hf-overrides that replace the checkpoint's quantization_config by itself without the KV scheme."""
    overrides = command.json_object("--hf-overrides") or {}
    typed = overrides.get("quantization_config")
    quantization = typed if isinstance(typed, Mapping) else quantization_config
    kept = {key: value for key, value in quantization.items() if key != "kv_cache_scheme"}
    return {**overrides, "quantization_config": kept}


def runs_quantized(resolution: Resolution) -> bool:
    """Whether the plan's cache is narrower than 16 bit."""
    return bool(is_quantized(resolution.target))
