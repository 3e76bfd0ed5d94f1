"""Bytes per token: what the size of the cache proves about the width of its elements.

Capacity proves a width (16, 8, 4 bit), never a name: fp8_e4m3 and fp8_e5m2 take the same room.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvguard.evidence.layouts import LayerMix, Layout, close
from kvguard.vocabulary import Claim, Frozen, Source, Stage, width_bits

TOLERANCE = 0.02
"""Relative distance from a dtype's arithmetic that still counts as that dtype."""

_SHOWN_MIXES = 4


class CapacityReading(Frozen):
    """`kv_bytes` ÷ `kv_tokens` against the arithmetic of each layout, all of the same engine.

    `width` is in bits, that of all layers but those a layout keeps at 16 bit; None when nothing is proven. `candidates`
    are the dtypes whose arithmetic fits, `fits` the same with the layers that are at 16 bit. `mixes`, when nothing fits:
    how many layers at 16 bit would explain the size, which proves nothing. `block_tokens`: tokens that all blocks hold,
    where blocks and not tokens were compared. `reason` is one sentence for a person, and says why when `width` is None.
    """

    kv_bytes: int | None = None
    kv_tokens: int | None = None
    bytes_per_token: float | None = None
    block_tokens: int | None = None
    width: int | None = None
    candidates: tuple[str, ...] = ()
    fits: tuple[Layout, ...] = ()
    mixes: tuple[LayerMix, ...] = ()
    reason: str = ""

    @property
    def claim(self) -> Claim:
        """The reading as a claim about the cache's width."""
        value = None if self.width is None else f"{self.width}-bit"
        tokens = f"{self.kv_tokens} tokens" if self.block_tokens is None else f"{self.block_tokens} tokens of blocks"
        return Claim(
            stage=Stage.OBSERVED,
            source=Source.CAPACITY,
            field="kv_cache_dtype",
            value=value,
            where=f"capacity: {self.kv_bytes} bytes ÷ {tokens}",
            note=self.reason,
        )

    def sixteen_bit_layers(self, dtype: str) -> tuple[tuple[int, ...], ...]:
        """The sets of layers that may be at 16 bit if the others have this dtype or width ("8-bit")."""
        named = [fit for fit in self.fits if dtype in (fit.dtype, f"{width_bits(fit.dtype)}-bit")]
        return tuple(dict.fromkeys(fit.sixteen_bit_layers for fit in named))


def capacity(kv_bytes: int | None, kv_tokens: int | None, expected: Sequence[Layout]) -> CapacityReading:
    """Which width `kv_bytes` for `kv_tokens` proves.

    Both must speak of the same thing (one engine, all its ranks). `expected` are the layouts that the architecture could
    have.
    """
    if kv_bytes is None or kv_tokens is None or kv_bytes <= 0 or kv_tokens <= 0:
        missing = "bytes" if kv_bytes is None or kv_bytes <= 0 else "tokens"
        return CapacityReading(kv_bytes=kv_bytes, kv_tokens=kv_tokens, reason=f"the cache's {missing} are not known")
    per_token = kv_bytes / kv_tokens
    fitting = tuple(layout for layout in expected if close(per_token, layout.bytes_per_token, TOLERANCE))
    widths = {width_bits(layout.dtype) for layout in fitting}
    names = sorted({layout.dtype for layout in fitting})
    width = None
    if not expected:
        reason = f"{per_token:,.0f} bytes per token, and no arithmetic for this architecture to compare with"
    elif not fitting:
        nearest = min(expected, key=lambda layout: abs(layout.bytes_per_token - per_token))
        reason = (
            f"{per_token:,.0f} bytes per token fit no dtype within {TOLERANCE:.0%} "
            f"(nearest: {nearest.dtype} with {nearest.bytes_per_token:,.0f}); padded pages or mixed layers do that"
        )
    elif len(widths) > 1 or None in widths:
        reason = f"{per_token:,.0f} bytes per token fit several widths: {', '.join(names)}"
    else:
        (width,) = widths
        reason = f"{per_token:,.0f} bytes per token are {width}-bit for this architecture{_kept(fitting)}"
    return CapacityReading(
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        bytes_per_token=per_token,
        width=width,
        candidates=tuple(names),
        fits=fitting,
        reason=reason,
    )


def mix_words(mixes: Sequence[LayerMix]) -> str:
    """What would explain a size that fits no layout: "such as 4 layers at 16 bit and the others fp8_e4m3"; "" for nothing."""
    shown = [
        f"{_layers(mix.sixteen_bit_layers)} at 16 bit and the others {' or '.join(mix.dtypes[:2])}"
        + " or the like" * (len(mix.dtypes) > 2)
        for mix in mixes[:_SHOWN_MIXES]
    ]
    more = f", and {len(mixes) - len(shown)} more" if len(mixes) > len(shown) else ""
    return f"such as {'; or '.join(shown)}{more}" if shown else ""


def _kept(fitting: Sequence[Layout]) -> str:
    """What the fitting layouts say of layers at 16 bit."""
    sets = {layout.sixteen_bit_layers for layout in fitting}
    if sets == {()}:
        return ""
    if len(sets) > 1:
        return ", whether or not some layers are at 16 bit"
    (layers,) = sets
    return f", with {_layers(len(layers))} at 16 bit"


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"
