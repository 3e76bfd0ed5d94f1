"""The record's three digests: of evidence, of the scales, and of the whole content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvguard.canonical import canonical_json, sha256_of
from kvguard.record.normalize import normalize_json
from kvguard.vocabulary import Json

UNDIGESTED = ("content_digest", "undigested")
"""Members of the predicate that the content digest does not cover."""


def content_digest(statement: Mapping[str, Any]) -> str:
    """`sha256:…` over everything in a statement but `predicate.undigested` and the digest itself.

    Raises ValueError or TypeError when the statement is not JSON or has no predicate object.
    """
    predicate = statement.get("predicate")
    if not isinstance(predicate, dict):
        raise TypeError("the statement has no predicate")
    return sha256_of({**statement, "predicate": {name: value for name, value in predicate.items() if name not in UNDIGESTED}})


def scales_digest(layers: Iterable[Mapping[str, Json]]) -> str | None:
    """`sha256:…` over each layer's K and V scales, rounded to 6 significant digits; None when none was read.

    `layers` are the readings of `record.build`: `name`, `k_scale` and `v_scale` (a number, "NaN" or a list of
    them). Ranks that hold the same values count once, so that a tensor-parallel engine and a single one with
    the same per-tensor scales have one digest; ranks that differ change it.
    """
    scales: dict[str, list[Json]] = {}
    for layer in layers:
        pair = [_as_list(layer.get("k_scale")), _as_list(layer.get("v_scale"))]
        if pair == [None, None]:
            continue
        seen = scales.setdefault(str(layer.get("name", "")), [])
        if pair not in seen:
            seen.append(pair)
    if not scales:
        return None
    return sha256_of({name: sorted(pairs, key=canonical_json) for name, pairs in scales.items()})


def _as_list(scale: Json) -> Json:
    if scale is None:
        return None
    return normalize_json(list(scale) if isinstance(scale, list | tuple) else [scale])
