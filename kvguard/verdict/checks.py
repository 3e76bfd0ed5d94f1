"""Policy against what a running engine shows. Pure; worded for the person on call."""

from __future__ import annotations

from collections.abc import Iterable

from kvguard.checkpoint.models import Declared
from kvguard.evidence.tensors import extent
from kvguard.policy.models import MODEL_DTYPE, Policy, ScalesRule, allows_dtype, allows_scales, allows_version
from kvguard.vocabulary import (
    Check,
    CheckResult,
    Confidence,
    Effective,
    ScaleState,
    Source,
    canonical_dtype,
    is_quantized,
    width_bits,
)

_SHOWN_ECHOES = 3
_BROKEN_SCALES = frozenset({ScaleState.PARTIAL, ScaleState.INVALID})


def judge(
    policy: Policy | None,
    effective: Effective,
    *,
    model_dtype: str | None,
    engine_version: str | None,
    declared: Declared | None,
) -> tuple[Check, ...]:
    """Every check of a running engine. Without a policy only integrity is enforced."""
    checks = []
    if policy is not None:
        checks.append(version_check(policy, engine_version))
        checks.append(_dtype_check(policy, effective, model_dtype))
        checks.append(_confidence_check(policy, effective))
    checks.append(_scales_check(policy, effective, declared))
    checks.append(_layers_check(policy, effective))
    if policy is not None and policy.engine.attention_backend:
        checks.append(_backend_check(policy, effective))
    checks.append(_agreement_check(effective))
    return tuple(checks)


def violates(checks: Iterable[Check]) -> bool:
    """Whether the gate stays closed: an enforced check failed, or an enforced one could not be verified."""
    return any(check.enforced and check.result in (CheckResult.FAIL, CheckResult.UNVERIFIED) for check in checks)


