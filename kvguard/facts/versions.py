"""vLLM versions: parsing, ranges of them, and which ones the facts were read from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from packaging.version import Version


@cache
def read_data(name: str) -> Any:
    """The facts file `kvguard/facts/data/<name>.json`, parsed once. Callers do not change it."""
    return json.loads((resources.files("kvguard.facts") / "data" / f"{name}.json").read_text(encoding="utf-8"))


@cache
def parse(text: str) -> Version | None:
    """A version without its local part ("0.32.0+cpu" is 0.32.0), or None when the text is no version."""
    try:
        return Version(Version(text.strip()).public)
    except ValueError:  # InvalidVersion is one, and so is a number of too many digits
        return None


@cache
def in_range(version: str, text: str) -> bool:
    """Whether a version lies in "0.14.0..0.32.0" (both ends included), "0.11.0" or a comma-separated list of these.

    The local part is ignored. A text that is no version is in no range. ValueError for a malformed range.
    """
    found = parse(version)
    for part in text.split(","):
        low, _, high = part.strip().partition("..")
        first, last = parse(low), parse(high or low)
        if first is None or last is None:
            raise ValueError(f"version range {text!r}: expected A..B, a version, or a list of these")
        if found is not None and first <= found <= last:
            return True
    return False


EXAMINED: tuple[str, ...] = tuple(read_data("versions")["examined"])
"""Every version whose sources were read, oldest first."""

OLDEST, NEWEST = EXAMINED[0], EXAMINED[-1]

OLDEST_GUARDED: str = read_data("versions")["guarded_from"]
"""The first version that can be moved to a Unix socket and read from inside."""

KNOWN = f"{OLDEST}..{NEWEST}"
"""The range of the facts; whatever is outside is unknown."""

_SPELLED = {parse(text): text for text in EXAMINED}


def examined(version: str) -> bool:
    """Whether this very release was read (an unread patch release inside KNOWN was not)."""
    found = parse(version)
    return found is not None and found in _SPELLED


def release_of(version: str) -> str:
    """The examined release that a text means, as EXAMINED spells it ("v0.32.0+cpu" is "0.32.0"), else the text itself."""
    found = parse(version)
    return version if found is None else _SPELLED.get(found, version)


def plain_version(text: str) -> str:
    """A version as people type it, spelled as packages spell it: "v0.32.0 " is "0.32.0"; the local part stays."""
    try:
        return str(Version(text.strip()))
    except ValueError:
        return text.strip()


def too_old(version: str) -> bool:
    """Whether this is certainly a release before the first that is guarded."""
    found, first = parse(version), parse(OLDEST_GUARDED)
    return found is not None and first is not None and found < first


def entry_for(version: str, entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first entry whose "versions" contains the version, or None."""
    return next((entry for entry in entries if in_range(version, entry["versions"])), None)


def join_ranges(ranges: Iterable[str]) -> str:
    """Ranges that follow each other in EXAMINED as one: "0.20.0..0.24.0", "0.25.0..0.27.1" -> "0.20.0..0.27.1"."""
    texts = tuple(ranges)
    inside = [any(in_range(version, text) for text in texts) for version in EXAMINED]
    parts: list[list[str]] = []
    for index, (version, holds) in enumerate(zip(EXAMINED, inside, strict=True)):
        if not holds:
            continue
        if index and inside[index - 1]:
            parts[-1].append(version)
        else:
            parts.append([version])
    return ", ".join(part[0] if len(part) == 1 else f"{part[0]}..{part[-1]}" for part in parts)
