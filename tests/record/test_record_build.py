from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_samples import claim, layer, sample

from kvguard.canonical import sha256_of
from kvguard.record.build import build_record
from kvguard.record.digest import content_digest, scales_digest
from kvguard.record.statement import STAGES, Statement
from kvguard.vocabulary import CheckResult, ScaleState, Source, Stage


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
    assert [check.name for check in statement.checks] == ["dtype", "scales"]
    assert len(statement.claims("observed")) == 4


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


@pytest.mark.parametrize(
    "changed",
    [
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
