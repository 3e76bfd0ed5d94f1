"""Bytes per token: what the size of the cache proves about the width of its elements.

Capacity proves a width (16, 8, 4 bit), never a name: fp8_e4m3 and fp8_e5m2 take the same room.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvguard.vocabulary import Claim, Frozen, Source, Stage, width_bits

TOLERANCE = 0.02
"""Relative distance from a dtype's arithmetic that still counts as that dtype."""


class CapacityReading(Frozen):
    """`kv_bytes` ÷ `kv_tokens` against the arithmetic of each dtype, all of the same engine.

    `width` is in bits, None when nothing is proven; `candidates` are the dtypes whose arithmetic fits; `reason`
    is one sentence for a person, and says why when `width` is None.
    """

    kv_bytes: int | None = None
    kv_tokens: int | None = None
    bytes_per_token: float | None = None
    width: int | None = None
    candidates: tuple[str, ...] = ()
    reason: str = ""

    @property
    def claim(self) -> Claim:
        """The reading as a claim about the cache's width."""
        value = None if self.width is None else f"{self.width}-bit"
        where = f"capacity: {self.kv_bytes} bytes ÷ {self.kv_tokens} tokens"
        return Claim(
            stage=Stage.OBSERVED,
            source=Source.CAPACITY,
            field="kv_cache_dtype",
            value=value,
            where=where,
            note=self.reason,
        )


def capacity(kv_bytes: int | None, kv_tokens: int | None, bytes_by_dtype: Mapping[str, float]) -> CapacityReading:
    """Which width `kv_bytes` for `kv_tokens` proves.

    Both must speak of the same thing (one engine, all its ranks). `bytes_by_dtype` holds bytes per token over
    all layers for each dtype the architecture could run.
    """
    if kv_bytes is None or kv_tokens is None or kv_bytes <= 0 or kv_tokens <= 0:
        missing = "bytes" if kv_bytes is None or kv_bytes <= 0 else "tokens"
        return CapacityReading(kv_bytes=kv_bytes, kv_tokens=kv_tokens, reason=f"the cache's {missing} are not known")
    per_token = kv_bytes / kv_tokens
    fitting = {name: size for name, size in bytes_by_dtype.items() if _close(per_token, size)}
    widths = {width_bits(name) for name in fitting}
    reading = CapacityReading(
        kv_bytes=kv_bytes, kv_tokens=kv_tokens, bytes_per_token=per_token, candidates=tuple(sorted(fitting))
    )
    if not bytes_by_dtype:
        reason = f"{per_token:,.0f} bytes per token, and no arithmetic for this architecture to compare with"
    elif not fitting:
        nearest = min(bytes_by_dtype, key=lambda name: abs(bytes_by_dtype[name] - per_token))
        reason = (
            f"{per_token:,.0f} bytes per token fit no dtype within {TOLERANCE:.0%} "
            f"(nearest: {nearest} with {bytes_by_dtype[nearest]:,.0f}); padded pages or mixed layers do that"
        )
    elif len(widths) > 1 or None in widths:
        reason = f"{per_token:,.0f} bytes per token fit several widths: {', '.join(sorted(fitting))}"
    else:
        (width,) = widths
        reason = f"{per_token:,.0f} bytes per token are {width}-bit for this architecture"
        return reading.model_copy(update={"width": width, "reason": reason})
    return reading.model_copy(update={"reason": reason})


def _close(found: float, expected: float) -> bool:
    return expected > 0 and abs(found - expected) <= TOLERANCE * expected
