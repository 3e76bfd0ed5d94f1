"""What can be judged before any GPU time: the command, the checkpoint and this version's facts against the policy."""

from __future__ import annotations

from kvguard.checkpoint.models import Declared
from kvguard.evidence.prediction import Prediction
from kvguard.facts.versions import KNOWN, examined
from kvguard.policy.models import MODEL_DTYPE, Policy, ScalesRule, allows_dtype, allows_scales
from kvguard.verdict.checks import required_dtypes, version_check
from kvguard.verdict.runtime_scales import RuntimeScales
from kvguard.vocabulary import Check, CheckResult, ScaleState, canonical_dtype, is_quantized

_SIXTEEN_BIT = ("bfloat16", "float16")
_BROKEN = frozenset({ScaleState.PARTIAL, ScaleState.INVALID})


def judge_before_start(
    policy: Policy | None,
    *,
    prediction: Prediction,
    target: str,
    typed: str | None,
    typed_by: str,
    problem: str,
    declared: Declared,
    model_dtype: str | None,
    engine_version: str,
    typed_skip_layers: tuple[str, ...] = (),
    calculate_kv_scales: bool = False,
    runtime: RuntimeScales | None = None,
) -> tuple[Check, ...]:
    """Checks on the plan. A failed one refuses the start; what only the engine can show is left to `judge`.

    `runtime` is how runtime scales are had, where they are wanted; before that was decided there is no check of them.
    """
    checks = []
    if policy is not None:
        checks.append(version_check(policy, engine_version or None))
        checks.append(_dtype_check(policy, target, typed, typed_by, problem, model_dtype, engine_version))
    unlike = _unlike_model(typed, typed_by, model_dtype)
    if unlike is not None:
        checks.append(unlike)
    scales = _scales_check(policy, prediction, target, declared, calculate_kv_scales, runtime)
    if scales is None and not examined(engine_version):
        scales = _scales_of_files(policy, target, declared, engine_version)
    if scales is not None:
        checks.append(scales)
    if policy is not None and typed_skip_layers and is_quantized(target):
        checks.append(_skip_check(policy, typed_skip_layers))
    return tuple(checks)


def _unlike_model(typed: str | None, typed_by: str, model_dtype: str | None) -> Check | None:
    """A typed 16-bit dtype other than the model's: vLLM reads its bits as the other type, and answers are nonsense."""
    asked = canonical_dtype(typed) if typed else None
    if asked not in _SIXTEEN_BIT or model_dtype not in _SIXTEEN_BIT or asked == model_dtype:
        return None
    return Check(
        name="sixteen_bit_type",
        result=CheckResult.FAIL,
        required=f"{model_dtype}, as the model, or auto: vLLM does not convert between 16-bit types (vllm-project/vllm#54338)",
        found=f"--kv-cache-dtype {typed}",
        where=typed_by or "command",
        action=f"use --kv-cache-dtype {model_dtype} or auto, or add --dtype {asked}",
    )


def _dtype_check(
    policy: Policy, target: str, typed: str | None, typed_by: str, problem: str, model_dtype: str | None, version: str
) -> Check:
    required = required_dtypes(policy, model_dtype)
    where = typed_by if typed else "the plan: nothing was typed"
    sixteen = is_quantized(target) is False and target != "float32"
    foreign = bool(policy.kv_cache.dtype) and sixteen and model_dtype is not None and target != model_dtype
    if not policy.kv_cache.dtype:
        result, found, action = CheckResult.PASS, typed or target, ""
    elif problem:
        result, found, action = CheckResult.FAIL, problem, "change the policy, the checkpoint or the vLLM version"
    elif target != "unknown" and not allows_dtype(policy, target, model_dtype):
        result, found = CheckResult.FAIL, f"{typed or target} typed on the command" if typed else target
        action = f"remove --kv-cache-dtype {typed} from the command, or allow {target} in kv_cache.dtype"
    elif foreign:
        result = CheckResult.FAIL
        found = f"{target}, while the model itself is {model_dtype}"
        action = f"use {MODEL_DTYPE} or {model_dtype} in kv_cache.dtype: another 16-bit type loses precision and saves nothing"
    elif not examined(version):
        found = _unexamined(version) + ("" if target == "unknown" else f"; asked is {target}")
        return _undecided(required, found, "the running engine decides")
    elif target == "unknown":
        undeclared = model_dtype is None and MODEL_DTYPE in policy.kv_cache.dtype
        action = "say it with --dtype, such as --dtype bfloat16, or let the running engine decide" if undeclared else ""
        found = "the model's own dtype is not known" if undeclared else "cannot be predicted for this version"
        return _undecided(required, found, action or "the running engine decides")
    else:
        result, found, action = CheckResult.PASS, target, ""
    return Check(
        name="kv_cache_dtype",
        result=result,
        required=required,
        found=found,
        where=where,
        action=action,
        enforced=bool(policy.kv_cache.dtype),
    )


