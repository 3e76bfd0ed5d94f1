"""Sizes that a start measured, kept apart from what the content digest covers.

Memory profiling gives two equal starts on a GPU caches of a few blocks more or less. What a size proves, the width
of an element, is digested; the size itself stands in `predicate.undigested.measured` and is put back on reading.
All claims here are JSON as `record.normalize` makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from kvguard.vocabulary import Claim, Json, Source, Stage

SIZE_FIELDS = frozenset({"kv_tokens", "kv_memory_bytes", "kv_blocks", "num_blocks"})
"""Fields of observed claims that are sizes of the cache."""

EFFECTIVE_SIZES = ("kv_bytes", "kv_tokens", "bytes_per_token")
"""Members of the effective cache that are sizes."""

LAYER_SIZES = ("shape",)
"""Members of a layer's reading that are sizes: one axis of the tensor's shape is the number of blocks."""

_PLACE = ("rank", "name")
_SIZE = re.compile(r"(?<![\w,.])\d[\d,.]*(?= (?:bytes|tokens|blocks)\b)")


class Sizes(BaseModel):
    """The sizes of the effective cache, as in `Effective`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kv_bytes: int | None = None
    kv_tokens: int | None = None
    bytes_per_token: float | None = None


class Measured(BaseModel):
    """`predicate.undigested.measured`. Not covered by the digest, so nothing but sizes is accepted here.

    `observed` and `supported_by` are the claims about sizes, and the capacity claim with its numbers; `layers` holds
    the shape of each rank's and layer's tensor.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    effective: Sizes = Sizes()
    observed: tuple[Claim, ...] = ()
    supported_by: tuple[Claim, ...] = ()
    layers: tuple[dict[str, Any], ...] = ()

    @model_validator(mode="after")
    def _only_sizes(self) -> Self:
        for claim in (*self.observed, *self.supported_by):
            if not _is_size(claim.model_dump(mode="json")) and claim.source is not Source.CAPACITY:
                raise ValueError(f"a claim about {claim.field} is no size and belongs to the digested part")
        return self


def without_sizes(text: str) -> str:
    """`text` with "…" for the number of bytes, tokens or blocks: "capacity: … bytes ÷ … tokens"."""
    return _SIZE.sub("…", text)


def split_claims(claims: Iterable[dict[str, Json]]) -> tuple[list[dict[str, Json]], list[dict[str, Json]]]:
    """(claims every equal start makes, claims with sizes); a capacity claim is in both, first without its numbers."""
    settled, measured = [], []
    for claim in claims:
        bare = _settled(claim)
        if not _is_size(claim):
            settled.append(bare)
        if _is_size(claim) or bare != claim:
            measured.append(claim)
    return settled, measured


def merge_claims(settled: Iterable[Mapping[str, Json]], measured: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """Claims as they were before `split_claims`. A measured claim that says more than sizes changes nothing."""
    merged = [next((claim for claim in measured if _settled(claim) == bare), bare) for bare in settled]
    merged += [claim for claim in measured if _is_size(claim)]
    return sorted(merged, key=lambda claim: (claim["source"], claim["field"], claim["where"]))


def split_layers(layers: Iterable[Mapping[str, Json]]) -> tuple[list[dict[str, Json]], list[dict[str, Json]]]:
    """(readings without shapes, the shapes with rank and name)."""
    settled, measured = [], []
    for layer in layers:
        settled.append({name: value for name, value in layer.items() if name not in LAYER_SIZES})
        if any(name in layer for name in LAYER_SIZES):
            measured.append({name: layer[name] for name in (*_PLACE, *LAYER_SIZES) if name in layer})
    return settled, measured


def merge_layers(settled: Iterable[Mapping[str, Json]], measured: Iterable[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """Readings with the shape of the same rank and name, where one was measured."""
    shapes = {_place(layer): {name: layer[name] for name in LAYER_SIZES if name in layer} for layer in measured}
    return [{**layer, **shapes.get(_place(layer), {})} for layer in settled]


def _is_size(claim: Mapping[str, Json]) -> bool:
    return claim["stage"] == Stage.OBSERVED and claim["field"] in SIZE_FIELDS


def _settled(claim: Mapping[str, Json]) -> dict[str, Json]:
    if claim["source"] != Source.CAPACITY:
        return dict(claim)
    return {**claim, **{name: without_sizes(str(claim.get(name, ""))) for name in ("where", "note")}}


def _place(layer: Mapping[str, Json]) -> str:
    return f"rank {layer.get('rank')} {layer.get('name')}"
