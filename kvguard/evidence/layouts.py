"""What an engine's cache may look like inside: which dtype in which layers, and what a token then takes.

A capacity is compared with these. Layers are told apart only where the engine says which it keeps at 16 bit
(--kv-cache-dtype-skip-layers, which includes what a format keeps by itself from 0.20.0 on); without that, any number of
layers at 16 bit could explain any size between two widths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvguard.checkpoint.geometry import boundary, bytes_per_token, windowed_layers
from kvguard.checkpoint.models import Geometry
from kvguard.vocabulary import KV_DTYPES, Claim, Frozen, width_bits

SLIDING = "sliding_window"
_ENTRY = re.compile(r"'([^']*)'|\"([^\"]*)\"")


class Layout(Frozen):
    """One dtype in all layers but `sixteen_bit_layers` (indices as the model counts), and bytes of one token in all of them."""

    dtype: str
    sixteen_bit_layers: tuple[int, ...] = ()
    bytes_per_token: float


class LayerMix(Frozen):
    """So many layers at 16 bit, whichever they are, and the others at one of these dtypes."""

    dtypes: tuple[str, ...]
    sixteen_bit_layers: int
    bytes_per_token: float


def copies(geometry: Geometry, tensor_parallel: int) -> int:
    """How often an engine stores each byte: heads on several ranks when there are fewer of them, MLA's latent on every one."""
    return tensor_parallel if geometry.mla else max(1, tensor_parallel // (geometry.kv_heads or 1))


def layouts(geometry: Geometry | None, tensor_parallel: int = 1, skipped: Sequence[str] = ()) -> tuple[Layout, ...]:
    """Every layout of a model without windows and recurrent layers whose arithmetic is known, with bytes over all ranks.

    `skipped` is the engine's list of layers at 16 bit; each dtype then stands with and without it, because versions differ in
    what they do with it, and entries may match no layer.
    """
    if geometry is None or geometry.sliding_layers or geometry.hybrid:
        return ()
    times = copies(geometry, tensor_parallel)
    stated = skipped_layers(geometry, skipped)
    found: dict[tuple[str, tuple[int, ...]], Layout] = {}
    for dtype in KV_DTYPES:
        own = _places(geometry, boundary(geometry, dtype))
        kept = [own] if (width_bits(dtype) or 16) >= 16 else [own, tuple(sorted({*own, *stated}))]
        for wide in kept:
            size = bytes_per_token(geometry, dtype, len(wide))
            if size is not None and len(wide) < (geometry.attention_layers or 0):
                found[dtype, wide] = Layout(dtype=dtype, sixteen_bit_layers=wide, bytes_per_token=size * times)
    return tuple(found.values())


def pooled_layouts(
    geometry: Geometry | None, tensor_parallel: int = 1, skipped: Sequence[str] = (), *, one_table: bool | None = None
) -> tuple[Layout, ...]:
    """The same for a model with windows, with the bytes that one token of a *block* takes.

    Such an engine cuts the layers into groups of equal size; a block holds the layers of one group, so the bytes of a block say
    nothing of how many tokens a sequence needs. `one_table`: whether all layers are one group (hybrid manager off, or every
    layer has the same window); None when the engine does not say, and both are listed. () when `skipped` matches a layer:
    pages of two dtypes are made equal, by larger blocks or by padding, and the size then shows neither.
    """
    layers = geometry.attention_layers if geometry is not None else None
    if geometry is None or not layers or not geometry.sliding_layers or geometry.hybrid or geometry.unknown_reason:
        return ()
    if skipped_layers(geometry, skipped):
        return ()
    sizes = {layers} if one_table is not False else set()
    sizes |= {group_size(geometry)} if one_table is not True else set()
    times = copies(geometry, tensor_parallel)
    found = []
    for dtype in KV_DTYPES:
        cost = bytes_per_token(geometry, dtype, 0)
        if cost is not None and not boundary(geometry, dtype):
            found += [Layout(dtype=dtype, bytes_per_token=cost / layers * size * times) for size in sorted(sizes)]
    return tuple(found)


def group_size(geometry: Geometry) -> int:
    """Layers of a group when windowed layers have groups of their own (0.27.1 kv_cache_utils.py:1245, 0.32.0 :1467)."""
    layers = geometry.attention_layers or 0
    kinds = [count for count in (geometry.sliding_layers, layers - geometry.sliding_layers) if count]
    return max(kinds) if max(kinds) < 1.5 * min(kinds) else min(kinds)


def skipped_layers(geometry: Geometry, skipped: Sequence[str]) -> tuple[int, ...]:
    """The attention layers that entries of --kv-cache-dtype-skip-layers match; "0,1" in one entry matches none."""
    indices = geometry.layer_indices or ()
    windowed = windowed_layers(geometry) if SLIDING in skipped else ()
    return tuple(sorted({*windowed, *(index for index in indices if str(index) in skipped)}))


def stated_skips(claims: Iterable[Claim]) -> tuple[str, ...]:
    """The entries of every skip-layers list among claims, each written as a Python list of strings."""
    texts = [str(claim.value) for claim in claims if claim.field == "kv_cache_dtype_skip_layers" and claim.value]
    return tuple(dict.fromkeys(one or other for text in texts for one, other in _ENTRY.findall(text)))


def mixes(geometry: Geometry | None, per_token: float, tolerance: float, tensor_parallel: int = 1) -> tuple[LayerMix, ...]:
    """The numbers of 16-bit layers that would explain `per_token` bytes, with the dtypes of the other layers.

    Dtypes that cost the same are one entry. Only for models without windows and recurrent layers; () for others.
    """
    layers = geometry.attention_layers if geometry is not None else None
    if geometry is None or not layers or geometry.sliding_layers or geometry.hybrid:
        return ()
    times = copies(geometry, tensor_parallel)
    found: dict[tuple[int, float], list[str]] = {}
    for dtype in KV_DTYPES:
        if (width_bits(dtype) or 16) >= 16:
            continue
        for wide in range(1, layers):
            size = bytes_per_token(geometry, dtype, wide)
            if size is not None and close(per_token, size * times, tolerance):
                found.setdefault((wide, size * times), []).append(dtype)
    return tuple(
        LayerMix(dtypes=tuple(dtypes), sixteen_bit_layers=wide, bytes_per_token=size)
        for (wide, size), dtypes in sorted(found.items())
    )


def close(found: float, expected: float, tolerance: float) -> bool:
    """Whether two sizes differ by at most this share of the expected one."""
    return expected > 0 and abs(found - expected) <= tolerance * expected


def _places(geometry: Geometry, positions: Sequence[int]) -> tuple[int, ...]:
    """Indices as the model counts its layers, of positions among the attention layers."""
    indices = geometry.layer_indices
    return (
        tuple(positions) if indices is None else tuple(indices[position] for position in positions if position < len(indices))
    )