def _unexamined(version: str) -> str:
    return f"unknown: vLLM {version or '(no version)'} was not examined"


def _undecided(required: str, found: str, action: str) -> Check:
    return Check(
        name="kv_cache_dtype",
        result=CheckResult.UNVERIFIED,
        required=required,
        found=found,
        where=f"facts ({KNOWN})",
        action=action,
        enforced=False,
    )


def _scales_of_files(policy: Policy | None, target: str, declared: Declared, version: str) -> Check | None:
    """What the files alone prove about scales where the version's facts say nothing. None: runtime scales are wanted."""
    rule = policy.kv_cache.scales if policy is not None else ScalesRule.ANY
    state = declared.scales.state
    quantized = is_quantized(target)
    if rule is ScalesRule.RUNTIME:
        return None
    broken = state in _BROKEN and (quantized is True or (quantized is None and rule is ScalesRule.CHECKPOINT))
    proven = _found(state, declared) if state in _BROKEN else ""
    return Check(
        name="kv_scales",
        result=CheckResult.FAIL if broken else CheckResult.UNVERIFIED,
        required="valid scales on every layer" if rule is ScalesRule.ANY else f"{rule.value} scales",
        found=proven if broken else "; ".join(filter(None, (_unexamined(version), proven))),
        where=declared.scales.where,
        action="repair the checkpoint's scale tensors, or run the cache in 16 bit" if broken else "the running engine decides",
        enforced=broken,
    )


def _scales_check(
    policy: Policy | None,
    prediction: Prediction,
    target: str,
    declared: Declared,
    calculate: bool,
    runtime: RuntimeScales | None,
) -> Check | None:
    """Scales as this version would load them. None when only the engine can tell."""
    rule = policy.kv_cache.scales if policy is not None else ScalesRule.ANY
    state = prediction.scales
    quantized = is_quantized(target)
    required = "valid scales on every layer" if rule is ScalesRule.ANY else f"{rule.value} scales"
    where, found = declared.scales.where, _found(state, declared)
    action = ""
    if quantized and runtime is not None and (runtime.problem or rule is ScalesRule.RUNTIME):
        return runtime.check()
    if quantized and rule is ScalesRule.RUNTIME and state is not ScaleState.RUNTIME_DYNAMIC:
        return None
    if quantized and state in _BROKEN:
        result = CheckResult.FAIL
        action = "repair the checkpoint's scale tensors, or run the cache in 16 bit"
    elif state is ScaleState.UNKNOWN or calculate:
        return None
    elif policy is not None and not allows_scales(policy, state):
        result = CheckResult.FAIL
        action = {
            ScalesRule.CHECKPOINT: "use a checkpoint with calibrated scales, or set `scales: unit` to accept 1.0",
            ScalesRule.UNIT: "use a checkpoint without scale tensors, or set `scales: checkpoint`",
        }.get(rule, "change kv_cache.scales in the policy")
    else:
        result = CheckResult.PASS
    return Check(name="kv_scales", result=result, required=required, found=found, where=where, action=action)


def _found(state: ScaleState, declared: Declared) -> str:
    """The state with the layers that explain it."""
    layers = {
        ScaleState.PARTIAL: declared.scales.missing_layers,
        ScaleState.INVALID: declared.scales.invalid_layers,
    }.get(state, ())
    if not layers:
        return str(state)
    listed = ", ".join(layers[:32]) + (f" and {len(layers) - 32} more" if len(layers) > 32 else "")
    return f"{state}: {'missing' if state is ScaleState.PARTIAL else 'not finite and positive'} in {listed}"


def _skip_check(policy: Policy, typed: tuple[str, ...]) -> Check:
    extra = [entry for entry in typed if entry not in policy.kv_cache.skip_layers]
    return Check(
        name="skip_layers",
        result=CheckResult.FAIL if extra else CheckResult.PASS,
        required=f"only {', '.join(policy.kv_cache.skip_layers) or 'no layer'} may stay 16-bit",
        found=f"--kv-cache-dtype-skip-layers {' '.join(typed)}",
        where="command",
        action=f"remove {', '.join(extra)}, or list it in kv_cache.skip_layers" if extra else "",
    )
