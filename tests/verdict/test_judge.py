"""Policy against what a running engine shows: every check in each of its results."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, scales
from kvguard.policy.models import Policy
from kvguard.verdict.checks import describe, judge, prediction_check, violates, violations
from kvguard.vocabulary import Check, CheckResult, Claim, Confidence, Effective, ScaleState, Source, Stage
from launches import declared, policy

PASS, FAIL, UNVERIFIED, WARN = CheckResult.PASS, CheckResult.FAIL, CheckResult.UNVERIFIED, CheckResult.WARN
FP8 = policy("kv_cache: {dtype: fp8_e4m3}")
LAYERS = tuple(
    Claim(stage=Stage.OBSERVED, source=Source.TENSORS, field="layer_kv_cache", value="x", where=f"rank 0 layer {name}")
    for name in ("a", "b")
)


def shown(**fields: Any) -> Effective:
    """An engine proven to run fp8 with calibrated scales; `fields` replace what is shown."""
    proven = {
        "dtype": "fp8_e4m3",
        "confidence": Confidence.PROVEN,
        "scales": ScaleState.CHECKPOINT,
        "scales_confidence": Confidence.PROVEN,
        "attention_backends": ("CPU_ATTN",),
        "supported_by": LAYERS,
    }
    return Effective(**{**proven, **fields})


def judged(required: Policy | None, effective: Effective, **more: Any) -> dict[str, Check]:
    given: dict[str, Any] = {"model_dtype": "bfloat16", "engine_version": "0.32.0", "declared": None, **more}
    checks = judge(required, effective, **given)
    for check in checks:
        assert "\n" not in describe(check)
    return {check.name: check for check in checks}


def test_a_proven_engine_opens_the_gate() -> None:
    required = policy(
        "kv_cache: {dtype: fp8_e4m3, scales: checkpoint, min_confidence: proven}\nengine: {attention_backend: CPU_ATTN}"
    )
    checks = judged(required, shown())
    assert {name: check.result for name, check in checks.items()} == dict.fromkeys(
        ["engine_version", "kv_cache_dtype", "confidence", "kv_scales", "skip_layers", "attention_backend", "agreement"], PASS
    )
    assert violations(checks.values()) == ()
    assert all(not check.action for check in checks.values())


@pytest.mark.parametrize(
    ("required", "found", "result", "words"),
    [
        ("fp8_e4m3", "fp8_e4m3", PASS, ()),
        ("[bfloat16, fp8]", "fp8_e4m3", PASS, ("bfloat16 or fp8_e4m3",)),
        ("16bit", "bfloat16", PASS, ("16bit (bfloat16)",)),
        ("16bit", "float16", FAIL, ("found float16",)),
        ("bfloat16", "fp8_e4m3", FAIL, ("required bfloat16", "found fp8_e4m3, proven", "2 layers", "`kvguard serve`")),
        ("bfloat16", "mixed", FAIL, ("mixed",)),
        ("fp8_e4m3", "unknown", UNVERIFIED, ("unknown", "give checkpoint, KV bytes")),
        ("fp8_e4m3", "8-bit", UNVERIFIED, ("8-bit",)),
        ("fp8_e4m3", "16-bit", FAIL, ("16-bit",)),
        ("16bit", "16-bit", UNVERIFIED, ("16-bit",)),
        ("16bit", "8-bit", FAIL, ("8-bit",)),
    ],
)
def test_dtype(required: str, found: str, result: CheckResult, words: tuple[str, ...]) -> None:
    check = judged(policy(f"kv_cache: {{dtype: {required}}}"), shown(dtype=found))["kv_cache_dtype"]
    assert check.result is result
    assert violates((check,)) is (result is not PASS)
    for word in words:
        assert word in describe(check)


def test_sixteen_bit_while_the_models_dtype_is_unknown() -> None:
    required = policy("kv_cache: {dtype: 16bit}")
    assert judged(required, shown(dtype="16-bit"), model_dtype=None)["kv_cache_dtype"].result is UNVERIFIED
    assert judged(required, shown(dtype="8-bit"), model_dtype=None)["kv_cache_dtype"].result is FAIL


def test_a_policy_without_a_dtype_takes_any() -> None:
    for dtype in ("fp8_e4m3", "unknown"):
        check = judged(policy("kv_cache: {scales: any}"), shown(dtype=dtype))["kv_cache_dtype"]
        assert not violates((check,))
        assert check.required == "any dtype"


@pytest.mark.parametrize("reached", list(Confidence))
@pytest.mark.parametrize("wanted", ["proven", "corroborated", "echoed"])
def test_confidence(wanted: str, reached: Confidence) -> None:
    check = judged(policy(f"kv_cache: {{min_confidence: {wanted}}}"), shown(confidence=reached))["confidence"]
    assert check.result is (PASS if reached.rank >= Confidence(wanted).rank else UNVERIFIED)
    assert violates((check,)) is (check.result is not PASS)
    assert (check.required, check.found) == (f"at least {wanted}", reached.value)


BROKEN = (ScaleState.PARTIAL, ScaleState.INVALID)


@pytest.mark.parametrize("state", list(ScaleState))
@pytest.mark.parametrize("rule", ["checkpoint", "unit", "runtime", "any"])
def test_scales_by_rule(rule: str, state: ScaleState) -> None:
    met = {
        "checkpoint": {ScaleState.CHECKPOINT},
        "unit": {ScaleState.UNIT_DECLARED, ScaleState.UNIT_DEFAULT},
        "runtime": {ScaleState.RUNTIME_ONCE, ScaleState.RUNTIME_DYNAMIC},
        "any": set(ScaleState) - {*BROKEN, ScaleState.UNKNOWN},
    }[rule]
    check = judged(policy(f"kv_cache: {{dtype: fp8, scales: {rule}}}"), shown(scales=state))["kv_scales"]
    assert check.result is (UNVERIFIED if state is ScaleState.UNKNOWN else PASS if state in met else FAIL)
    assert violates((check,)) is (state not in met)


@pytest.mark.parametrize("state", list(ScaleState))
def test_scales_without_a_policy(state: ScaleState) -> None:
    checks = judged(None, shown(scales=state))
    assert set(checks) == {"kv_scales", "skip_layers", "agreement"}
    result = FAIL if state in BROKEN else UNVERIFIED if state is ScaleState.UNKNOWN else PASS
    assert checks["kv_scales"].result is result
    assert violates(checks.values()) is (result is not PASS)


def test_scales_that_cannot_be_read_from_outside_close_the_gate_only_where_a_rule_is_named() -> None:
    outside = shown(
        scales=ScaleState.UNKNOWN, scales_confidence=Confidence.UNKNOWN, confidence=Confidence.CORROBORATED, supported_by=()
    )
    any_rule = judged(FP8, outside)["kv_scales"]
    assert (any_rule.result, any_rule.enforced, any_rule.where) == (UNVERIFIED, False, "not read from outside the engine")
    named = judged(policy("kv_cache: {dtype: fp8, scales: unit}"), outside)["kv_scales"]
    assert violates((named,))
    assert named.required == "exactly 1.0"


def test_broken_scales_say_where_and_what_the_checkpoint_declares() -> None:
    files = declared({**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(30)))
    effective = shown(scales=ScaleState.INVALID, scales_detail="rank 0 layer a: device 1.0, host 0.05")
    check = judged(FP8, effective, declared=files)["kv_scales"]
    assert check.result is FAIL
    for words in (
        "required finite, positive scales on every quantized layer",
        "invalid: rank 0 layer a: device 1.0, host 0.05; the checkpoint declares checkpoint",
        "scale tensors in the workers",
        "kvguard inspect",
    ):
        assert words in describe(check)


@pytest.mark.parametrize(
    ("skip", "fields", "result", "enforced", "words"),
    [
        ("[]", {}, PASS, False, ("no layer may stay 16-bit", "0 layers in 16 bit")),
        ("['0']", {"sixteen_bit_layers": ("a",)}, PASS, True, ("0 may stay 16-bit", "1 layers in 16 bit")),
        ("[]", {"dtype": "bfloat16"}, PASS, False, ("every layer alike",)),
        ("[]", {"confidence": Confidence.CORROBORATED}, UNVERIFIED, False, ("layers were not read",)),
        ("['0']", {"confidence": Confidence.CORROBORATED}, UNVERIFIED, True, ("not read from outside",)),
        (
            "[]",
            {"dtype": "mixed", "sixteen_bit_layers": tuple("abcdefgh")},
            FAIL,
            True,
            ("16-bit: a, b, c, d, e, f and 2 more", "list intended layers in kv_cache.skip_layers"),
        ),
    ],
)
def test_layers(skip: str, fields: dict[str, Any], result: CheckResult, enforced: bool, words: tuple[str, ...]) -> None:
    check = judged(policy(f"kv_cache: {{dtype: fp8, skip_layers: {skip}}}"), shown(**fields))["skip_layers"]
    assert (check.result, check.enforced) == (result, enforced)
    for word in words:
        assert word in describe(check)


@pytest.mark.parametrize(
    ("backends", "result"),
    [(("CPU_ATTN",), PASS), (("CPU_ATTN", "OTHER"), FAIL), (("TRITON_ATTN",), FAIL), ((), UNVERIFIED)],
)
def test_backend(backends: tuple[str, ...], result: CheckResult) -> None:
    required = policy("engine: {attention_backend: [CPU_ATTN, FLASH_ATTN]}")
    check = judged(required, shown(attention_backends=backends))["attention_backend"]
    assert check.result is result
    assert violates((check,)) is (result is not PASS)
    assert "CPU_ATTN or FLASH_ATTN" in describe(check) or "CPU_ATTN, FLASH_ATTN" in describe(check)
    assert all(name in describe(check) for name in backends)


def test_contradictions_are_shown_and_do_not_close_the_gate() -> None:
    check = judged(FP8, shown(contradictions=("log says auto", "metrics say fp8")))["agreement"]
    assert (check.result, check.found) == (WARN, "log says auto; metrics say fp8")
    assert not violates((check,))


@pytest.mark.parametrize(
    ("predicted", "found", "result"),
    [
        ("fp8_e4m3", "fp8_e4m3", PASS),
        ("fp8", "fp8_e4m3", PASS),
        ("bfloat16", "fp8_e4m3", WARN),
        ("unknown", "fp8_e4m3", UNVERIFIED),
        ("fp8_e4m3", "unknown", UNVERIFIED),
        ("fp8_e4m3", "mixed", UNVERIFIED),
    ],
)
def test_the_prediction_is_a_claim_about_the_facts(predicted: str, found: str, result: CheckResult) -> None:
    check = prediction_check(predicted, shown(dtype=found))
    assert check.result is result
    assert not violates((check,))
    assert bool(check.action) is (result is WARN)


def test_only_enforced_failures_and_unknowns_close_the_gate() -> None:
    def check(result: CheckResult, enforced: bool) -> Check:
        return Check(name="x", result=result, required="r", found="f", where="w", enforced=enforced)

    assert {result: violates((check(result, True),)) for result in CheckResult} == {
        PASS: False, FAIL: True, WARN: False, UNVERIFIED: True
    }  # fmt: skip
    assert not any(violates((check(result, False),)) for result in CheckResult)
    assert describe(check(FAIL, True)) == "x fail: required r; found f (w)"
