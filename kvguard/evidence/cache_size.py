"""Bytes and tokens of one engine's cache, from what its metrics, its log and its workers say."""

from __future__ import annotations

from collections.abc import Sequence

from kvguard.checkpoint.models import Geometry
from kvguard.evidence.capacity import TOLERANCE, CapacityReading, capacity, mix_words
from kvguard.evidence.layouts import layouts, mixes, pooled_layouts, stated_skips
from kvguard.evidence.replies import TensorReading
from kvguard.evidence.tensors import gaps
from kvguard.vocabulary import Claim, Stage


def measure(
    *,
    tensors: TensorReading | None,
    metrics_claims: Sequence[Claim],
    log_claims: Sequence[Claim],
    geometry: Geometry | None,
    given_bytes: int | None = None,
    ranks: int | None = None,
) -> CapacityReading:
    """The capacity reading of one engine.

    Bytes: `given_bytes` (all ranks of one engine), else the workers' own, else metrics or log times the number of
    ranks. `ranks` is that number when the caller knows it; otherwise the log has to say. Tokens: metrics or log,
    else the workers' blocks.
    """
    tokens, tokens_where = kv_tokens(metrics_claims, log_claims)
    inside = tensors if tensors is not None and not gaps(tensors) else None
    if tokens is None and inside is not None and inside.kv_tokens is not None:
        tokens, tokens_where = inside.kv_tokens // inside.engines, "blocks × block size in the workers"
    if given_bytes is not None:
        size: int | None = given_bytes
        size_where = "as given"
    elif inside is not None and inside.kv_bytes is not None:
        size, size_where = inside.kv_bytes // inside.engines, "cache storages of all ranks"
    else:
        size, size_where = kv_bytes(metrics_claims, log_claims, ranks or ranks_of_one_engine(log_claims))
    tensor_parallel = _last(log_claims, "tensor_parallel_size")
    copies = tensor_parallel.value if tensor_parallel else _tensor_parallel(tensors) or ranks or 1
    skipped = stated_skips((*metrics_claims, *log_claims))
    unknown = [where for value, where in ((size, size_where), (tokens, tokens_where)) if value is None]
    blocks = _block_tokens(metrics_claims) if geometry is not None and geometry.sliding_layers else None
    if blocks is not None and size is not None:
        expected = pooled_layouts(geometry, copies, skipped, one_table=_one_table(geometry, metrics_claims))
        reading = capacity(size, blocks, expected)
        per_token = size / tokens if tokens else None
        reading = reading.model_copy(update={"kv_tokens": tokens, "block_tokens": blocks, "bytes_per_token": per_token})
        tokens_where = "blocks × block size in the metrics"
    else:
        reading = capacity(size, tokens, layouts(geometry, copies, skipped))
        if reading.bytes_per_token is not None and not reading.fits:
            found = mixes(geometry, reading.bytes_per_token, TOLERANCE, copies)
            reason = ", ".join(filter(None, (reading.reason, mix_words(found))))
            reading = reading.model_copy(update={"mixes": found, "reason": reason})
    reason = "; ".join(unknown) or f"{reading.reason} (bytes: {size_where}; tokens: {tokens_where})"
    return reading.model_copy(update={"reason": reason})


def _block_tokens(metrics_claims: Sequence[Claim]) -> int | None:
    """Tokens that all blocks of one engine hold, where its page says so."""
    blocks, size = _last(metrics_claims, "kv_blocks"), _last(metrics_claims, "block_size")
    return blocks.value * size.value if blocks is not None and size is not None else None


def _one_table(geometry: Geometry | None, metrics_claims: Sequence[Claim]) -> bool | None:
    """Whether a sequence has one table of blocks for all layers: as many blocks as its tokens fill; None when not known.

    A table of windowed layers adds two blocks at least, so one more is the length's rounding.
    """
    if geometry is None or geometry.sliding_layers == geometry.attention_layers:
        return True
    each, longest, size = (_last(metrics_claims, name) for name in ("blocks_per_sequence", "max_model_len", "block_size"))
    if each is None or longest is None or size is None:
        return None
    filled = -(-longest.value // size.value)
    return None if each.value < filled else bool(each.value <= filled + 1)


def _tensor_parallel(tensors: TensorReading | None) -> int | None:
    return next((reply.tp_size for reply in tensors.replies if reply.tp_size), None) if tensors is not None else None


def kv_tokens(metrics_claims: Sequence[Claim], log_claims: Sequence[Claim]) -> tuple[int | None, str]:
    """Tokens of one engine, and where they were read or why they are not known.

    The engine's own number comes first (metrics 0.24.0+, then the log), blocks × block size last. A block size in
    the log that the metric does not show makes that product meaningless (0.18.0..0.22.1 never tell the front end).
    """
    metric = _last(metrics_claims, "kv_tokens")
    log = _last(log_claims, "kv_tokens")
    if metric is not None and "kv_cache_size_tokens" in metric.where:
        return metric.value, metric.where
    if log is not None:
        return log.value, log.where
    if metric is None:
        return None, "neither metrics nor log say how many tokens the cache holds"
    shown, changed = _last(metrics_claims, "block_size"), _last(log_claims, "block_size")
    if shown is not None and changed is not None and shown.value != changed.value:
        return None, f"{shown.where} says {shown.value}, {changed.where} says {changed.value}: the metric is stale"
    return metric.value, metric.where


def ranks_of_one_engine(log_claims: Sequence[Claim]) -> int | None:
    """Tensor-parallel × pipeline-parallel ranks that share one engine's cache, None when the log does not say."""
    sizes = [_last(log_claims, f"{kind}_parallel_size") for kind in ("tensor", "pipeline")]
    if any(size is None for size in sizes):
        return None
    product = 1
    for size in sizes:
        product *= size.value if size is not None else 1
    return product


def kv_bytes(metrics_claims: Sequence[Claim], log_claims: Sequence[Claim], ranks: int | None) -> tuple[int | None, str]:
    """Bytes of one engine's cache over all its ranks, and where they were read or why they are not known.

    Both sources speak of one rank, so without the number of ranks there is no answer: half of a 16-bit cache looks
    like a whole 8-bit one. Ranks may differ in what is available; the engine sizes all by the smallest.
    """
    metric = _last(metrics_claims, "kv_memory_bytes")
    sizes = [claim for claim in log_claims if claim.field == "kv_memory_bytes" and claim.value]
    smallest = min(sizes, key=lambda claim: claim.value, default=None)
    claim = metric or smallest
    if claim is None:
        return None, "neither metrics nor log say how many bytes the cache has"
    if ranks is None:
        return None, f"{claim.where} says {claim.value} bytes a rank; how many ranks there are is not known"
    return claim.value * ranks, f"{claim.where} × {ranks} rank(s)"


def _last(claims: Sequence[Claim], field: str) -> Claim | None:
    found = [c for c in claims if c.stage is Stage.OBSERVED and c.field == field and c.value is not None]
    return found[-1] if found else None
