"""Defensive reading of the checkpoint's JSON: every error names the file and the key."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvguard.vocabulary import UsageError

MAX_CONFIG_BYTES = 8 << 20

MAX_NUMBER = 10**9
"""Larger sizes in a config are nonsense and would only cost time and memory."""


_SURROGATE = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


def strict_json(data: bytes, name: str, *, unique: bool = False) -> Any:
    """A JSON value from bytes, or a UsageError naming the file.

    Stricter than Python: no NaN or infinity (nor 1e999), no lone surrogates, and with `unique` no name twice.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            parse_constant=_finite,
            parse_float=_finite,
            object_pairs_hook=_unique if unique else None,
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UsageError(f"{name}: JSON nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{name}: not valid JSON: {one_line(str(error))}") from None
    return value


def parse_object(data: bytes, name: str, *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from bytes. UsageError, naming the file, for anything else: size, encoding, depth, NaN, a list."""
    if len(data) > limit:
        raise UsageError(f"{name}: {len(data)} bytes, more than the {limit} that such a file may have")
    value = strict_json(data, name)
    if not isinstance(value, dict):
        raise UsageError(f"{name}: expected a JSON object, found {kind(value)}")
    return value


def one_line(text: str, limit: int = 200) -> str:
    """Text from a file, made safe for a one-line message: escaped and cut."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:limit])
    return shown + ("..." if len(text) > limit else "")


def kind(value: Any) -> str:
    """A JSON value as an error shows it: "an object", "a list" or the value itself, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return one_line(json.dumps(value), 60)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} appears twice")
    return result


class Section:
    """A JSON object together with the place it was read from. A null value counts as absent, as for vLLM."""

    def __init__(
        self, value: Mapping[str, Any], where: str, prefix: str = "", origins: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        """`origins`: the file and the key there of values that were read elsewhere, or under other names."""
        self.value = value
        self.where = where
        self.prefix = prefix
        self.origins = origins or {}

    def _origin(self, key: str) -> tuple[str, str]:
        return self.origins.get(key, (self.where, self.prefix + key))

    def place(self, key: str) -> str:
        """ "config.json: text_config.num_hidden_layers"."""
        where, written = self._origin(key)
        return f"{where}: {one_line(written)}"

    def wrong(self, key: str, wanted: str) -> UsageError:
        """The error for a value of the wrong type."""
        return UsageError(f"{self.place(key)}: expected {wanted}, found {kind(self.value[key])}")

    def has(self, *keys: str) -> str | None:
        """The first of these keys with a value other than null."""
        return next((key for key in keys if self.value.get(key) is not None), None)

    def section(self, key: str) -> Section | None:
        """A nested object, None when absent. UsageError when it is something else."""
        value = self.value.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        where, written = self._origin(key)
        return Section(value, where, f"{written}.")

    def text(self, key: str) -> str | None:
        """A string, None when absent. UsageError when it is something else."""
        value = self.value.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def number(self, *keys: str) -> int | None:
        """The first present of these keys as a whole number from 0 to 10^9. UsageError when it is something else."""
        key = self.has(*keys)
        if key is None:
            return None
        value = self.value[key]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
            raise self.wrong(key, f"a whole number from 0 to {MAX_NUMBER}")
        return value

    def flag(self, key: str) -> bool:
        """Whether a key is true; anything but true is false."""
        return self.value.get(key) is True

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, None when absent. UsageError when it is something else."""
        value = self.value.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)
