"""What counts as drift, what only makes a verdict stale, and when an engine becomes unready for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.evidence.replies import TensorReading, parse_replies
from kvguard.guard.drift import FIELDS, Drift, Established, awaits_confirmation, compare, consider, established, unready
from kvguard.policy.models import DriftPolicy, OnDrift
from kvguard.vocabulary import KV_DTYPES, Check, CheckResult, Confidence, Effective, ScaleState

ALERT = DriftPolicy()
UNREADY = DriftPolicy(action=OnDrift.UNREADY)


def run(dtype: str = "fp8_e4m3", confidence: str = "proven", scales: str = "checkpoint", **more: Any) -> Established:
    members = {name: more.pop(name) for name in ("engine_version", "scale_values", "failed") if name in more}
    effective = Effective(dtype=dtype, confidence=Confidence(confidence), scales=ScaleState(scales), **more)
    return Established(effective=effective, **members)


def reading_of(k: float) -> TensorReading:
    """One rank with one layer, whose key scale is `k`."""
    layer = {
        "name": "l.0",
        "class": "Attention",
        "kv_cache_dtype": "fp8",
        "tensor_dtype": "torch.uint8",
        "k_scale": [k],
        "v_scale": [1],
    }
    return parse_replies({"replies": [{"nonce": "n", "rank": 0, "layers": [layer]}], "expected_ranks": 1}, "n")


FP8, SIXTEEN = run(), run("bfloat16", scales="not_quantized")


@pytest.mark.parametrize(
    ("after", "fields"),
    [
        (FP8, []),
        (SIXTEEN, ["kv_cache_dtype", "kv_scales"]),
        (run("mixed"), ["kv_cache_dtype"]),
        (run(scales="invalid"), ["kv_scales"]),
        (run(scales="unknown"), []),
        (run("8-bit", "corroborated", "unknown"), []),
        (run("16-bit", "corroborated", "unknown"), ["kv_cache_dtype"]),
        (run("fp8_e5m2", "echoed", "unknown"), ["kv_cache_dtype"]),
        (run("unknown", "unknown", "unknown"), []),
        (run(sixteen_bit_layers=("0",)), ["sixteen_bit_layers"]),
        (run(failed=("kv_scales",)), ["policy"]),
    ],
)
def test_what_differs(after: Established, fields: list[str]) -> None:
    assert [change.field for change in compare(FP8, after)] == fields


def test_what_only_one_of_two_knows_is_no_drift() -> None:
    known = run(engine_version="0.32.0", scale_values="sha256:a", attention_backends=("CPU_ATTN",))
    assert compare(known, FP8) == compare(FP8, known) == ()
    other = run(engine_version="0.27.1", scale_values="sha256:b", attention_backends=("X",))
    assert [change.field for change in compare(known, other)] == ["scale_values", "attention_backend", "engine_version"]
    assert compare(known, other)[2].model_dump() == {"field": "engine_version", "before": "0.32.0", "after": "0.27.1"}


def test_a_violation_that_was_known_is_no_drift() -> None:
    assert compare(run(failed=("kv_scales",)), run(failed=("kv_scales",))) == ()
    [change] = compare(run(failed=("kv_scales",)), run(failed=("kv_cache_dtype", "kv_scales")))
    assert change.after == "kv_cache_dtype violated"


def test_scales_of_the_same_state_with_other_values_are_drift() -> None:
    def of(k: float) -> Established:
        effective = Effective(dtype="fp8_e4m3", confidence=Confidence.PROVEN, scales=ScaleState.CHECKPOINT)
        return established(effective, (), engine_version="", tensors=reading_of(k))

    assert compare(of(0.05), of(0.05 * (1 + 1e-9))) == ()
    assert [change.field for change in compare(of(0.05), of(0.06))] == ["scale_values"]


def test_only_enforced_checks_that_fail_count() -> None:
    def check(name: str, result: CheckResult, enforced: bool = True) -> Check:
        return Check(name=name, result=result, required="", found="", where="", enforced=enforced)

    checks = (
        check("a", CheckResult.FAIL),
        check("b", CheckResult.UNVERIFIED),
        check("c", CheckResult.FAIL, enforced=False),
        check("d", CheckResult.PASS),
    )
    assert established(Effective(), checks, engine_version="", tensors=None).failed == ("a",)


# Fail-static


@pytest.mark.parametrize(
    "after", [None, run("unknown", "unknown", "unknown"), run("8-bit", "corroborated", "unknown"), run(scales="unknown")]
)
def test_failing_to_read_keeps_the_verdict_and_goes_stale(after: Established | None) -> None:
    before = consider(Drift(), FP8, SIXTEEN, "", UNREADY)
    now = consider(before, FP8, after, "no answer", UNREADY)
    assert (now.changes, now.in_a_row, now.counts) == (before.changes, before.in_a_row, before.counts)
    assert now.stale
    assert consider(now, FP8, FP8, "", UNREADY).stale == ""


def test_why_it_is_stale_is_said() -> None:
    assert consider(Drift(), FP8, None, "tensors: no answer", ALERT).stale == "tensors: no answer"
    weak = run("8-bit", "corroborated", "unknown")
    said = consider(Drift(), FP8, weak, "tensors: no answer", ALERT).stale
    assert said == "the KV cache dtype was proven, and is only corroborated now; tensors: no answer"


def test_drift_counts_once_for_each_time_it_begins() -> None:
    drift = Drift()
    for after in (SIXTEEN, SIXTEEN, None, SIXTEEN, FP8, SIXTEEN):
        drift = consider(drift, FP8, after, "", ALERT)
    assert drift.counts == {"kv_cache_dtype": 2, "kv_scales": 2}
    assert drift.words() == "kv_cache_dtype: fp8_e4m3 was established, now bfloat16; " + (
        "kv_scales: checkpoint was established, now not_quantized"
    )


def test_unready_takes_two_proven_findings_in_a_row() -> None:
    once = consider(Drift(), FP8, SIXTEEN, "", UNREADY)
    assert awaits_confirmation(once, UNREADY)
    assert not awaits_confirmation(once, ALERT)
    assert unready(once, UNREADY) == ""
    twice = consider(once, FP8, SIXTEEN, "", UNREADY)
    assert unready(twice, UNREADY).startswith("drift: kv_cache_dtype: fp8_e4m3 was established, now bfloat16")
    assert unready(twice, ALERT) == ""
    assert unready(consider(twice, FP8, FP8, "", UNREADY), UNREADY) == ""
    broken = consider(consider(once, FP8, FP8, "", UNREADY), FP8, SIXTEEN, "", UNREADY)
    assert unready(broken, UNREADY) == ""


def test_weaker_evidence_alerts_and_makes_nothing_unready_unless_the_policy_says_so() -> None:
    seen = run("bfloat16", "corroborated", "not_quantized")
    drift = Drift()
    for _ in range(3):
        drift = consider(drift, run(confidence="corroborated"), seen, "", UNREADY)
    assert drift.changes
    assert unready(drift, UNREADY) == ""
    trusting = DriftPolicy(action=OnDrift.UNREADY, min_confidence=Confidence.CORROBORATED)
    for _ in range(2):
        drift = consider(drift, run(confidence="corroborated"), seen, "", trusting)
    assert unready(drift, trusting)


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.builds(
                run,
                st.sampled_from([*KV_DTYPES, "8-bit", "16-bit", "mixed", "unknown"]),
                st.sampled_from([one.value for one in Confidence]),
                st.sampled_from([one.value for one in ScaleState]),
            ),
        ),
        max_size=12,
    )
)
def test_no_history_makes_an_engine_unready_without_two_proven_findings_at_its_end(history: list[Established | None]) -> None:
    drift = Drift()
    for after in history:
        drift = consider(drift, FP8, after, "", UNREADY)
        assert set(drift.counts) <= set(FIELDS)
    read = [one for one in history if one is not None and (compare(FP8, one) or one.effective.confidence == "proven")]
    if unready(drift, UNREADY):
        assert all(one.effective.confidence == "proven" and compare(FP8, one) for one in read[-2:])
