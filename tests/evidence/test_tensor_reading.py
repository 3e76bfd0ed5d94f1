"""What the reader inside the engine answers, checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replies import NONCE, document, layer, ranks, reply, unit, wide

from kvguard.evidence.tensors import (
    NonceMismatch,
    TensorReading,
    claims,
    disagreements,
    gaps,
    invalid_scales,
    parse_replies,
)
from kvguard.vocabulary import UsageError


def read(*replies: dict[str, Any], expected: int | None = 1) -> TensorReading:
    return parse_replies(json.dumps(document(*replies, expected=expected)).encode(), NONCE)


def test_a_complete_answer() -> None:
    reading = read(reply([layer(0), layer(1)]))
    assert gaps(reading) == ()
    assert disagreements(reading) == ()
    assert invalid_scales(reading) == ()
    assert [lay.dtype for _, lay in reading.layers()] == ["fp8_e4m3", "fp8_e4m3"]
    assert reading.backends == ("CPU_ATTN",)
    assert (reading.kv_bytes, reading.kv_tokens) == (1073741824, 93184)


def test_claims_say_where() -> None:
    found = claims(read(reply([layer(0)])))
    assert [claim.where for claim in found] == ["rank 0", "rank 0 layer model.layers.0.self_attn.attn"]
    assert found[1].value["k_scale"] == [0.05000000074505806]


@pytest.mark.parametrize(
    ("changes", "dtype", "mismatch"),
    [
        ({"kv_cache_dtype": "auto", "tensor_dtype": "torch.bfloat16"}, "bfloat16", ""),
        ({"kv_cache_dtype": "auto", "tensor_dtype": "torch.float16"}, "float16", ""),
        ({"kv_cache_dtype": "bfloat16", "tensor_dtype": "torch.bfloat16"}, "bfloat16", ""),
        ({"kv_cache_dtype": "fp8_e5m2", "tensor_dtype": "torch.uint8"}, "fp8_e5m2", ""),
        ({"kv_cache_dtype": "fp8_inc", "tensor_dtype": "torch.float8_e4m3fn"}, "fp8_inc", ""),
        ({"kv_cache_dtype": "nvfp4", "tensor_dtype": "torch.uint8"}, "nvfp4", ""),
        ({"kv_cache_dtype": "auto", "tensor_dtype": "torch.uint8"}, "8-bit", "kv_cache_dtype auto"),
        ({"kv_cache_dtype": "fp8", "tensor_dtype": "torch.bfloat16"}, "bfloat16", "kv_cache_dtype fp8"),
        ({"kv_cache_dtype": "bfloat16", "tensor_dtype": "torch.float16"}, "float16", "kv_cache_dtype bfloat16"),
        ({"kv_cache_dtype": "fp8_e4m3", "tensor_dtype": "torch.float8_e5m2"}, "fp8_e5m2", "kv_cache_dtype fp8_e4m3"),
        ({"kv_cache_dtype": "fp8", "tensor_dtype": "torch.int3"}, "int3", "unknown dtype"),
    ],
)
def test_the_name_and_the_tensor(changes: dict[str, str], dtype: str, mismatch: str) -> None:
    reading = read(reply([layer(0, **changes)]))
    (found,) = [lay for _, lay in reading.layers()]
    assert found.dtype == dtype
    assert mismatch in "".join(disagreements(reading))
    assert bool(disagreements(reading)) == bool(mismatch)


@pytest.mark.parametrize(
    ("document_", "gap"),
    [
        (document(reply([layer(0)]), expected=2), "1 of 2 ranks answered"),
        (document(reply([layer(0)]), reply([layer(0)]), expected=2), "1 of 2 ranks answered"),
        (document(reply([layer(0)], tp_size=4)), "1 of 4 ranks answered"),
        (document(reply([layer(0)]), expected=None), "how many ranks there are is not known"),
        (document(expected=0), "0 of 1 ranks answered"),
        (document({"nonce": NONCE, "rank": 0, "pid": 1, "error": "KeyError: x", "layers": []}), "rank 0: KeyError: x"),
        (document(reply([])), "rank 0: no attention layer with a KV cache"),
        (document(reply([layer(0, error="AttributeError: y")])), "AttributeError: y"),
        (document(reply([layer(0, tensor_dtype=None)])), "no cache tensor"),
    ],
)
def test_gaps(document_: dict[str, Any], gap: str) -> None:
    assert gap in "; ".join(gaps(parse_replies(document_, NONCE)))


def test_layers_without_a_cache_are_no_gap() -> None:
    encoder = layer(5, **{"class": "EncoderOnlyAttention", "tensor_dtype": None})
    mamba = layer(6, **{"class": "MambaMixer2", "kv_cache_dtype": None, "tensor_dtype": None})
    reading = read(reply([layer(0), encoder, mamba]))
    assert gaps(reading) == ()
    assert len(list(reading.layers())) == 1


def test_ranks_that_disagree() -> None:
    first, second = ranks(2, [layer(0)])
    second["layers"] = [wide(0)]
    found = "; ".join(disagreements(read(first, second, expected=2)))
    assert "kv_cache_dtype fp8 on rank 0, auto on rank 1" in found
    assert "tensor_dtype torch.uint8 on rank 0, torch.bfloat16 on rank 1" in found


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "q_scale"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", 0.0, -0.5])
def test_invalid_values_name_rank_and_layer(name: str, value: Any) -> None:
    (found,) = invalid_scales(read(reply([layer(0), layer(3, **{name: [value], f"{name}_float": value})])))
    assert found.startswith(f"rank 0 layer model.layers.3.self_attn.attn: {name} is ")


def test_device_and_host_copies_must_be_equal() -> None:
    (found,) = invalid_scales(read(reply([layer(0, k_scale=[1.0])])))
    assert "k_scale is 1.0 on the device and 0.05000000074505806 on the host" in found


def test_one_value_for_each_head_is_compared_by_its_largest() -> None:
    assert invalid_scales(read(reply([layer(0, k_scale=[0.01, 0.05, 0.02], k_scale_float=0.05)]))) == ()


def test_copies_of_one_scale_on_two_ranks_must_be_equal_unless_calculated() -> None:
    first, second = ranks(2, [layer(0)])
    second["layers"] = [layer(0, k_scale=[0.06], k_scale_float=0.06)]
    reading = read(first, second, expected=2)
    assert "k_scale is 0.06, and 0.05000000074505806 on rank 0" in "".join(invalid_scales(reading))
    assert invalid_scales(reading, calculated=True) == ()


def test_scales_of_a_wide_layer_do_not_matter() -> None:
    assert invalid_scales(read(reply([wide(0, k_scale=["NaN"])]))) == ()


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.12.self_attn.attn", "12"),
        ("layers.3", "3"),
        ("model.attn", "model.attn"),
        ("a.1.b.2", "a.1.b.2"),
    ],
)
def test_index(name: str, index: str) -> None:
    (found,) = [lay for _, lay in read(reply([layer(0, name=name)])).layers()]
    assert found.index == index


def test_windows_make_block_arithmetic_meaningless() -> None:
    assert read(reply([layer(0, sliding_window=4096)])).kv_tokens is None


def test_another_nonce_is_a_mismatch() -> None:
    with pytest.raises(NonceMismatch, match="rank 0 answers another question"):
        parse_replies(document(reply([layer(0)])), "another")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"nonsense",
        b'{"replies": 3}',
        b'{"replies": [{}]}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"replies": [{"nonce": "n0nce", "layers": [{"name": "a", "k_scale": ["x"]}]}]}',
    ],
)
def test_other_documents_are_usage_errors(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"^evidence reply: [^\n]*$"):
        parse_replies(data, NONCE)


def test_unknown_fields_are_ignored() -> None:
    assert gaps(read(reply([unit(0, new_field=1)], runner="V2"))) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*layer(0), "nonce"])


@given(st.dictionaries(FIELDS, JSON, max_size=6), st.dictionaries(st.sampled_from(list(reply([]))), JSON, max_size=4))
def test_only_usage_errors_escape(changes: dict[str, Any], more: dict[str, Any]) -> None:
    broken = {**reply([{**layer(0), **changes}]), **more}
    for data in (document(broken), json.dumps(document(broken)).encode()):
        try:
            reading = parse_replies(data, NONCE)
        except UsageError:
            continue
        gaps(reading)
        disagreements(reading)
        invalid_scales(reading)
        [claim.model_dump_json() for claim in claims(reading)]


@given(st.binary(max_size=200))
def test_only_usage_errors_escape_from_bytes(data: bytes) -> None:
    with pytest.raises(UsageError):
        parse_replies(data, NONCE)
