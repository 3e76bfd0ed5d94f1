"""The header of a safetensors file, and the few values worth reading from its data."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from kvguard.checkpoint.json_config import one_line, strict_json
from kvguard.checkpoint.models import SafetensorsHeader, TensorInfo
from kvguard.vocabulary import UsageError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit (safetensors, MAX_HEADER_SIZE)."""

MAX_DIMENSIONS = 16
"""No tensor of a model has more; a longer shape would only cost time."""

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


def header_length(first: bytes, file: str, file_size: int) -> int:
    """The length of the JSON header from a file's first eight bytes. UsageError when the file cannot hold it."""
    if file_size < 8 or len(first) < 8:
        raise UsageError(f"{file}: {file_size} bytes, too short for a safetensors file (8 length bytes and a header)")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise UsageError(f"{file}: bytes 0-7 announce a header of {length} bytes; safetensors allows {MAX_HEADER_BYTES}")
    if length > file_size - 8:
        raise UsageError(f"{file}: bytes 0-7 announce a header of {length} bytes, but the file has {file_size}; truncated?")
    return length


def parse_header(prefix: bytes, file: str, file_size: int) -> SafetensorsHeader:
    """The header in `prefix`, the first bytes of a file (the whole header at least).

    UsageError, naming the file and the tensor, for whatever the format does not allow: a length that lies, no JSON,
    NaN, a name twice, wrong types, offsets that are negative, out of the file, overlapping or unlike dtype and shape.
    """
    length = header_length(prefix, file, file_size)
    if len(prefix) < 8 + length:
        raise UsageError(f"{file}: header of {length} bytes announced, only {len(prefix) - 8} read; truncated?")
    value = strict_json(prefix[8 : 8 + length], f"{file}: header", unique=True)
    if not isinstance(value, dict):
        raise UsageError(f"{file}: header must be a JSON object")
    data_bytes = file_size - 8 - length
    tensors = {name: _tensor(name, entry, file, data_bytes) for name, entry in value.items() if name != "__metadata__"}
    _check_layout(tensors, file)
    return SafetensorsHeader(file=file, size=file_size, header_bytes=8 + length, tensors=tensors)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor(name: str, entry: Any, file: str, data_bytes: int) -> TensorInfo:
    try:
        return _checked(entry, data_bytes)
    except ValueError as error:
        raise UsageError(f"{file}: tensor {one_line(name)!r}: {error}") from None


def _checked(entry: Any, data_bytes: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise ValueError("expected an object with dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise ValueError("dtype must be a string")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_whole(size) for size in shape):
        raise ValueError(f"shape must be a list of at most {MAX_DIMENSIONS} whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(offset) for offset in offsets):
        raise ValueError("data_offsets must be two whole numbers")
    start, end = offsets
    if start > end or end > data_bytes:
        raise ValueError(f"data_offsets {start}-{end} lie outside the file's {data_bytes} data bytes; truncated?")
    bits = _BITS.get(dtype)
    if bits is not None and (end - start) * 8 != math.prod(shape) * bits:
        raise ValueError(f"{end - start} bytes of data for shape {shape} of {dtype}")
    return TensorInfo(dtype=dtype, shape=tuple(shape), start=start, end=end)


def _check_layout(tensors: Mapping[str, TensorInfo], file: str) -> None:
    reached, last = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start < reached:
            raise UsageError(f"{file}: tensor {one_line(name)!r}: its data overlap those of {one_line(last)!r}")
        reached, last = tensor.end, name


def _small_float(byte: int, exponent_bits: int) -> float:
    """An 8-bit float: 4 exponent bits is e4m3fn (NaN at 0x7f, no infinity), 5 is e5m2 (IEEE-like)."""
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    if exponent_bits == 4 and byte & 0x7F == 0x7F:
        return math.nan
    if exponent_bits == 5 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def _unpacked(code: str) -> Callable[[bytes], tuple[float, ...]]:
    size = struct.calcsize(code)
    return lambda data: struct.unpack(f"<{len(data) // size}{code}", data)


def _bf16(data: bytes) -> tuple[float, ...]:
    widened = b"".join(b"\0\0" + data[index : index + 2] for index in range(0, len(data), 2))
    return struct.unpack(f"<{len(widened) // 4}f", widened)


_DECODERS: Mapping[str, Callable[[bytes], tuple[float, ...]]] = {
    "F64": _unpacked("d"),
    "F32": _unpacked("f"),
    "F16": _unpacked("e"),
    "BF16": _bf16,
    "F8_E4M3": lambda data: tuple(_small_float(byte, 4) for byte in data),
    "F8_E5M2": lambda data: tuple(_small_float(byte, 5) for byte in data),
}


def decode_floats(tensor: TensorInfo, data: bytes) -> tuple[float, ...] | None:
    """The values of a small float tensor in storage order; None for a dtype that is no float this knows."""
    decoder = _DECODERS.get(tensor.dtype)
    return None if decoder is None or len(data) != tensor.end - tensor.start else decoder(data)
