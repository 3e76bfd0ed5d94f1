from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvguard.record.build import RecordInput, build_record
from kvguard.record.diff import diff_records
from kvguard.record.statement import Statement
from kvguard.vocabulary import CheckResult, Claim, ScaleState, Source, Stage
from record_samples import layer, sample

BASE = build_record(sample())


def differences(other: RecordInput) -> dict[str, tuple[Any, Any]]:
    return {item.path: (item.a, item.b) for item in diff_records(BASE, build_record(other))}


def test_equal_starts_do_not_differ() -> None:
    assert differences(sample(directory="/other/trap", line=99, pid=1, port=9, undigested={"a": 1})) == {}


def test_another_dtype_is_one_line_an_account() -> None:
    found = differences(sample(dtype="bfloat16", scales=ScaleState.NOT_QUANTIZED))
    assert found["effective.dtype"] == ("fp8_e4m3", "bfloat16")
    assert found["effective.scales"] == ("checkpoint", "not_quantized")
    assert found["predicted.facts.kv_cache_dtype"] == ("fp8_e4m3", "bfloat16")
    assert found["observed.tensors.kv_cache_dtype"] == ("fp8_e4m3", "bfloat16")
    assert found["layers.kv_cache_dtype (3 of 3)"] == ("fp8_e4m3", "bfloat16")
    assert found["checks.dtype"][1] == "pass: required fp8_e4m3, found bfloat16"
    assert found["scales_digest"][1] is None
    assert next(iter(found)) == "effective.dtype"
    assert found["observed.capacity.kv_cache_dtype"] == ("8-bit", "16-bit")
    assert found["effective.contradictions"][1][1].startswith("… bytes per token are 16-bit")
    assert len(found) == 9


def test_sizes_are_told_only_where_the_width_differs() -> None:
    assert differences(sample(size=1 << 31, tokens=200_000)) == {}
    found = differences(sample(dtype="bfloat16", size=1 << 31, tokens=93_184))
    assert found["effective.kv_bytes"] == (1 << 30, 1 << 31)
    assert found["effective.bytes_per_token"] == (11522.8, 23045.6)
    assert found["observed.tensors.kv_memory_bytes"] == (1 << 30, 1 << 31)
    assert "effective.kv_tokens" not in found
    assert "layers.shape (3 of 3)" not in found
    found = differences(sample(dtype="bfloat16", tokens=46_592))
    assert found["layers.shape (3 of 3)"] == ([728, 3, 128, 128], [364, 3, 128, 128])


def test_scales_engine_checks_subjects_and_command() -> None:
    other = sample(
        layers=[layer(0, 0.06), layer(1, 0.07), layer(2)],
        version="0.31.0",
        result=CheckResult.FAIL,
        extra_argv=("--max_num_seqs", "8", "-O3"),
    )
    found = differences(other.model_copy(update={"subjects": other.subjects[1:], "verdict": "refuse"}))
    assert found["layers.k_scale (2 of 3)"] == ([0.05], [[0.06], [0.07]])
    assert found["engine.version"] == ("0.32.0", "0.31.0")
    assert found["verdict"] == ("serve", "refuse")
    assert found["argv.--max-num-seqs"] == (None, "8")
    assert found["argv.-O3"] == (None, True)
    assert found["subject.config.json"] == ("sha256:" + "a" * 64, None)
    assert found["checks.dtype"][1].startswith("fail:")
    assert "scales_digest" in found


def test_the_order_and_spelling_of_options_do_not_matter() -> None:
    a = build_record(sample(extra_argv=("--max-num-seqs", "8", "--dtype=bfloat16")))
    b = build_record(sample(extra_argv=("--dtype", "bfloat16", "--max_num_seqs=8")))
    assert [item.path for item in diff_records(a, b)] == ["content_digest"]


def test_policy_plan_connectors_and_missing_layers() -> None:
    other = sample(layers=[layer(0), layer(1), layer(2), *(layer(number) for number in range(3, 9))])
    plan = other.plan.model_copy(update={"changes": (), "refusal": "policy and command disagree"})
    policy = {"kv_cache": {"dtype": ["fp8_e5m2"], "scales": "checkpoint"}, "on_violation": "refuse"}
    found = differences(other.model_copy(update={"plan": plan, "policy": policy, "connectors": ("LMCache",)}))
    assert found["policy.kv_cache.dtype"] == (["fp8_e4m3"], ["fp8_e5m2"])
    assert found["plan.refusal"] == (None, "policy and command disagree")
    assert found["plan.changes"][1] == []
    assert found["connectors"] == ([], ["LMCache"])
    assert found["layers"][0] == "3 layers"
    assert found["layers"][1].startswith("9 layers, only here: rank 0 model.layers.3")
    assert found["layers"][1].endswith("…")


def test_a_difference_that_folding_hides_is_still_told() -> None:
    noted = sample()
    claims = tuple(claim.model_copy(update={"note": "another note"}) for claim in noted.observed)
    found = differences(noted.model_copy(update={"observed": claims}))
    assert list(found) == ["content_digest"]


CLAIMS = st.lists(
    st.builds(
        Claim,
        stage=st.just(Stage.OBSERVED),
        source=st.sampled_from([Source.LOG, Source.TENSORS, Source.CAPACITY]),
        field=st.sampled_from(["dtype", "scale", "kv_tokens"]),
        value=st.none() | st.integers(0, 2) | st.floats() | st.text(max_size=2),
        where=st.sampled_from(["here", "there", "line 5", "capacity: 1,024 bytes ÷ 7 tokens", "capacity: 4 bytes ÷ 9 tokens"]),
    ),
    max_size=3,
)


@given(CLAIMS, CLAIMS)
def test_the_difference_is_empty_exactly_when_the_digests_are_equal(one: list[Claim], other: list[Claim]) -> None:
    a = build_record(sample().model_copy(update={"observed": tuple(one)}))
    b = build_record(sample().model_copy(update={"observed": tuple(other)}))
    equal = a["predicate"]["content_digest"] == b["predicate"]["content_digest"]
    assert (diff_records(a, b) == ()) is equal
    assert diff_records(a, a) == ()


def test_drift_is_a_part_of_the_record_and_of_a_difference() -> None:
    drifted = sample().model_copy(update={"drift": ({"field": "kv_scales", "before": "checkpoint", "after": "invalid"},)})
    plain, later = build_record(sample()), build_record(drifted)
    assert "drift" not in plain["predicate"]
    assert later["predicate"]["drift"] == [{"field": "kv_scales", "before": "checkpoint", "after": "invalid"}]
    [difference] = diff_records(plain, later)
    assert difference.model_dump() == {"path": "drift.kv_scales", "a": None, "b": "checkpoint before, invalid"}
    assert Statement.model_validate(later).predicate.drift[0]["after"] == "invalid"
