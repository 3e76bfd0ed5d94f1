from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.canonical import sha256_of
from kvguard.record.build import build_record
from kvguard.record.digest import content_digest, scales_digest
from kvguard.record.statement import STAGES, Statement
from kvguard.vocabulary import CheckResult, Claim, ScaleState, Source, Stage
from record_samples import claim, layer, sample


def digest(record: dict[str, Any]) -> str:
    return str(record["predicate"]["content_digest"])


REFERENCE = build_record(sample())


def test_it_is_an_in_toto_statement_with_all_six_attributes() -> None:
    assert REFERENCE["_type"] == "https://in-toto.io/Statement/v1"
    assert [subject["name"] for subject in REFERENCE["subject"]] == ["config.json", "model.safetensors"]
    assert REFERENCE["subject"][1]["digest"] == {"sha256": "b" * 64}
    names = [attribute["attribute"] for attribute in REFERENCE["predicate"]["attributes"]]
    assert names == [*STAGES, "effective", "checks"]
    statement = Statement.model_validate(json.loads(json.dumps(REFERENCE, allow_nan=False)))
    assert statement.effective.dtype == "fp8_e4m3"
    assert [check.name for check in statement.checks] == ["confidence", "dtype", "scales"]
    assert len(statement.claims("observed")) == 6


def test_each_stage_carries_the_digest_of_its_evidence() -> None:
    for attribute in REFERENCE["predicate"]["attributes"][:4]:
        assert attribute["evidence"]["digest"]["sha256"] == sha256_of(attribute["value"]).removeprefix("sha256:")


def test_the_digest_is_of_the_content_and_can_be_recomputed() -> None:
    assert content_digest(REFERENCE) == digest(REFERENCE)
    assert REFERENCE["predicate"]["undigested"]["pid"] == 4242
    assert REFERENCE["predicate"]["undigested"]["argv"][2] == "/data/models/trap"
    assert REFERENCE["predicate"]["plan"]["argv"] == ["vllm", "serve", "trap", "--uds", "*", "--port=*"]


SEGMENTS = st.from_regex(r"\A[A-Za-z0-9_+@-][A-Za-z0-9_.+@-]{0,10}\Z")


