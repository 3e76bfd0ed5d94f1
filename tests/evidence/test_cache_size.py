"""Bytes and tokens of one engine's cache."""

from __future__ import annotations

from replies import NONCE, document, layer, ranks, reply

from kvguard.checkpoint.models import Geometry
from kvguard.evidence.cache_size import kv_bytes, kv_tokens, measure, ranks_of_one_engine
from kvguard.evidence.layouts import layouts
from kvguard.evidence.log import read_log
from kvguard.evidence.metrics import claims, parse_metrics
from kvguard.evidence.tensors import parse_replies
from kvguard.vocabulary import Claim

SMOLLM = Geometry(attention_layers=30, kv_heads=3, head_size=64)
INIT = b"INFO 02-01 09:00:07 [core.py:96] Initializing a V1 LLM engine (v0.16.0) with config: model='/m'"
NEW = (
    'vllm:cache_config_info{cache_dtype="auto",kv_cache_size_tokens="93184",kv_cache_memory_bytes="1073741824",'
    'block_size="128",num_gpu_blocks="728",engine="0"} 1.0\n'
)
OLD = 'vllm:cache_config_info{cache_dtype="auto",block_size="16",num_gpu_blocks="900",engine="0"} 1.0\n'


def log(*lines: str) -> tuple[Claim, ...]:
    return read_log("\n".join(f"INFO 02-01 09:00:40 [a.py:1] {line}" for line in lines).encode()).claims()


def parallel(tp: int, pp: int) -> tuple[Claim, ...]:
    return read_log(INIT + f", tensor_parallel_size={tp}, pipeline_parallel_size={pp}, x=1".encode()).claims()


def page(text: str) -> tuple[Claim, ...]:
    return claims(parse_metrics(text))


def test_the_engines_own_token_number_comes_first() -> None:
    assert kv_tokens(page(NEW), log("GPU KV cache size: 5 tokens"))[0] == 93184
    assert kv_tokens(page(OLD), log("GPU KV cache size: 5 tokens"))[0] == 5
    assert kv_tokens(page(OLD), ())[0] == 14400


def test_a_stale_block_size_is_not_used() -> None:
    changed = log("Setting attention block size to 528 tokens to ensure that attention page size is >= mamba page size.")
    tokens, why = kv_tokens(page(OLD), changed)
    assert tokens is None
    assert why.endswith("says 528: the metric is stale")


def test_nothing_says_nothing() -> None:
    assert kv_tokens((), ()) == (None, "neither metrics nor log say how many tokens the cache holds")
    assert kv_bytes((), (), 1) == (None, "neither metrics nor log say how many bytes the cache has")


def test_bytes_of_one_rank_need_the_number_of_ranks() -> None:
    assert kv_bytes(page(NEW), (), 2)[0] == 2 * 1024**3
    size, why = kv_bytes(page(NEW), (), None)
    assert size is None
    assert "how many ranks there are is not known" in why


def test_the_smallest_rank_sizes_all() -> None:
    found = log("Available KV cache memory: 10.00 GiB", "Available KV cache memory: 9.00 GiB")
    assert kv_bytes((), found, 2)[0] == 2 * 9 * 1024**3


def test_ranks() -> None:
    assert ranks_of_one_engine(parallel(4, 2)) == 8
    assert ranks_of_one_engine(()) is None


def bytes_by_dtype(geometry: Geometry | None, tensor_parallel: int = 1) -> dict[str, float]:
    return {layout.dtype: layout.bytes_per_token for layout in layouts(geometry, tensor_parallel)}


def test_arithmetic() -> None:
    sizes = bytes_by_dtype(SMOLLM)
    assert (sizes["bfloat16"], sizes["fp8_e4m3"]) == (23040, 11520)
    assert bytes_by_dtype(SMOLLM, 6)["bfloat16"] == 46080
    assert bytes_by_dtype(SMOLLM.model_copy(update={"sliding_layers": 15})) == {}
    assert bytes_by_dtype(SMOLLM.model_copy(update={"hybrid": True})) == {}
    assert bytes_by_dtype(None) == {}


def test_a_reading_from_outside() -> None:
    reading = measure(tensors=None, metrics_claims=page(NEW), log_claims=parallel(1, 1), geometry=SMOLLM)
    assert reading.width == 8
    assert "kv_cache_memory_bytes × 1 rank(s)" in reading.reason
    assert measure(tensors=None, metrics_claims=page(NEW), log_claims=(), geometry=SMOLLM).width is None
    assert measure(tensors=None, metrics_claims=page(NEW), log_claims=(), geometry=SMOLLM, ranks=1).width == 8
    given = measure(tensors=None, metrics_claims=page(NEW), log_claims=(), geometry=SMOLLM, given_bytes=2 * 1024**3)
    assert given.width == 16


def test_a_reading_from_inside() -> None:
    one = parse_replies(document(reply([layer(0)])), NONCE)
    assert measure(tensors=one, metrics_claims=(), log_claims=(), geometry=SMOLLM).width == 8
    two = parse_replies(document(*ranks(2, [layer(0)]), expected=2), NONCE)
    assert measure(tensors=two, metrics_claims=page(NEW), log_claims=(), geometry=SMOLLM).width == 16
    half = parse_replies(document(reply([layer(0)]), expected=2), NONCE)
    assert measure(tensors=half, metrics_claims=page(NEW), log_claims=(), geometry=SMOLLM).width is None
