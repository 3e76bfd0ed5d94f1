import json
import math
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_fakes import f32, refusal, safetensors, scales
from kvguard.checkpoint.models import TensorInfo
from kvguard.checkpoint.safetensors_header import decode_floats, parse_header
from kvguard.vocabulary import UsageError


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_header_is_read():
    content = safetensors({"a": f32(1.0, 2.0), **scales([0])})
    header = parse_header(content, "x.safetensors", len(content))
    assert list(header.tensors) == ["a", "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]
    assert header.tensors["a"] == TensorInfo(dtype="F32", shape=(2,), start=0, end=8)
    assert header.header_bytes + 16 == header.size == len(content)


def test_the_prefix_may_be_longer_or_end_with_the_header():
    content = safetensors({"a": f32(1.0)})
    header = parse_header(content[:-4], "x", len(content))
    assert parse_header(content, "x", len(content)) == header


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        (b"", 0, "too short"),
        (b"1234567", 7, "too short"),
        ((1 << 60).to_bytes(8, "little") + b"{}", 10, "safetensors allows"),
        ((50).to_bytes(8, "little") + b"{}", 10, "truncated"),
        ((50).to_bytes(8, "little") + b"{}", 1000, "only 2 read"),
        (raw(b""), 8, "not valid JSON"),
        (raw(b"\xff\xfe{}"), 12, "not valid JSON"),
        (raw(b"[]"), 10, "must be a JSON object"),
        (raw(b'{"a": NaN}'), 18, "not valid JSON: NaN"),
        (raw(b'{"a": 1e999}'), 20, "no finite number"),
        (raw(b"[" * 100_000), 100_008, "nested too deeply"),
        (raw(b'{"a": {}, "a": {}}'), 26, "'a' appears twice"),
        (raw(b'{"a": "\\ud800"}'), 23, "not valid JSON"),
    ],
)
def test_broken_headers_are_named(content, size, message):
    with pytest.raises(UsageError, match=message) as error:
        parse_header(content, "shard-1.safetensors", size)
    assert str(error.value).startswith("shard-1.safetensors: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (1, "expected an object"),
        ({}, "dtype must be"),
        (tensor(dtype=4), "dtype must be"),
        ({**tensor(), "shape": "1"}, "shape must be"),
        (tensor(shape=[-1]), "shape must be"),
        (tensor(shape=[1.0]), "shape must be"),
        (tensor(shape=[True]), "shape must be"),
        (tensor(shape=[1] * 17), "shape must be"),
        (tensor(offsets=[0]), "data_offsets must be"),
        (tensor(offsets=[-4, 0]), "data_offsets must be"),
        (tensor(offsets=[0, 1 << 70]), "data_offsets must be"),
        (tensor(offsets=[4, 0]), "outside"),
        (tensor(offsets=[0, 8]), "outside"),
        (tensor(shape=[2]), "4 bytes of data for shape"),
        (tensor(dtype="BF16"), "4 bytes of data for shape"),
    ],
)
def test_broken_tensors_are_named(entry, message):
    content = raw({"model.layers.7.weight": entry}, b"\0" * 4)
    with pytest.raises(UsageError, match=message) as error:
        parse_header(content, "s.safetensors", len(content))
    assert "model.layers.7.weight" in str(error.value)


def test_overlapping_tensors_are_refused_and_empty_ones_are_not():
    content = raw({"a": tensor(), "b": tensor()}, b"\0" * 4)
    with pytest.raises(UsageError, match=r"'b'.*overlap those of 'a'"):
        parse_header(content, "s", len(content))
    content = raw({"a": tensor(), "empty": tensor(shape=[0], offsets=(4, 4))}, b"\0" * 4)
    assert parse_header(content, "s", len(content)).tensors["empty"].shape == (0,)


def test_an_unknown_dtype_is_kept_by_name():
    content = raw({"a": tensor(dtype="F2_NEW", shape=[3], offsets=[0, 1])}, b"\0")
    assert parse_header(content, "s", len(content)).tensors["a"].dtype == "F2_NEW"


def test_large_headers_are_fast():
    header = {f"model.layers.{i}.w": tensor("U8", [1], (i, i + 1)) for i in range(50_000)}
    content = raw(header, b"\0" * 50_000)
    started = time.perf_counter()
    assert len(parse_header(content, "s", len(content)).tensors) == 50_000
    assert time.perf_counter() - started < 60  # anything quadratic takes far longer


@pytest.mark.parametrize(
    ("dtype", "data", "values"),
    [
        ("F32", struct.pack("<2f", 0.5, 2.0), (0.5, 2.0)),
        ("F64", struct.pack("<d", 0.05), (0.05,)),
        ("F16", struct.pack("<e", 0.5), (0.5,)),
        ("BF16", b"\x80\x3f\x00\x3f", (1.0, 0.5)),
        ("F8_E4M3", bytes([0x38, 0x30, 0x01, 0x7E, 0xB8]), (1.0, 0.5, 2**-9, 448.0, -1.0)),
        ("F8_E5M2", bytes([0x3C, 0x38, 0x01]), (1.0, 0.5, 2**-16)),
    ],
)
def test_values_are_decoded(dtype, data, values):
    info = TensorInfo(dtype=dtype, shape=(len(values),), start=0, end=len(data))
    assert decode_floats(info, data) == values


def test_values_that_are_no_number_survive():
    def one(dtype, data):
        return decode_floats(TensorInfo(dtype=dtype, shape=(1,), start=0, end=len(data)), data)[0]

    assert math.isnan(one("F8_E4M3", b"\x7f"))
    assert math.isnan(one("F8_E5M2", b"\x7f"))
    assert one("F8_E5M2", b"\xfc") == -math.inf
    assert math.isnan(one("BF16", b"\xc0\x7f"))


def test_other_dtypes_and_truncated_data_have_no_value():
    assert decode_floats(TensorInfo(dtype="I32", shape=(1,), start=0, end=4), b"\0" * 4) is None
    assert decode_floats(TensorInfo(dtype="F32", shape=(1,), start=0, end=4), b"\0" * 3) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=8), below, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "?"]) | JSON,
        "shape": st.lists(st.integers(-2, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-2, 20), max_size=3) | JSON,
    },
)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_bytes_escape_as_another_error(content, size):
    message = refusal(lambda: parse_header(content, "x", size))
    assert message.startswith("x: ") or not message


@given(st.dictionaries(st.text(max_size=12), ENTRY | JSON, max_size=4), st.integers(0, 24), st.integers(-9, 9))
def test_no_header_escapes_as_another_error(header, data, lie):
    content = raw(header, b"\0" * data)
    length = max(int.from_bytes(content[:8], "little") + lie, 0)
    for candidate in (content, length.to_bytes(8, "little") + content[8:]):
        message = refusal(lambda given=candidate: parse_header(given, "x", len(given)))
        assert "\n" not in message
        if not message:
            parsed = parse_header(candidate, "x", len(candidate))
            assert all(0 <= t.start <= t.end <= parsed.size - parsed.header_bytes for t in parsed.tensors.values())
