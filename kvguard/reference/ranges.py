"""What keys and values span in each layer, measured by reference passes, put together over ranks and sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

from pydantic import ConfigDict, Field

from kvguard.vocabulary import Frozen


class Side(Frozen):
    """Keys or values of one layer. `amax` is max |x| of each KV head, in the order of the heads.

    `count` numbers were seen; of these e4m3 at scale 1.0 would saturate `saturated` (above 448), lose `underflowed` (not
    zero, below 2^-9), and keep `subnormal` with fewer than three bits of mantissa (below 2^-6, the lost ones included).
    """

    model_config = ConfigDict(extra="ignore")

    amax: tuple[float, ...]
    count: int
    saturated: int
    underflowed: int
    subnormal: int

    @property
    def largest(self) -> float:
        """Max |x| of all heads."""
        return max(self.amax)


class LayerRange(Frozen):
    """One layer's keys and values."""

    k: Side
    v: Side


Ranges = dict[str, LayerRange]
"""By layer name, in the model's order."""


class Spanned(Frozen):
    """What keys and values of `sequences` requests, `tokens` tokens in all, span."""

    ranges: Ranges = Field(default_factory=dict)
    tokens: int = 0
    sequences: int = 0

    def with_one(self, ranges: Ranges, tokens: int) -> Spanned:
        """One more request."""
        together = over_sequences([self.ranges, ranges]) if self.ranges else ranges
        return Spanned(ranges=together, tokens=self.tokens + tokens, sequences=self.sequences + 1)


def over_ranks(ranks: Sequence[Ranges]) -> Ranges:
    """One model's ranges from those of its tensor-parallel ranks, in the order of the ranks: their heads side by side.

    With more ranks than KV heads a head is on several ranks, which then appear as heads of their own. ValueError when
    ranks name different layers.
    """
    if any(list(rank) != list(ranks[0]) for rank in ranks):
        raise ValueError("ranks name different layers")
    return {name: _over([rank[name] for rank in ranks], heads_side_by_side=True) for name in ranks[0]}


def over_sequences(sequences: Iterable[Ranges]) -> Ranges:
    """The ranges of several sequences together; ValueError when they name different layers or heads."""
    return reduce(_two, sequences)


def _two(one: Ranges, other: Ranges) -> Ranges:
    if list(one) != list(other):
        raise ValueError("sequences name different layers")
    return {name: _over([one[name], other[name]], heads_side_by_side=False) for name in one}


def _over(parts: Sequence[LayerRange], *, heads_side_by_side: bool) -> LayerRange:
    def side(sides: Sequence[Side]) -> Side:
        if heads_side_by_side:
            amax = tuple(value for one in sides for value in one.amax)
        else:
            amax = tuple(max(values) for values in zip(*(one.amax for one in sides), strict=True))
        return Side(
            amax=amax,
            count=sum(one.count for one in sides),
            saturated=sum(one.saturated for one in sides),
            underflowed=sum(one.underflowed for one in sides),
            subnormal=sum(one.subnormal for one in sides),
        )

    return LayerRange(k=side([part.k for part in parts]), v=side([part.v for part in parts]))