def violations(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The checks that keep the gate closed."""
    return tuple(check for check in checks if violates((check,)))


def describe(check: Check) -> str:
    """One line: what was required, what was found, where, what to do."""
    line = f"{check.name} {check.result}: required {check.required}; found {check.found} ({check.where})"
    return f"{line}; {check.action}" if check.action else line


def required_dtypes(policy: Policy, model_dtype: str | None) -> str:
    """The policy's dtypes in words; `16bit` is shown with what it means here."""
    shown = [
        f"{MODEL_DTYPE} ({model_dtype})" if name == MODEL_DTYPE and model_dtype else name for name in policy.kv_cache.dtype
    ]
    return " or ".join(shown) if shown else "any dtype"


def version_check(policy: Policy, version: str | None) -> Check:
    """The engine's version against `engine.version`."""
    wanted = policy.engine.version
    if not wanted:
        result = CheckResult.PASS
    elif version is None:
        result = CheckResult.UNVERIFIED
    else:
        result = CheckResult.PASS if allows_version(policy, version) else CheckResult.FAIL
    return Check(
        name="engine_version",
        result=result,
        required=f"vLLM {wanted}" if wanted else "any vLLM",
        found=f"vLLM {version}" if version else "unknown",
        where="the engine's package metadata",
        action="" if result is CheckResult.PASS else "install an allowed vLLM, or change engine.version in the policy",
        enforced=bool(wanted),
    )


def _supported_by(effective: Effective) -> str:
    """Where the effective dtype was read: tensors by their number, capacity with its numbers, echoes by place."""
    claims = effective.supported_by
    layers = extent(claims)
    if layers:
        return f"cache tensors of {layers}"
    capacity = [claim.where for claim in claims if claim.source is Source.CAPACITY]
    echoes = [claim.where for claim in claims if claim.source is not Source.CAPACITY]
    rest = [f"{len(echoes) - _SHOWN_ECHOES} more"] if len(echoes) > _SHOWN_ECHOES else []
    return ", ".join((*capacity, *echoes[:_SHOWN_ECHOES], *rest)) or "no source gave information"


def _dtype_check(policy: Policy, effective: Effective, model_dtype: str | None) -> Check:
    found = effective.dtype
    width = width_bits(found)
    allowed_widths = {width_bits(model_dtype or "16-bit" if name == MODEL_DTYPE else name) for name in policy.kv_cache.dtype}
    if found == "unknown":
        result = CheckResult.UNVERIFIED
    elif allows_dtype(policy, found, model_dtype):
        result = CheckResult.PASS
    elif found.endswith("-bit") and width in allowed_widths:
        result = CheckResult.UNVERIFIED
    else:
        result = CheckResult.FAIL
    action = {
        CheckResult.PASS: "",
        CheckResult.FAIL: "start it with `kvguard serve`, which makes the dtype explicit, or change kv_cache.dtype",
        CheckResult.UNVERIFIED: "give checkpoint, KV bytes and engine log, or start it with `kvguard serve`",
        CheckResult.WARN: "",
    }[result]
    return Check(
        name="kv_cache_dtype",
        result=result,
        required=required_dtypes(policy, model_dtype),
        found=f"{found}, {effective.confidence}",
        where=_supported_by(effective),
        action=action,
        enforced=bool(policy.kv_cache.dtype),
    )


def _confidence_check(policy: Policy, effective: Effective) -> Check:
    wanted = policy.kv_cache.min_confidence
    reached = effective.confidence.reaches(wanted)
    return Check(
        name="confidence",
        result=CheckResult.PASS if reached else CheckResult.UNVERIFIED,
        required=f"at least {wanted}",
        found=str(effective.confidence),
        where=_supported_by(effective),
        action="" if reached else "start the engine with `kvguard serve` (tensors), or give KV bytes and checkpoint (capacity)",
    )


def _scales_check(policy: Policy | None, effective: Effective, declared: Declared | None) -> Check:
    """Broken scales always fail; unknown ones close the gate if the policy names a rule or the tensors were read."""
    state = effective.scales
    rule = policy.kv_cache.scales if policy is not None else ScalesRule.ANY
    named = rule is not ScalesRule.ANY
    read = effective.scales_confidence is Confidence.PROVEN or effective.confidence is Confidence.PROVEN
    if state is ScaleState.UNKNOWN:
        result = CheckResult.UNVERIFIED
    elif policy is None:
        result = CheckResult.FAIL if state in _BROKEN_SCALES else CheckResult.PASS
    else:
        result = CheckResult.PASS if allows_scales(policy, state) else CheckResult.FAIL
    detail = f": {effective.scales_detail}" if effective.scales_detail else ""
    expected = f"; the checkpoint declares {declared.scales.state}" if declared and result is not CheckResult.PASS else ""
    return Check(
        name="kv_scales",
        result=result,
        required={"any": "finite, positive scales on every quantized layer", "unit": "exactly 1.0"}.get(
            rule.value, f"{rule.value} scales"
        ),
        found=f"{state}{detail}{expected}",
        where="scale tensors in the workers" if read else "not read from outside the engine",
        action="see `kvguard inspect` for what the checkpoint's files hold" if result is CheckResult.FAIL else "",
        enforced=named or read or state in _BROKEN_SCALES,
    )


def _layers_check(policy: Policy | None, effective: Effective) -> Check:
    allowed = policy.kv_cache.skip_layers if policy is not None else ()
    stated = ", ".join(allowed) if allowed else "no layer"
    proven = effective.confidence is Confidence.PROVEN
    quantized = is_quantized(effective.dtype)
    if effective.dtype == "mixed":
        result = CheckResult.FAIL
        shown = effective.sixteen_bit_layers
        found = f"16-bit: {', '.join(shown[:6])}" + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
    elif not proven:
        result, found = CheckResult.UNVERIFIED, "layers were not read"
    else:
        result = CheckResult.PASS
        found = f"{len(effective.sixteen_bit_layers)} layers in 16 bit" if quantized else "every layer alike"
    outside = "tokens and bytes of the cache" if effective.dtype == "mixed" else "not read from outside the engine"
    return Check(
        name="skip_layers",
        result=result,
        required=f"{stated} may stay 16-bit" if policy is not None else "layers alike",
        found=found,
        where="cache tensors in the workers" if proven else outside,
        action="list intended layers in kv_cache.skip_layers of the policy" if result is CheckResult.FAIL else "",
        enforced=bool(allowed) or effective.dtype == "mixed",
    )


def _backend_check(policy: Policy, effective: Effective) -> Check:
    allowed = policy.engine.attention_backend
    found = effective.attention_backends
    if not found:
        result = CheckResult.UNVERIFIED
    else:
        result = CheckResult.PASS if set(found) <= set(allowed) else CheckResult.FAIL
    return Check(
        name="attention_backend",
        result=result,
        required=" or ".join(allowed),
        found=", ".join(found) or "not read",
        where="attention layers in the workers" if effective.confidence is Confidence.PROVEN else "engine log",
        action="" if result is CheckResult.PASS else "set --attention-backend, or change engine.attention_backend",
    )


def _agreement_check(effective: Effective) -> Check:
    """Sources that contradict each other are shown; the strongest has already decided."""
    found = "; ".join(effective.contradictions)
    return Check(
        name="agreement",
        result=CheckResult.WARN if found else CheckResult.PASS,
        required="sources that agree with each other",
        found=found or "no contradiction",
        where="all sources",
        enforced=False,
    )


def prediction_check(predicted: str, effective: Effective) -> Check:
    """A prediction that the engine contradicts is a finding about the facts, never silently overwritten."""
    known = is_quantized(effective.dtype) is not None and predicted != "unknown"
    agrees = canonical_dtype(predicted) == effective.dtype
    if not known:
        result = CheckResult.UNVERIFIED
    else:
        result = CheckResult.PASS if agrees else CheckResult.WARN
    return Check(
        name="prediction",
        result=result,
        required=f"{predicted}, as predicted from the facts",
        found=effective.dtype,
        where="facts about this vLLM version, against the evidence",
        action="report it: the facts about this vLLM version are wrong" if known and not agrees else "",
        enforced=False,
    )
