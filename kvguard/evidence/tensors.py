"""What the reader inside the engine answered: every worker's cache tensors, scales and backends.

This is the only evidence that proves a dtype. It does so when every expected rank answered, each layer's name
for its dtype agrees with the tensor it points at, and ranks agree with each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvguard.evidence.replies import LayerReply, NonceMismatch, RankReply, TensorReading, parse_replies
from kvguard.vocabulary import Claim, Json, Source, Stage, width_bits

__all__ = [
    "LayerReply",
    "NonceMismatch",
    "RankReply",
    "TensorReading",
    "claims",
    "disagreements",
    "extent",
    "gaps",
    "invalid_scales",
    "is_layer",
    "parse_replies",
]

SCALE_TOLERANCE = 1e-6
"""Relative difference of two copies of one float32 scale that still counts as equal."""


def gaps(reading: TensorReading) -> tuple[str, ...]:
    """Why the answers do not cover the whole engine; empty when they do."""
    found: list[str] = []
    answered = {(r.dp_rank, r.pp_rank, r.tp_rank, r.rank) for r in reading.replies}
    expected = max(
        [
            reading.expected_ranks or 0,
            *((r.tp_size or 1) * (r.pp_size or 1) * reading.engines for r in reading.replies),
        ],
        default=0,
    )
    if reading.expected_ranks is None:
        found.append("how many ranks there are is not known")
    if len(answered) < max(expected, 1):
        found.append(f"{len(answered)} of {max(expected, 1)} ranks answered")
    for reply in reading.replies:
        if reply.error:
            found.append(f"{reply.who}: {reply.error}")
        elif not any(layer.has_cache for layer in reply.layers):
            found.append(f"{reply.who}: no attention layer with a KV cache")
        for layer in reply.layers:
            if layer.error:
                found.append(f"{reply.who} layer {layer.name}: {layer.error}")
            elif layer.has_cache and layer.tensor_dtype is None:
                found.append(f"{reply.who} layer {layer.name}: no cache tensor")
    return tuple(found)


def disagreements(reading: TensorReading) -> tuple[str, ...]:
    """Ranks that differ from each other, and names that their tensors contradict."""
    found = [f"{reply.who} layer {layer.name}: {layer.mismatch}" for reply, layer in reading.layers() if layer.mismatch]
    first: dict[str, tuple[RankReply, LayerReply]] = {}
    for reply, layer in reading.layers():
        other_reply, other = first.setdefault(layer.name, (reply, layer))
        for field in ("kv_cache_dtype", "tensor_dtype", "backend"):
            ours, theirs = getattr(layer, field), getattr(other, field)
            if ours != theirs:
                found.append(f"layer {layer.name}: {field} {theirs} on {other_reply.who}, {ours} on {reply.who}")
    return tuple(found)


def invalid_scales(reading: TensorReading, calculated: bool = False) -> tuple[str, ...]:
    """Scales of quantized layers that no arithmetic survives, or whose copies differ.

    Device and host copies must be equal, and so must the copies of one scale on several ranks, unless each rank
    calculated its own (`calculated`) or holds its own heads' scales.
    """
    found: list[str] = []
    first: dict[tuple[str, str], tuple[float, str]] = {}
    for reply, layer in reading.layers():
        if (width_bits(layer.dtype or "") or 16) >= 16:
            continue
        for name in ("k_scale", "v_scale", "q_scale"):
            device: tuple[float, ...] | None = getattr(layer, name)
            host: float | None = getattr(layer, f"{name}_float")
            where = f"{reply.who} layer {layer.name}: {name}"
            values = [*(device or ()), *([] if host is None else [host])]
            bad = next((v for v in values if not math.isfinite(v) or v <= 0), None)
            if bad is not None:
                found.append(f"{where} is {bad}")
            elif device and host is not None and not _same(max(device), host):
                found.append(f"{where} is {max(device)} on the device and {host} on the host")
            elif device and len(device) == 1 and name != "q_scale" and not calculated:
                value, other = first.setdefault((layer.name, name), (device[0], reply.who))
                if not _same(value, device[0]):
                    found.append(f"{where} is {device[0]}, and {value} on {other}")
    return tuple(found)


def claims(reading: TensorReading) -> tuple[Claim, ...]:
    """One claim for each rank's bytes, and one for each rank and layer."""
    found: list[Claim] = []
    for reply in reading.replies:
        if reply.kv_bytes is not None:
            found.append(_claim("kv_memory_bytes", reply.kv_bytes, reply.who, "each storage counted once"))
        for layer in reply.layers:
            if not layer.has_cache:
                continue
            value = {
                "kv_cache_dtype": layer.dtype,
                "tensor_dtype": layer.tensor_dtype,
                "backend": layer.backend,
                "k_scale": _plain(layer.k_scale),
                "v_scale": _plain(layer.v_scale),
            }
            note = layer.error or layer.mismatch
            found.append(_claim("layer_kv_cache", value, f"{reply.who} layer {layer.name}", note))
    return tuple(found)


def extent(claims: Iterable[Claim]) -> str:
    """How much of the engine these claims of `claims` speak about: "30 layers on 2 ranks"; "" for no layer."""
    places = [claim.where.partition(" layer ") for claim in claims if is_layer(claim)]
    if not places:
        return ""
    ranks, layers = len({rank for rank, _, _ in places}), len({layer for _, _, layer in places})
    return f"{layers} layer{'s' * (layers != 1)} on {ranks} rank{'s' * (ranks != 1)}"


def is_layer(claim: Claim) -> bool:
    """Whether this is what one layer's cache tensor on one rank showed."""
    return claim.source is Source.TENSORS and claim.field == "layer_kv_cache"


def _claim(field: str, value: Json, where: str, note: str) -> Claim:
    return Claim(stage=Stage.OBSERVED, source=Source.TENSORS, field=field, value=value, where=where, note=note)


def _plain(values: tuple[float, ...] | None) -> list[Json] | None:
    return None if values is None else [v if math.isfinite(v) else str(v) for v in values]


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SCALE_TOLERANCE)
