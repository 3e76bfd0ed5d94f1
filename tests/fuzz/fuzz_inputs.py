"""Changed inputs: bytes, lines and JSON values of a seed, spliced with others and with what parsers are known to trip over."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MOST = 1 << 16
"""Bytes of an input at most; size is another test's subject."""

_TOKENS = (
    *(b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"\r\n", b"\x1b[31m", b"\xe2\x80\xa8", b"\xed\xa0\x80"),
    *(b"{", b"}", b"[", b"]", b'"', b"'", b":", b",", b"-", b"&a", b"*a", b"!!python/object", b"<<:", b"%", b"=", b"/../"),
    *(b"NaN", b"-Infinity", b"1e999", b"null", b"true", b"99999999999999999999", b"-1", b"0", b"\\ud800", b"auto", b"fp8"),
    *(b"text_config", b"quantization_config", b"kv_cache_scheme", b"layer_types", b"num_hidden_layers"),
)

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 8, 1 << 31, 1 << 63, 10**30, -(10**30), 10**400),
    *(0.0, -0.0, 0.5, 1e308, 5e-324, float("nan"), float("inf")),
    *("", "auto", "None", "fp8", "float", "\x00", "\ud800", "\u2028", "x" * 300, "9" * 5000, "../.."),
    *([], {}, [[]], [None], ["fp8"], {"": None}, {"a": {"a": {}}}, [0] * 50),
)


def mutated(seeds: Sequence[bytes], draw: Random) -> bytes:
    """One input: a seed, changed once or several times."""
    data = draw.choice(seeds)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
        data = draw.choice(_CHANGES)(data, seeds, draw)
    return data[:MOST]


def _bytes(data: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def _bit(data: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    if not data:
        return data
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def _insert(data: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    at = draw.randint(0, len(data))
    return data[:at] + draw.choice(_TOKENS) * draw.choice((1, 1, 1, 2, 40)) + data[at:]


def _remove(data: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    start, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
    return data[:start] + data[end:] if draw.random() < 0.5 else data[:start]


def _repeat(data: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    start = draw.randint(0, len(data))
    part = data[start : start + draw.randint(1, 200)]
    return data[:start] + part * draw.choice((2, 3, 30)) + data[start:]


def _splice(data: bytes, seeds: Sequence[bytes], draw: Random) -> bytes:
    other = draw.choice(seeds)
    return data[: draw.randint(0, len(data))] + other[draw.randint(0, len(other)) :]


def _lines(data: bytes, seeds: Sequence[bytes], draw: Random) -> bytes:
    lines, others = data.split(b"\n"), draw.choice(seeds).split(b"\n")
    kind = draw.randrange(4)
    if kind == 0:
        draw.shuffle(lines)
    elif kind == 1:
        lines.insert(draw.randint(0, len(lines)), draw.choice(others))
    elif kind == 2:
        del lines[draw.randrange(len(lines))]
    else:
        lines = [line + draw.choice((b"\r", b" ", b"\t#", b"")) for line in lines]
    return b"\n".join(lines)


def _number(data: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    places = [place for place, char in enumerate(data) if 48 <= char <= 57]
    if not places:
        return data
    at = draw.choice(places)
    return data[:at] + draw.choice((b"0", b"-1", b"9" * 25, b"1e400", b"0x1", b"1_0", b"")) + data[at + 1 :]


def _json(data: bytes, _: Sequence[bytes], draw: Random) -> bytes:
    """One value of a JSON document, or of one of its lines, replaced, removed, copied elsewhere or buried."""
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    for whole, text in ((True, data), (False, lines[place])):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            continue
        changed = json.dumps(_changed(document, draw)).encode("utf-8", "replace")
        return changed if whole else b"\n".join((*lines[:place], changed, *lines[place + 1 :]))
    return data


def _changed(document: Any, draw: Random) -> Any:
    places = list(_places(document))
    if not places:
        return draw.choice(_VALUES)
    holder, key = draw.choice(places)
    kind = draw.randrange(6)
    if kind < 3:
        holder[key] = draw.choice(_VALUES)
    elif kind == 3:
        del holder[key]
    elif kind == 4:
        other, name = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    else:
        for _ in range(draw.choice((1, 2, 30))):
            holder[key] = {"a": holder[key]} if draw.random() < 0.5 else [holder[key]]
    return document


def _places(value: Any) -> Any:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


_CHANGES: tuple[Callable[[bytes, Sequence[bytes], Random], bytes], ...] = (
    _bytes, _bit, _insert, _insert, _remove, _repeat, _splice, _lines, _number, _json, _json, _json, _json,
)  # fmt: skip
