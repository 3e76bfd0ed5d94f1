"""The engine's own /metrics page."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.evidence.metrics import MAX_PAGE, EngineFigures, claims, gauges, parse_metrics
from kvguard.vocabulary import Effective, UsageError

SAMPLES = Path(__file__).parent / "samples"


def facts(text: str) -> dict[str, object]:
    return {claim.field: claim.value for claim in claims(parse_metrics(text))}


def info(**labels: str) -> str:
    return "vllm:cache_config_info{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "} 1.0\n"


@pytest.mark.parametrize(
    ("name", "dtype", "tokens"),
    [
        ("plain", None, 46592),
        ("scheme-with-scales", None, 93184),
        ("plain-fp8", "fp8_e4m3", 93184),
        ("modelopt", "fp8_e4m3", 93184),
    ],
)
def test_real_pages_of_0_32(name: str, dtype: str | None, tokens: int) -> None:
    page = parse_metrics((SAMPLES / f"{name}.metrics").read_bytes())
    found = {claim.field: claim for claim in claims(page)}
    assert found["kv_cache_dtype"].value == dtype
    assert found["kv_tokens"].value == tokens
    assert found["kv_tokens"].where == "metric vllm:cache_config_info label kv_cache_size_tokens"
    assert found["kv_memory_bytes"].value == 1024**3
    assert gauges(page, Effective(), 8).model_dump(exclude_none=True) == {
        "kv_tokens_total": tokens,
        "kv_tokens_used": 0.0,
        "kv_pinned_ratio": 0.0,
        "running": 0.0,
        "waiting": 0.0,
        "limit": 8,
        "preemptions_total": 0.0,
    }


def test_auto_is_no_information() -> None:
    (claim,) = [c for c in claims(parse_metrics(info(cache_dtype="auto"))) if c.field == "kv_cache_dtype"]
    assert (claim.value, claim.note[:20]) == (None, "auto: no information")


def test_tokens_of_older_releases_are_blocks_divided_over_engines() -> None:
    one = info(cache_dtype="fp8", num_gpu_blocks="900", block_size="16")
    assert facts(one)["kv_tokens"] == 14400
    two = "".join(info(cache_dtype="auto", num_gpu_blocks="900", block_size="16", engine=e) for e in "01")
    assert facts(two)["kv_tokens"] == 7200


def test_the_engines_own_token_number_is_not_divided() -> None:
    two = "".join(info(kv_cache_size_tokens="100", num_gpu_blocks="900", block_size="16", engine=e) for e in "01")
    assert facts(two)["kv_tokens"] == 100
    assert gauges(parse_metrics(two), Effective(), 8).kv_tokens_total == 200


def test_none_is_a_string() -> None:
    page = info(
        cache_dtype="None",
        num_gpu_blocks="None",
        block_size="16",
        kv_cache_memory_bytes="None",
        calculate_kv_scales="None",
        kv_cache_dtype_skip_layers="None",
    )
    assert facts(page) == {"kv_cache_dtype": None, "block_size": 16}


def test_other_labels() -> None:
    page = info(cache_dtype="fp8", calculate_kv_scales="True", kv_cache_dtype_skip_layers="['0']")
    assert facts(page) == {
        "kv_cache_dtype": "fp8_e4m3",
        "calculate_kv_scales": True,
        "kv_cache_dtype_skip_layers": "['0']",
    }


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.42', 0.42),
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.42\nvllm:kv_cache_usage_perc{engine="0"} 0.42', 0.42),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.6', 0.4),
        ("# metrics disabled", None),
        ('vllm:kv_cache_usage_perc{engine="3"} -0.3875', None),
        ('vllm:kv_cache_usage_perc{engine="3"} NaN', None),
        ('vllm:kv_cache_usage_perc{engine="3"} 42', None),
    ],
)
def test_usage_ratio(text: str, ratio: float | None) -> None:
    assert gauges(parse_metrics(text), Effective(), None).kv_pinned_ratio == (pytest.approx(ratio) if ratio else ratio)


def test_figures_of_several_engines_are_summed() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{e}"}} 3\nvllm:num_requests_waiting{{engine="{e}"}} 1\n'
        f'vllm:num_preemptions_total{{engine="{e}"}} 5\n'
        for e in "01"
    )
    figures = gauges(parse_metrics(text), Effective(), 8)
    assert (figures.running, figures.waiting, figures.preemptions_total, figures.limit) == (6, 2, 10, 16)


def test_bytes_follow_the_effective_cache() -> None:
    text = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n' + info(kv_cache_size_tokens="100", engine="0")
    figures = gauges(parse_metrics(text), Effective(kv_bytes=1000, kv_tokens=100, bytes_per_token=10.0), None)
    assert (figures.kv_bytes_total, figures.kv_bytes_used, figures.kv_tokens_used) == (1000, 500, 50)


def test_nothing_known_is_nothing_not_zero() -> None:
    assert gauges(parse_metrics("foo_total 1\n"), Effective(), None) == EngineFigures()


@pytest.mark.parametrize("text", ['a{b="c} 1', "vllm:x 1\n{{{ ]]\n", "a b c d e", 'x{a="b"'])
def test_other_formats_are_named_with_their_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^metrics page line \d+: not Prometheus text format"):
        parse_metrics("good 1\n" + text)


def test_a_huge_page_is_refused() -> None:
    with pytest.raises(UsageError, match="more than"):
        parse_metrics(b"#" * (MAX_PAGE + 1))


LABELS = st.dictionaries(
    st.sampled_from(["cache_dtype", "num_gpu_blocks", "block_size", "kv_cache_size_tokens", "kv_cache_memory_bytes", "engine"]),
    st.text(st.characters(blacklist_characters='"\\\n', blacklist_categories=["Cs"]), max_size=30) | st.integers().map(str),
)


@given(st.lists(LABELS.map(lambda labels: info(**labels)) | st.text(max_size=60), max_size=6).map("".join))
def test_only_usage_errors_escape(text: str) -> None:
    try:
        page = parse_metrics(text)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    for claim in claims(page):
        claim.model_dump_json()
    gauges(page, Effective(), 4)


@given(st.binary(max_size=200))
def test_only_usage_errors_escape_from_bytes(data: bytes) -> None:
    with contextlib.suppress(UsageError):
        parse_metrics(data)


def test_blocks_and_the_longest_sequence() -> None:
    page = (
        'vllm:cache_config_info{block_size="128",num_gpu_blocks="32768",kv_cache_size_tokens="1646843",'
        'kv_cache_max_concurrency="100.51533742331289",engine="0"} 1.0\n'
        'vllm:cache_config_info{block_size="128",num_gpu_blocks="32768",kv_cache_size_tokens="1646843",'
        'kv_cache_max_concurrency="100.51533742331289",engine="1"} 1.0\n'
    )
    found = {claim.field: claim.value for claim in claims(parse_metrics(page))}
    assert (found["kv_blocks"], found["blocks_per_sequence"], found["max_model_len"]) == (16384, 163, 16384)


@pytest.mark.parametrize("concurrency", ["None", "", "nan", "0.0", "-1.0", "inf", "many"])
def test_no_concurrency_is_no_information(concurrency: str) -> None:
    labels = f'num_gpu_blocks="16",kv_cache_size_tokens="2048",kv_cache_max_concurrency="{concurrency}"'
    found = claims(parse_metrics(f'vllm:cache_config_info{{{labels},engine="0"}} 1.0\n'))
    assert {claim.field for claim in found} == {"kv_tokens"}
