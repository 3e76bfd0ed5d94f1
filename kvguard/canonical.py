"""One text for one JSON value, and its sha256, so that equal things have equal digests on every machine.

Follows RFC 8785 (JSON Canonicalization Scheme): keys sorted by UTF-16 code units, no white space, UTF-8,
numbers as ECMAScript prints them. One difference: integers beyond 2**53 keep all their digits.
"""

from __future__ import annotations

import hashlib
import json
import math

from kvguard.vocabulary import Json


def canonical_json(value: Json) -> bytes:
    """The canonical UTF-8 text of a JSON value.

    Raises ValueError for what JSON cannot say: NaN, infinity, lone surrogates, and anything that is not
    a str, int, float, bool, None, list, tuple or a dict with str keys.
    """
    return _text(value).encode("utf-8")


def sha256_of(value: Json) -> str:
    """`sha256:` and the 64 hex digits over the canonical text of a JSON value; ValueError as `canonical_json`."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def _text(value: Json) -> str:
    match value:
        case None | bool() | str():
            return json.dumps(value, ensure_ascii=False)
        case int():
            return int.__repr__(value)
        case float():
            return _number(value)
        case list() | tuple():
            return "[" + ",".join(map(_text, value)) + "]"
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise ValueError("a JSON object's keys must be strings")
            ordered = sorted(value.items(), key=lambda item: item[0].encode("utf-16-be", "surrogatepass"))
            return "{" + ",".join(f"{_text(key)}:{_text(item)}" for key, item in ordered) + "}"
        case _:
            raise ValueError(f"{type(value).__name__} is not a JSON value")


def _number(value: float) -> str:
    """ECMAScript's Number::toString: the shortest digits that read back, exponent form outside 1e-7 < x < 1e21."""
    if not math.isfinite(value):
        raise ValueError(f"JSON has no number for {value!r}")
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = f"{float.__repr__(abs(value))}e0".partition("e")
    whole, _, fraction = mantissa.partition(".")
    point = len(whole) + int(exponent.partition("e")[0])
    digits = whole + ("" if fraction == "0" else fraction)
    point -= len(digits) - len(digits.lstrip("0"))
    digits = digits.strip("0")
    if not 0 < point <= 21:
        if -6 < point <= 0:
            return f"{sign}0.{'0' * -point}{digits}"
        power = point - 1
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{tail}e{'+' if power > 0 else '-'}{abs(power)}"
    if len(digits) <= point:
        return sign + digits + "0" * (point - len(digits))
    return f"{sign}{digits[:point]}.{digits[point:]}"