@given(
    parents=st.lists(SEGMENTS, max_size=4),
    line=st.integers(1, 10**6),
    pid=st.integers(1, 4 * 10**6),
    port=st.integers(1, 65535),
    run=st.lists(SEGMENTS, min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    undigested=st.dictionaries(st.text(max_size=5), st.floats() | st.text() | st.lists(st.integers(), max_size=3), max_size=3),
)
def test_what_differs_from_start_to_start_does_not_change_the_digest(
    *, parents: list[str], line: int, pid: int, port: int, run: list[str], order: Any, undigested: dict[str, Any]
) -> None:
    start = sample(
        directory="/" + "/".join([*parents, "trap"]),
        line=line,
        pid=pid,
        port=port,
        run="/" + "/".join(run),
        undigested=undigested,
    )
    shuffled = {
        name: tuple(order.sample(list(getattr(start, name)), len(getattr(start, name))))
        for name in ("requested", "declared", "observed", "checks", "layers", "subjects")
    }
    record = build_record(start.model_copy(update=shuffled))
    assert digest(record) == digest(REFERENCE)
    json.dumps(record, allow_nan=False).encode()


def evidence(record: dict[str, Any]) -> list[str]:
    return [item["evidence"]["digest"]["sha256"] for item in record["predicate"]["attributes"] if "evidence" in item]


@given(size=st.integers(1, 2**50), tokens=st.integers(1, 2**40))
def test_what_memory_profiling_left_changes_no_digest_and_is_read_back(*, size: int, tokens: int) -> None:
    start = sample(size=size, tokens=tokens)
    record = json.loads(json.dumps(build_record(start), allow_nan=False))
    assert digest(record) == digest(REFERENCE)
    assert evidence(record) == evidence(REFERENCE)
    statement = Statement.model_validate(record)
    observed = {(claim.source, claim.field): claim for claim in statement.claims("observed")}
    assert observed[Source.METRICS, "kv_tokens"].value == observed[Source.LOG, "kv_tokens"].value == tokens
    assert observed[Source.TENSORS, "kv_memory_bytes"].value == size
    assert observed[Source.CAPACITY, "kv_cache_dtype"].where == f"capacity: {size} bytes ÷ {tokens} tokens"
    assert observed[Source.CAPACITY, "kv_cache_dtype"].note.startswith(f"{size / tokens:,.0f} bytes per token")
    effective = statement.effective
    assert (effective.kv_bytes, effective.kv_tokens) == (size, tokens)
    assert effective.bytes_per_token == pytest.approx(size / tokens, rel=1e-5)
    assert {claim.where for claim in effective.supported_by} == {claim.where for claim in start.effective.supported_by}
    assert [item["shape"][0] for item in statement.layers] == [tokens // 128] * 3
    assert "shape" not in record["predicate"]["layers"][0]


def test_one_size_or_two_are_the_same_start() -> None:
    start = sample()
    other = claim(Stage.OBSERVED, Source.TENSORS, "kv_memory_bytes", 5, "rank 0", note="each storage counted once")
    record = build_record(start.model_copy(update={"observed": (*start.observed, other)}))
    assert digest(record) == digest(REFERENCE)
    assert len(Statement.model_validate(record).claims("observed")) == 7


def test_a_size_that_was_asked_for_is_no_measurement() -> None:
    asked = [
        claim(Stage.REQUESTED, Source.COMMAND_LINE, "kv_memory_bytes", size, "command line: --kv-cache-memory-bytes")
        for size in (1 << 30, 1 << 31)
    ]
    one, other = (build_record(sample().model_copy(update={"requested": (item,)})) for item in asked)
    assert digest(one) != digest(other)


def eight_bit_became_sixteen(item: Claim) -> Claim:
    return item.model_copy(update={"value": "16-bit"}) if item.source is Source.CAPACITY else item


@pytest.mark.parametrize(
    "changed",
    [
        sample().model_copy(update={"observed": tuple(map(eight_bit_became_sixteen, sample().observed))}),
        sample(dtype="bfloat16"),
        sample(scales=ScaleState.UNIT_DECLARED),
        sample(result=CheckResult.FAIL),
        sample(version="0.31.0"),
        sample(layers=[layer(0), layer(1), layer(2, k_scale=0.0501)]),
        sample(layers=[layer(0), layer(1)]),
        sample(extra_argv=("--max-num-seqs", "8")),
        sample().model_copy(update={"verdict": "warn"}),
        sample().model_copy(update={"policy_digest": None}),
        sample().model_copy(update={"subjects": sample().subjects[:1]}),
        sample().model_copy(update={"observed": sample().observed[1:]}),
        sample().model_copy(update={"connectors": ("LMCacheConnectorV1",)}),
    ],
)
def test_what_was_established_does_change_it(changed: Any) -> None:
    assert digest(build_record(changed)) != digest(REFERENCE)


def test_equal_calibrations_are_equal_and_others_are_not() -> None:
    same = build_record(sample(layers=[layer(0, 0.05 * (1 + 1e-9)), layer(1), layer(2)]))
    other = build_record(sample(layers=[layer(0, 0.0501), layer(1), layer(2)]))
    assert same["predicate"]["scales_digest"] == REFERENCE["predicate"]["scales_digest"]
    assert other["predicate"]["scales_digest"] != REFERENCE["predicate"]["scales_digest"]


def test_scales_digest_folds_ranks_that_agree() -> None:
    one = scales_digest([layer(0), layer(1)])
    assert scales_digest([layer(1, rank=1), layer(0, rank=1), layer(0), layer(1)]) == one
    assert scales_digest([layer(0), layer(1), layer(0, rank=1, k_scale=0.06)]) != one
    assert scales_digest([{**layer(0), "k_scale": 0.05}, layer(1)]) == one
    assert scales_digest([layer(0, k_scale="NaN")]) == scales_digest([layer(0, k_scale=math.nan)]) != one


def test_scales_digest_is_null_when_there_is_nothing_to_digest() -> None:
    assert scales_digest([]) is None
    assert scales_digest([{**layer(0), "k_scale": None, "v_scale": None}]) is None
    sixteen = build_record(sample(dtype="bfloat16", scales=ScaleState.NOT_QUANTIZED))
    assert sixteen["predicate"]["scales_digest"] is None


def test_not_a_number_survives_as_text() -> None:
    start = sample(layers=[layer(0, math.nan), layer(1, math.inf), layer(2)], undigested={"loss": math.nan})
    record = build_record(start)
    assert record["predicate"]["layers"][0]["k_scale"] != record["predicate"]["layers"][2]["k_scale"]
    assert {str(item["k_scale"][0]) for item in record["predicate"]["layers"]} == {"NaN", "Infinity", "0.05"}
    assert record["predicate"]["undigested"]["loss"] == "NaN"


def test_secrets_stand_nowhere_in_the_record() -> None:
    secret, short = "sk-hunter2/abc+def", "fp8"
    log = claim(Stage.OBSERVED, Source.LOG, "api_key", f"/{secret}", f"engine log line 3: key {secret}", note=secret)
    start = sample(
        extra_argv=("--api-key", secret, "other-key", "--hf_token=t0ken"),
        undigested={"raw": [f"api_key=['{secret}']"], "url": "http://user:pw@host/x"},
    )
    start = start.model_copy(update={"observed": (*start.observed, log)})
    text = json.dumps(build_record(start, [secret, f"/{secret}", short]))
    for leaked in (secret, "hunter2", "other-key", "t0ken", "user:pw"):
        assert leaked not in text
    assert Statement.model_validate(json.loads(text)).effective.dtype == "fp8_e4m3"


def test_broken_text_and_deep_values_become_json() -> None:
    deep: Any = "bottom"
    for _ in range(900):
        deep = [deep]
    start = sample(undigested={"line\ud800": "\udcff", "deep": deep, "set": {2, 1}, "object": Stage})
    odd = claim(Stage.OBSERVED, Source.LOG, "x", {"a": deep, "b": "\udcff"}, "engine log line 9 \udcff")
    record = build_record(start.model_copy(update={"observed": (odd,)}))
    text = json.dumps(record, allow_nan=False)
    assert content_digest(json.loads(text)) == digest(record)
    assert record["predicate"]["undigested"]["line?"] == "?"
    assert record["predicate"]["undigested"]["set"] == [1, 2]
