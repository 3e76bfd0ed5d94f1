"""vLLM's command-line flags as data: in which releases each exists, how many values it takes, how it may be shortened."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from kvguard.facts.versions import EXAMINED, examined, in_range, parse, read_data, release_of
from kvguard.vocabulary import Frozen

Nargs = str
"""argparse's: "0", "1", "?" or "+"."""

MIN_PREFIX = len("--kv-cach")
"""A shortened spelling at least this long can only mean one of the KV cache's flags."""

_KV_PREFIXES = ("--kv-cache", "--calculate-kv")


class FlagTable(Frozen):
    """Flags of one version. `exact` says whether this version's own parser was read in full.

    `version` is whose table it is. `removed` maps flags that this version does not have to why and what to do instead;
    `nargs` maps long flags to argparse's number of values; `short` maps short aliases to long flags.
    """

    version: str
    exact: bool
    removed: Mapping[str, str]
    nargs: Mapping[str, Nargs]
    short: Mapping[str, str]

    def resolve(self, name: str) -> str | None:
        """The full flag a spelling means: underscores, short aliases, unique prefixes. None: no such flag.

        Raises AmbiguousFlagError when a prefix fits several flags, as argparse does. Where the parser was not read in
        full, a prefix of the KV cache's flags raises it too: what it means there is not known.
        """
        if name in self.short:
            return self.short[name]
        if not name.startswith("--"):
            return None
        head, dot, rest = name.partition(".")
        flag = head.replace("_", "-")
        if flag in self.nargs:
            return flag + dot + rest
        fits = [known for known in self.nargs if known.startswith(flag)]
        if not self.exact:
            unclear = len(flag) >= MIN_PREFIX and flag.startswith(_KV_PREFIXES) and fits
            if unclear:
                raise AmbiguousFlagError(name, fits)
            return None
        if len(fits) > 1:
            raise AmbiguousFlagError(name, fits)
        return fits[0] + dot + rest if fits else None

    def suggestion(self, name: str) -> str:
        """The closest flag to an unknown one, or ""."""
        close = difflib.get_close_matches(name.partition("=")[0].replace("_", "-"), self.nargs, n=1)
        return close[0] if close else ""


class AmbiguousFlagError(ValueError):
    """A prefix that fits several flags."""

    def __init__(self, name: str, fits: list[str]) -> None:
        super().__init__(f"{name} could mean {', '.join(fits[:4])}")


def numeric_flags() -> tuple[str, ...]:
    """Flags whose value is known to be a whole number."""
    return tuple(read_data("cli_flags")["numbers"]["flags"])


def number_problem(version: str, flag: str, text: str) -> str:
    """Why this version refuses a number, "" when it does not or that was not read."""
    data = read_data("cli_flags")["numbers"]
    limits = data["flags"][flag]
    if not examined(version) or not in_range(version, data["versions"]):
        return ""
    least, most = limits["least"], limits.get("most")
    try:
        fits = least <= int(text) and (most is None or int(text) <= most)
    except ValueError:
        fits = False
    return "" if fits else f"a whole number from {least}" + (f" to {most}" if most else "") + " is needed"


def _has(version: str, entry: Mapping[str, Any]) -> bool | None:
    """Whether a version has a flag; None when its sources were not looked at for it."""
    if not examined(version):
        return None
    if in_range(version, entry["versions"]):
        return True
    return False if entry.get("every_release") or release_of(version) in read_data("cli_flags")["parsers"] else None


def has_flag(version: str, flag: str) -> bool | None:
    """Whether this version's parser has a long flag; None when that was not read."""
    entry = read_data("cli_flags")["flags"].get(flag)
    if entry is None:
        return False if release_of(version) in read_data("cli_flags")["parsers"] else None
    return _has(version, entry)


def flag_versions(flag: str) -> str | None:
    """The releases known to have a flag, as ranges, or None for a flag that was never seen."""
    entry = read_data("cli_flags")["flags"].get(flag)
    return None if entry is None else str(entry["versions"])


def flags_that_changed() -> tuple[str, ...]:
    """Flags about the cache, its evidence or its log that came or went between examined releases, oldest first."""
    flags = read_data("cli_flags")["flags"]
    whole = {entry["versions"] for name, entry in flags.items() if name == "--kv-cache-dtype"}
    changed = [
        name
        for name, entry in flags.items()
        if entry.get("every_release") and entry["versions"] not in whole and not name.startswith("--no-")
    ]
    return tuple(changed)


def _absence(version: str, entry: Mapping[str, Any]) -> str:
    """Why a version has no such flag, and what to do instead."""
    instead = f"; instead, {entry['instead']}" if entry.get("instead") else ""
    if "removed_in" in entry:
        return f"removed {entry['removed_in']}{instead}"
    if not entry.get("every_release"):
        return f"no such flag; it is known of {entry['versions']}{instead}"
    ranges = [part.strip().partition("..") for part in str(entry["versions"]).split(",")]
    ended = [last or first for first, _, last in ranges if _before(last or first, version)]
    if not ended:
        return f"new in {ranges[0][0]}{instead}"
    return f"removed in {_next_release(ended[-1])}{instead}"


def _before(one: str, other: str) -> bool:
    """Whether a release is older than another version."""
    left, right = parse(one), parse(other)
    return left is not None and right is not None and left < right


def _next_release(version: str) -> str:
    """The examined release after this one, or "a later release" after the newest."""
    later = [release for release in EXAMINED if _before(version, release)]
    return later[0] if later else "a later release"


@cache
def table_for(version: str) -> FlagTable:
    """The flags of a version. `exact` only for a parser that was read in full; elsewhere flags not listed pass unchecked.

    For a version outside the facts the newest parser's flags are used and none counts as removed.
    """
    data = read_data("cli_flags")
    parsers = data["parsers"]
    version = release_of(version)
    exact = version in parsers
    known = version if exact or examined(version) else max(parsers, key=lambda name: [int(part) for part in name.split(".")])
    absent = {flag: _absence(version, entry) for flag, entry in data["flags"].items() if _has(version, entry) is False}
    for flag, entry in data["gone"].items():
        absent[flag] = _absence(version, entry)
    nargs = {
        flag: entry["nargs"]
        for flag, entry in data["flags"].items()
        if _has(known, entry) is not False and not (exact and _has(known, entry) is None)
    }
    short = {alias: entry["flag"] for alias, entry in data["short"].items() if _has(known, entry) is not False}
    return FlagTable(version=known, exact=exact, removed=absent, nargs=nargs, short=short)
