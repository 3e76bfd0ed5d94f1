"""What two equal starts share: claims, checks and readings without the places where one start leaves its mark."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from pydantic import BaseModel

from kvguard.canonical import canonical_json
from kvguard.record.measured import without_sizes
from kvguard.vocabulary import Check, Claim, Effective, Json

Cleaner = Callable[[str], str]

_SIGNIFICANT_DIGITS = 6
_MAX_DEPTH = 32
_OF_ONE_START = (
    (re.compile(r"(?<=://)((?:\[[0-9a-fA-F:.]*\]|[^\s/:@]*)):\d+"), r"\1"),
    (re.compile(r"(?<![\w.:/])(?:\d{1,3}(?:\.\d{1,3}){3}|localhost|\[[0-9a-fA-F:.]{2,}\]):\d{1,5}\b"), "*"),
    (re.compile(r"(?<![\w./:~\]-])(?:~|\.{1,2})?/(?:[^\s/:;,'\"()\[\]{}]+/)*([^\s/:;,'\"()\[\]{}]+)"), r"\1"),
    (re.compile(r"[ ,]*\b[Ll]ines? \d+(?:\s?[-–]\s?\d+)?"), ""),
    (re.compile(r"\b(pid|port)([ =:]{1,2})\d+\b", re.I), r"\1"),
)
"""Ports of URLs, addresses with a port, directories of paths, line numbers, process ids; what is left in their place."""

_ADDRESS_FLAGS = frozenset({"--port", "--host", "--uds"})
_START_MEMBERS = frozenset({"pid", "port", "nonce"})


def normalize_text(text: str) -> str:
    """`text` without line numbers, process ids, ports and the directories of paths: the same for every equal start.

    "/data/a/config.json: kv_cache_scheme" becomes "config.json: kv_cache_scheme", "engine log line 57" becomes
    "engine log". An absolute path before or between ": " may contain spaces.
    """
    parts = valid_text(text).split(": ")
    bare = [os.path.basename(part.rstrip("/")) or part if part.startswith("/") else part for part in parts]
    text = ": ".join(bare)
    for pattern, replacement in _OF_ONE_START:
        text = pattern.sub(replacement, text)
    return text


def normalize_json(value: Any, clean: Cleaner = normalize_text) -> Json:
    """A value as JSON, every string cleaned, floats rounded to 6 significant digits, without pid, port and nonce."""
    return jsonable(value, clean, stable_float, _START_MEMBERS)


def jsonable(
    value: Any,
    clean: Cleaner,
    number: Callable[[float], Json],
    dropped: frozenset[str] = frozenset(),
    depth: int = 0,
) -> Json:
    """Any Python value as JSON: models and mappings as objects, enums by value, sets sorted, the unknown as its text.

    `dropped` members are left out; below 32 levels a value is its text.
    """
    if depth > _MAX_DEPTH:
        return clean(f"{type(value).__name__} nested deeper than {_MAX_DEPTH} levels")
    match value:
        case None | bool() | int() if not isinstance(value, Enum):
            return value
        case float():
            return number(value)
        case Enum():
            return jsonable(value.value, clean, number, dropped, depth + 1)
        case str():
            return clean(value)
        case BaseModel():
            return jsonable(value.model_dump(), clean, number, dropped, depth)
        case Mapping():
            return {
                valid_text(str(key)): jsonable(item, clean, number, dropped, depth + 1)
                for key, item in value.items()
                if key not in dropped
            }
        case list() | tuple():
            return [jsonable(item, clean, number, dropped, depth + 1) for item in value]
        case set() | frozenset():
            return in_order(jsonable(item, clean, number, dropped, depth + 1) for item in value)
        case _:
            return clean(str(value))


def stable_float(value: float) -> float | str:
    """6 significant digits, so that equal calibrations are equal; NaN and infinities as `exact_float` says them."""
    said = exact_float(value)
    return float(f"{said:.{_SIGNIFICANT_DIGITS}g}") if isinstance(said, float) else said


def exact_float(value: float) -> float | str:
    """The value itself, or "NaN", "Infinity", "-Infinity" for what JSON has no number for."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def valid_text(text: str) -> str:
    """`text` with what UTF-8 cannot encode (lone surrogates) replaced by `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")


def normalize_claim(claim: Claim, clean: Cleaner = normalize_text) -> dict[str, Json]:
    """A claim as the record's digested part holds it."""
    return {
        "stage": claim.stage.value,
        "source": claim.source.value,
        "field": claim.field,
        "value": normalize_json(claim.value, clean),
        "where": clean(claim.where).strip(),
        "note": clean(claim.note),
    }


def normalize_claims(claims: Iterable[Claim], clean: Cleaner = normalize_text) -> list[dict[str, Json]]:
    """Claims in one order; those that differed only in what was normalized away count once."""
    return in_order((normalize_claim(claim, clean) for claim in claims), "source", "field", "where")


def normalize_checks(checks: Iterable[Check], clean: Cleaner = normalize_text) -> list[dict[str, Json]]:
    """Checks in one order, without the sizes one start measured: they stand in the claims that the check names."""
    prose = ("required", "found", "where", "action")
    normalized = (
        {**check.model_dump(mode="json"), **{field: without_sizes(clean(getattr(check, field))) for field in prose}}
        for check in checks
    )
    return in_order(normalized, "name")


def normalize_effective(effective: Effective, clean: Cleaner = normalize_text) -> dict[str, Json]:
    """The effective cache; its claims, contradictions (without sizes), backends and 16-bit layers in one order."""
    names = ("attention_backends", "sixteen_bit_layers")
    return {
        **normalize_json(effective, valid_text),
        "scales_detail": clean(effective.scales_detail),
        "supported_by": normalize_claims(effective.supported_by, clean),
        "contradictions": sorted({without_sizes(clean(text)) for text in effective.contradictions}),
        **{field: sorted({valid_text(name) for name in getattr(effective, field)}) for field in names},
    }


def normalize_layers(layers: Iterable[Mapping[str, Any]], clean: Cleaner = normalize_text) -> list[dict[str, Json]]:
    """What the tensors showed for each rank and layer, in one order."""
    return in_order((normalize_json(layer, clean) for layer in layers), "rank", "name")


def normalize_argv(argv: Sequence[str]) -> list[str]:
    """A command whose paths are bare names, and whose own address (--host, --port, --uds) is `*`."""
    items: list[str] = []
    address = False
    for item in argv:
        flag, equals, value = item.partition("=")
        if not flag.startswith("--"):
            items.append("*" if address else normalize_text(item))
            address = False
            continue
        address = flag.replace("_", "-") in _ADDRESS_FLAGS
        if equals:
            value = "*" if address else normalize_text(value)
            address = False
        items.append(f"{flag}{equals}{value}")
    return items


def in_order(values: Iterable[Any], *members: str) -> list[Any]:
    """JSON values without repeats, in the order of the named members' texts, then of the whole."""
    by_text = {canonical_json(value): value for value in values}
    return [by_text[text] for text in sorted(by_text, key=lambda text: _place(by_text[text], members, text))]


def _place(value: Any, members: Sequence[str], text: bytes) -> tuple[str | bytes, ...]:
    return (*(str(value.get(member)) for member in members), text)
