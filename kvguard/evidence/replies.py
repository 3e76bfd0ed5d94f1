"""The reply document of the reader inside the engine, as models: one reply a worker, one entry a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvguard.vocabulary import UsageError, canonical_dtype, width_bits

MAX_REPLY = 64 * 1024 * 1024
"""Bytes of a reply document that are read at most."""

_STORAGE_BITS = {
    "bfloat16": 16,
    "float16": 16,
    "half": 16,
    "float32": 32,
    "uint8": 8,
    "int8": 8,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
}
# Encodings that a byte tensor's dtype itself names.
_NAMED_STORAGE = {"float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_INDEX = re.compile(r"(?:^|\.)(\d{1,9})(?:\.|$)")


class NonceMismatch(UsageError):
    """An answer to another question: a late reply. The channel that carried it can no longer be trusted."""


class _Reply(BaseModel):
    """Part of the reply document; fields that this kvguard does not know are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings", populate_by_name=True)


class LayerReply(_Reply):
    """One attention layer on one rank. Scale lists hold one value, or one for each KV head; None: not there."""

    name: str
    class_name: str = Field(default="", alias="class")
    backend: str | None = None
    kv_cache_dtype: str | None = None
    tensor_dtype: str | None = None
    shape: tuple[int, ...] | None = None
    k_scale: tuple[float, ...] | None = None
    v_scale: tuple[float, ...] | None = None
    q_scale: tuple[float, ...] | None = None
    k_scale_float: float | None = None
    v_scale_float: float | None = None
    q_scale_float: float | None = None
    sliding_window: Any = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    error: str | None = None

    @property
    def index(self) -> str:
        """The layer's index as --kv-cache-dtype-skip-layers spells it; its name when it has none."""
        found = _INDEX.findall(self.name)
        return found[0] if len(found) == 1 else self.name

    @property
    def dtype(self) -> str | None:
        """The dtype of this layer's cache: its own name for it if the tensor agrees, else what the tensor shows."""
        if self.tensor_dtype is None:
            return None
        storage = self.tensor_dtype.removeprefix("torch.")
        bits = _STORAGE_BITS.get(storage)
        named = None if self.kv_cache_dtype in (None, "auto") else canonical_dtype(self.kv_cache_dtype or "")
        if self.mismatch or named is None or width_bits(named) is None:
            return canonical_dtype(_NAMED_STORAGE.get(storage, f"{bits}-bit" if bits == 8 else storage))
        return named

    @property
    def mismatch(self) -> str:
        """Why the layer's name for its dtype cannot be true of its tensor; "" when it can."""
        if self.tensor_dtype is None or self.kv_cache_dtype is None:
            return ""
        storage = self.tensor_dtype.removeprefix("torch.")
        bits = _STORAGE_BITS.get(storage)
        if bits is None:
            return f"cache tensor has the unknown dtype {self.tensor_dtype}"
        if self.kv_cache_dtype == "auto":
            return "" if bits >= 16 else f"kv_cache_dtype auto, cache tensor {self.tensor_dtype}"
        named = canonical_dtype(self.kv_cache_dtype)
        width = width_bits(named)
        encoding = _NAMED_STORAGE.get(storage)
        agree = width is None or (bits == 8 if width <= 8 else canonical_dtype(storage) == named)
        if agree and encoding and named in ("fp8_e4m3", "fp8_e5m2"):
            agree = encoding == named
        return "" if agree else f"kv_cache_dtype {self.kv_cache_dtype}, cache tensor {self.tensor_dtype}"

    @property
    def has_cache(self) -> bool:
        """False for layers that keep no KV cache: encoder-only attention, recurrent and linear layers."""
        return self.tensor_dtype is not None or not (
            self.class_name.startswith("EncoderOnly") or (self.kv_cache_dtype is None and self.error is None)
        )


class Limits(_Reply):
    """The scheduler's and the cache's sizes, of one data-parallel engine."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None


class RankReply(_Reply):
    """One worker's answer. `kv_bytes` counts each storage of its cache once."""

    nonce: str
    rank: int | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None
    dp_rank: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    engine_version: str | None = None
    model_dtype: str | None = None
    cache_dtype_config: str | None = None
    limits: Limits = Limits()
    kv_bytes: int | None = None
    layers: tuple[LayerReply, ...] = ()
    error: str | None = None

    @property
    def who(self) -> str:
        """The rank in words: "rank 1", or "DP 1 rank 0" with data parallelism."""
        return f"DP {self.dp_rank} rank {self.rank}" if (self.dp_size or 1) > 1 else f"rank {self.rank}"


class TensorReading(_Reply):
    """All answers to one question."""

    replies: tuple[RankReply, ...]
    expected_ranks: int | None = None

    def layers(self) -> Iterator[tuple[RankReply, LayerReply]]:
        """Every layer with a cache, with the rank that holds it."""
        for reply in self.replies:
            for layer in reply.layers:
                if layer.has_cache:
                    yield reply, layer

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of all ranks, or None when one does not say."""
        sizes = [reply.kv_bytes for reply in self.replies]
        return sum(s for s in sizes if s is not None) if sizes and None not in sizes else None

    @property
    def engines(self) -> int:
        """How many data-parallel engines answered."""
        return max(1, len({reply.dp_rank for reply in self.replies}))

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of all engines as blocks × block size; None where layers differ, so that blocks are shared out."""
        limits = self.replies[0].limits if self.replies else Limits()
        if limits.num_blocks is None or limits.block_size is None:
            return None
        if any(layer.sliding_window is not None for _, layer in self.layers()):
            return None
        return limits.num_blocks * limits.block_size * self.engines

    @property
    def backends(self) -> tuple[str, ...]:
        """The attention backends' own names, each once."""
        return tuple(sorted({layer.backend for _, layer in self.layers() if layer.backend}))


def parse_replies(data: bytes | dict[str, Any], nonce: str) -> TensorReading:
    """Read a reply document. UsageError when it is not one, NonceMismatch when it answers another question."""
    try:
        if isinstance(data, dict):
            reading = TensorReading.model_validate(data)
        elif len(data) > MAX_REPLY:
            raise UsageError(f"evidence reply: {len(data)} bytes, more than {MAX_REPLY} that are read")
        else:
            reading = TensorReading.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise UsageError(f"evidence reply: {place}: {first['msg']}; kvguard's file in the engine is another one") from None
    for reply in reading.replies:
        if reply.nonce != nonce:
            raise NonceMismatch(f"evidence reply of {reply.who} answers another question (nonce differs)")
    return reading
