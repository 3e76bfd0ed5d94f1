"""From bytes and tokens back to the dtype of each layer, where layers differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replies import NONCE, document, reply, unit

from kvguard.checkpoint.geometry import bytes_per_token
from kvguard.checkpoint.models import Geometry
from kvguard.evidence.cache_size import measure
from kvguard.evidence.capacity import CapacityReading
from kvguard.evidence.layouts import group_size, layouts, mixes, pooled_layouts, skipped_layers, stated_skips
from kvguard.evidence.log import read_log
from kvguard.evidence.metrics import claims, parse_metrics
from kvguard.evidence.reconcile import reconcile
from kvguard.evidence.tensors import parse_replies
from kvguard.vocabulary import KV_DTYPES, Claim, Confidence, Effective, Source, Stage, width_bits

GIB = 1024**3
NARROW = [name for name in KV_DTYPES if (width_bits(name) or 16) < 16]
PLAIN = [name for name in NARROW if not name.startswith(("turboquant", "ultraquant"))]


def dense(layers: int = 32, heads: int = 8, head: int = 128, **more: object) -> Geometry:
    return Geometry(
        layers=layers,
        attention_layers=layers,
        kv_heads=heads,
        head_size=head,
        layer_indices=tuple(range(layers)),
        **more,  # type: ignore[arg-type]
    )


def windowed(full: int, sliding: int, **more: object) -> Geometry:
    types = ("full_attention",) * full + ("sliding_attention",) * sliding
    return dense(full + sliding, layer_types=types, sliding_layers=sliding, sliding_window=1024, **more)


LLAMA = dense()
GPT_OSS = windowed(12, 12)
GEMMA = windowed(5, 29)
MISTRAL = dense(sliding_layers=32, sliding_window=4096)


def skip(*entries: str) -> tuple[Claim, ...]:
    where = "metric vllm:cache_config_info label kv_cache_dtype_skip_layers"
    value = str(list(entries))
    return (Claim(stage=Stage.OBSERVED, source=Source.METRICS, field="kv_cache_dtype_skip_layers", value=value, where=where),)


def read(geometry: Geometry, per_token: float, *entries: str, ranks: int = 1) -> CapacityReading:
    tokens = round(GIB / per_token)
    text = f'vllm:cache_config_info{{kv_cache_size_tokens="{tokens}",engine="0"}} 1.0\n'
    found = (*claims(parse_metrics(text)), *(skip(*entries) if entries else ()))
    return measure(tensors=None, metrics_claims=found, log_claims=(), geometry=geometry, given_bytes=GIB, ranks=ranks)


def cost(dtype: str, wide: int, geometry: Geometry = LLAMA) -> float:
    size = bytes_per_token(geometry, dtype, wide)
    assert size is not None
    return size


def effective(reading: CapacityReading, *, echo: str = "", allowed: tuple[str, ...] = ()) -> Effective:
    said = Claim(stage=Stage.OBSERVED, source=Source.METRICS, field="kv_cache_dtype", value=echo, where="metric")
    return reconcile(
        tensors=None,
        capacity=reading,
        metrics_claims=(said,) if echo else (),
        log_claims=(),
        declared=None,
        predicted_dtype=None,
        predicted_scales=None,
        calculated=False,
        allowed_sixteen_bit=allowed,
    )


# Layers named by the engine


def test_named_layers_that_are_kept() -> None:
    reading = read(LLAMA, cost("fp8_e4m3", 8), *map(str, range(8)))
    assert reading.width == 8
    assert reading.sixteen_bit_layers("fp8_e4m3") == (tuple(range(8)),)
    assert "8-bit for this architecture, with 8 layers at 16 bit" in reading.reason
    allowed = effective(reading, echo="fp8_e4m3", allowed=tuple(map(str, range(8))))
    assert (allowed.dtype, allowed.confidence) == ("fp8_e4m3", Confidence.CORROBORATED)
    assert allowed.sixteen_bit_layers == tuple(map(str, range(8)))
    assert effective(reading, echo="fp8_e4m3", allowed=("0", "1")).dtype == "mixed"


def test_named_layers_that_the_engine_does_not_keep() -> None:
    reading = read(LLAMA, cost("fp8_e4m3", 0), *map(str, range(6)))
    assert reading.width == 8
    assert reading.sixteen_bit_layers("fp8_e4m3") == ((),)
    assert effective(reading, echo="fp8_e4m3").dtype == "fp8_e4m3"
    # One entry with a comma matches no layer, so nothing else fits either.
    assert read(LLAMA, cost("fp8_e4m3", 0), "0,1,2,3,4,5").width == 8
    assert read(LLAMA, cost("fp8_e4m3", 6), "0,1,2,3,4,5").width is None


def test_mixtures_of_two_widths_that_cost_the_same() -> None:
    # fp8 in all 32 layers, or 4 bit in 22 of them: the list's own ten layers would make them equal.
    reading = read(LLAMA, cost("fp8_e4m3", 0), *map(str, range(10)))
    assert reading.width is None
    assert "several widths" in reading.reason
    assert effective(reading, echo="fp8_e4m3").confidence is Confidence.ECHOED
    assert effective(reading).dtype == "unknown"


def test_one_layer_of_many_does_not_show() -> None:
    many = dense(80)
    reading = read(many, cost("fp8_e4m3", 1, many), "0")
    assert reading.width == 8
    assert set(reading.sixteen_bit_layers("8-bit")) == {(), (0,)}
    assert "whether or not some layers are at 16 bit" in reading.reason
    # Where layer 0 may be at 16 bit, both are right; elsewhere the capacity proves nothing, and the echo is all there is.
    assert effective(reading, echo="fp8_e4m3", allowed=("0",)).confidence is Confidence.CORROBORATED
    strict = effective(reading, echo="fp8_e4m3")
    assert (strict.dtype, strict.confidence) == ("fp8_e4m3", Confidence.ECHOED)
    assert effective(reading).dtype == "unknown"


def test_layers_that_a_format_keeps_by_itself() -> None:
    size = bytes_per_token(LLAMA, "turboquant_k8v4")
    assert size == cost("turboquant_k8v4", 4)
    reading = read(LLAMA, size, "0", "1", "30", "31")
    assert "turboquant_k8v4" in reading.candidates
    ends = ("0", "1", "30", "31")
    assert effective(reading, echo="turboquant_k8v4", allowed=ends).sixteen_bit_layers in (ends, ())
    found = {layout.sixteen_bit_layers for layout in layouts(LLAMA, 1, ("5",)) if layout.dtype == "turboquant_k8v4"}
    assert found == {(0, 1, 30, 31), (0, 1, 5, 30, 31)}


def test_layers_are_counted_as_the_model_counts_them() -> None:
    some = dense(8).model_copy(update={"layers": 12, "layer_indices": (0, 2, 3, 5, 6, 8, 9, 11)})
    assert skipped_layers(some, ("1", "2", "11", "sliding_window")) == (2, 11)
    kept = {layout.sixteen_bit_layers for layout in layouts(some) if layout.dtype == "turboquant_k8v4"}
    assert kept == {(0, 2, 9, 11)}


# Layers that nobody names


def test_what_would_explain_a_size_is_listed_and_proves_nothing() -> None:
    reading = read(LLAMA, cost("fp8_e4m3", 8))
    assert reading.width is None
    assert ("fp8_e4m3", 8) in {(name, mix.sixteen_bit_layers) for mix in reading.mixes for name in mix.dtypes}
    assert "such as" in reading.reason
    assert effective(reading).dtype == "unknown"


def test_padded_pages_are_not_taken_for_layers() -> None:
    reading = read(LLAMA, cost("bfloat16", 0) * 1.2)
    assert (reading.width, reading.mixes) == (None, ())
    assert "such as" not in reading.reason


@given(
    st.integers(1, 80),
    st.integers(1, 16),
    st.sampled_from([32, 64, 96, 128, 192, 256]),
    st.sampled_from(KV_DTYPES),
    st.data(),
)
def test_whatever_is_said_of_a_stated_mixture_is_true(
    layers: int, heads: int, head: int, dtype: str, data: st.DataObject
) -> None:
    geometry = dense(layers, heads, head)
    wide = data.draw(st.sets(st.integers(0, layers - 1)))
    ranks = data.draw(st.sampled_from([1, 2, 4, 32]))
    narrow = (width_bits(dtype) or 16) < 16
    entries = tuple(map(str, sorted(wide)))
    truth = [layout for layout in layouts(geometry, ranks, entries) if layout.dtype == dtype]
    for layout in truth:
        reading = read(geometry, layout.bytes_per_token, *entries, ranks=ranks)
        assert dtype in reading.candidates
        assert layout in reading.fits
        assert reading.width in (None, width_bits(dtype))
        shown = effective(reading, echo=dtype)
        # Never a quantized dtype for the whole cache, at more than an echo's confidence, when layers are at 16 bit.
        if narrow and layout.sixteen_bit_layers and shown.confidence is Confidence.CORROBORATED:
            assert shown.dtype == "mixed"


@given(st.integers(2, 80), st.integers(1, 16), st.sampled_from(PLAIN), st.data())
def test_an_unnamed_mixture_is_among_what_is_listed(layers: int, heads: int, dtype: str, data: st.DataObject) -> None:
    geometry = dense(layers, heads)
    wide = data.draw(st.integers(1, layers - 1))
    size = bytes_per_token(geometry, dtype, wide)
    found = mixes(geometry, size or 0, 0.02)
    listed = {(name, mix.sixteen_bit_layers) for mix in found for name in mix.dtypes}
    assert (dtype, wide) in listed or size is None
    assert all(abs((size or 0) - mix.bytes_per_token) <= 0.0201 * mix.bytes_per_token for mix in found)
    reading = read(geometry, size or 1)
    assert reading.mixes == () or reading.width is None


# Layers with windows share blocks


def pool(bytes_: int, blocks: int, concurrency: float, length: int = 16384, size: int = 128) -> tuple[Claim, ...]:
    tokens = int(concurrency * length)
    labels = f'kv_cache_size_tokens="{tokens}",kv_cache_max_concurrency="{concurrency}",num_gpu_blocks="{blocks}"'
    text = f'vllm:cache_config_info{{{labels},block_size="{size}",kv_cache_memory_bytes="{bytes_}",engine="0"}} 1.0\n'
    return claims(parse_metrics(text))


def pooled(geometry: Geometry, found: tuple[Claim, ...], *entries: str) -> CapacityReading:
    said = (*found, *(skip(*entries) if entries else ()))
    return measure(tensors=None, metrics_claims=said, log_claims=(), geometry=geometry, ranks=1)


def test_a_real_engines_blocks() -> None:
    # vLLM 0.32.0 on CPU: two layers with a window of 4,096 tokens and two without, two KV heads of 64, fp8, 1 GiB.
    tiny = windowed(2, 2).model_copy(update={"kv_heads": 2, "head_size": 64, "sliding_window": 4096})
    reading = pooled(tiny, pool(GIB, 16384, 16384 / 163))
    assert (reading.width, reading.block_tokens, reading.kv_tokens) == (8, 16384 * 128, 1646843)
    assert reading.claim.where == "capacity: 1073741824 bytes ÷ 2097152 tokens of blocks"
    assert reading.bytes_per_token == pytest.approx(GIB / 1646843)


def test_group_sizes() -> None:
    assert [group_size(one) for one in (GPT_OSS, GEMMA, windowed(13, 12), MISTRAL)] == [12, 5, 13, 32]


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 16), ("fp8_e4m3", 8)])
@pytest.mark.parametrize("geometry", [GPT_OSS, GEMMA, MISTRAL])
def test_the_width_of_blocks(geometry: Geometry, dtype: str, width: int) -> None:
    layers = geometry.attention_layers or 1
    block = cost(dtype, 0, geometry) / layers * group_size(geometry) * 128
    blocks = round(GIB / block)
    # A sequence of 16,384 tokens fills 128 blocks in one table, and some more in the windowed layers' own.
    more = 0 if geometry is MISTRAL else 35
    assert pooled(geometry, pool(GIB, blocks, blocks / (128 + more))).width == width


def test_one_table_for_all_layers() -> None:
    """With --disable-hybrid-kv-cache-manager an fp8 block of gpt-oss is as large as a 16-bit block without it."""
    block = cost("fp8_e4m3", 0, GPT_OSS) * 128
    blocks = round(GIB / block)
    assert pooled(GPT_OSS, pool(GIB, blocks, blocks / 128)).width == 8
    assert pooled(GPT_OSS, pool(GIB, blocks, blocks / 163)).width == 16
    # A length just above whole blocks may be read one token short.
    assert pooled(GPT_OSS, pool(GIB, blocks, blocks / 129, length=16384)).width == 8
    assert pooled(GPT_OSS, pool(GIB, blocks, blocks / 127)).width is None
    sizes = {layout.bytes_per_token for layout in pooled_layouts(GPT_OSS) if layout.dtype == "fp8_e4m3"}
    assert len(sizes) == 2


def test_without_the_length_of_a_sequence_both_are_possible() -> None:
    fewer = tuple(claim for claim in pool(GIB, 4096, 30.0) if claim.field != "max_model_len")
    block = cost("fp8_e4m3", 0, GPT_OSS) * 128
    said = tuple(
        claim.model_copy(update={"value": round(GIB / block)}) if claim.field == "kv_blocks" else claim for claim in fewer
    )
    reading = pooled(GPT_OSS, said)
    assert reading.width is None
    assert "several widths" in reading.reason


@pytest.mark.parametrize(
    ("geometry", "entry"), [(GEMMA, "sliding_window"), (GEMMA, "3"), (MISTRAL, "sliding_window"), (MISTRAL, "0")]
)
def test_layers_with_windows_at_two_dtypes_prove_nothing(geometry: Geometry, entry: str) -> None:
    block = cost("fp8_e4m3", 0, geometry) / (geometry.attention_layers or 1) * group_size(geometry) * 128
    blocks = round(GIB / block)
    reading = pooled(geometry, pool(GIB, blocks, blocks / 200), entry)
    assert (reading.width, reading.fits) == (None, ())
    assert effective(reading, echo="fp8_e4m3").confidence is Confidence.ECHOED


def test_a_real_engine_with_16_bit_windows() -> None:
    # vLLM 0.32.0 on CPU, fp8 with --kv-cache-dtype-skip-layers sliding_window: blocks of 256 fp8 tokens, of 128 at 16 bit.
    tiny = windowed(2, 2).model_copy(update={"kv_heads": 2, "head_size": 64, "sliding_window": 4096})
    found = pool(GIB, 8192, 8192 / 99)
    assert pooled(tiny, found, "sliding_window").width is None


def test_recurrent_and_unknown_models_have_no_layouts() -> None:
    for update in ({"hybrid": True}, {"unknown_reason": "x"}):
        for geometry in (LLAMA, GPT_OSS):
            changed = geometry.model_copy(update=update)
            assert layouts(changed) == pooled_layouts(changed) == mixes(changed, 1000.0, 0.02) == ()
    assert layouts(None) == pooled_layouts(None) == mixes(None, 1000.0, 0.02) == ()


# What the engine names


def test_entries_in_metrics_and_log() -> None:
    line = "INFO 02-01 09:00:40 [a.py:1] non-default args: {'kv_cache_dtype_skip_layers': ['0', 'sliding_window'], 'port': 1}"
    assert stated_skips(read_log(line.encode()).claims()) == ("0", "sliding_window")
    assert stated_skips(skip("0", "31")) == ("0", "31")
    assert stated_skips(()) == ()


@given(st.text(max_size=60))
def test_any_text_is_entries(text: str) -> None:
    found = Claim(stage=Stage.OBSERVED, source=Source.METRICS, field="kv_cache_dtype_skip_layers", value=text, where="")
    assert all(isinstance(entry, str) for entry in stated_skips((found,)))


def test_tensors_that_prove_a_dtype_are_not_contradicted_by_its_capacity() -> None:
    tensors = parse_replies(document(reply([unit(index) for index in range(30)])), NONCE)
    smollm = dense(30, 3, 64)
    found = skip("0", "1")
    reading = measure(tensors=tensors, metrics_claims=found, log_claims=(), geometry=smollm)
    assert reading.width == 8
