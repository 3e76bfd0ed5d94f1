from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.record.measured import without_sizes
from kvguard.record.normalize import normalize_argv, normalize_claims, normalize_json, normalize_text, stable_float
from kvguard.vocabulary import Claim, Source, Stage


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine log line 57", "engine log"),
        ("engine log lines 57-60, rank 0", "engine log, rank 0"),
        ("config.json: quantization_config.kv_cache_scheme", "config.json: quantization_config.kv_cache_scheme"),
        ("/data/a b/config.json: kv_cache_scheme", "config.json: kv_cache_scheme"),
        ("read from /data/m/model.safetensors: x", "read from model.safetensors: x"),
        ("/data/models/my model", "my model"),
        ("~/models/x and ./y/z and ../w", "x and z and w"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("rank 0 layer model.layers.3", "rank 0 layer model.layers.3"),
        ("metric vllm:cache_config_info label cache_dtype", "metric vllm:cache_config_info label cache_dtype"),
        ("http://127.0.0.1:8123/metrics", "http://127.0.0.1/metrics"),
        ("https://[::1]:8123/metrics", "https://[::1]/metrics"),
        ("reached on 127.0.0.1:8123, [::1]:80 and localhost:9", "reached on *, * and *"),
        ("127.0.0.1: refused, version 1.2.3.4", "127.0.0.1: refused, version 1.2.3.4"),
        ("(EngineCore pid=99) on port 8000", "(EngineCore pid) on port"),
        ("1,024 tokens / layer, 5 bytes/token", "1,024 tokens / layer, 5 bytes/token"),
        ("baseline 5", "baseline 5"),
        ("/", "/"),
        ("bad \udcff", "bad ?"),
    ],
)
def test_normalize_text(text: str, expected: str) -> None:
    assert normalize_text(text) == expected


@given(st.text(max_size=200) | st.text(alphabet="/:. aline1~", max_size=200))
def test_any_text_can_be_normalized_and_encoded(text: str) -> None:
    normalize_text(text).encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("capacity: 1073741824 bytes ÷ 93184 tokens", "capacity: … bytes ÷ … tokens"),
        ("11,522.8 bytes per token are 8-bit, 3 blocks", "… bytes per token are 8-bit, … blocks"),
        ("rank 0 of 2 ranks, fp8 tokens", "rank 0 of 2 ranks, fp8 tokens"),
    ],
)
def test_sizes_leave_their_words(text: str, expected: str) -> None:
    assert without_sizes(text) == expected


def test_a_long_hostile_line_takes_no_time() -> None:
    without_sizes("1" * 200_000)
    without_sizes("1,.2" * 50_000)
    for piece in (": /x", "/a", "://", "line 1 ", "?key"):
        normalize_text(piece * 20_000)


def test_floats_are_stable() -> None:
    assert stable_float(0.1 + 0.2) == stable_float(0.3)
    assert stable_float(0.123456) != stable_float(0.123457)
    assert [stable_float(value) for value in (math.nan, math.inf, -math.inf)] == ["NaN", "Infinity", "-Infinity"]
    assert normalize_json({"pid": 1, "nonce": "x", "scale": (1.00000001, Stage.OBSERVED)}) == {"scale": [1.0, "observed"]}


def test_claims_that_differ_only_by_line_count_once() -> None:
    claims = [
        Claim(stage=Stage.OBSERVED, source=Source.LOG, field="dtype", value="fp8", where=f"engine log line {line}")
        for line in (3, 9)
    ]
    assert [item["where"] for item in normalize_claims(claims)] == ["engine log"]


def test_argv_keeps_what_was_asked_and_drops_where() -> None:
    argv = [
        "/venv/bin/vllm",
        "serve",
        "/m/trap",
        "--host",
        "0.0.0.0",
        "--uds=/run/x",
        "--config=/a/b.yaml",
        "--max-num-seqs",
        "8",
    ]
    expected = ["vllm", "serve", "trap", "--host", "*", "--uds=*", "--config=b.yaml", "--max-num-seqs", "8"]
    assert normalize_argv(argv) == expected
