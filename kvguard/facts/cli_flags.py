"""vLLM's command-line flags as data: which exist, how many values each takes, how names may be shortened."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from kvguard.facts.versions import examined, in_range, read_data
from kvguard.vocabulary import Frozen

Nargs = str
"""argparse's: "0", "1", "?" or "+"."""


class FlagTable(Frozen):
    """Flags of one version. `exact` says whether the table is this version's own or the nearest one known.

    `removed` maps flags that the asked-for version no longer has to when they went and what to do instead;
    `nargs` maps long flags to argparse's number of values; `short` maps short aliases to long flags.
    """

    version: str
    exact: bool
    removed: Mapping[str, str]
    nargs: Mapping[str, Nargs]
    short: Mapping[str, str]

    def resolve(self, name: str) -> str | None:
        """The full flag a spelling means: underscores, short aliases, unique prefixes. None: no such flag.

        Raises AmbiguousFlagError when a prefix fits several flags, as argparse does.
        """
        if name in self.short:
            return self.short[name]
        if not name.startswith("--"):
            return None
        head, dot, rest = name.partition(".")
        flag = head.replace("_", "-")
        if flag in self.nargs:
            return flag + dot + rest
        if not self.exact:
            return None
        fits = [known for known in self.nargs if known.startswith(flag)]
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


def table_for(version: str) -> FlagTable:
    """The flags of a version; for a version whose parser was not read, the newest table, marked as not exact."""
    data = read_data("cli_flags")
    tables = data["versions"]
    known = version if version in tables else max(tables, key=lambda name: [int(part) for part in name.split(".")])
    gone = data["removed"].items() if examined(version) else ()
    removed = {
        flag: f"removed in {fact['removed_in']}; instead, {fact['instead']}"
        for flag, fact in gone
        if not in_range(version, fact["present"])
    }
    still = {flag: fact["nargs"] for flag, fact in gone if flag not in removed}
    return FlagTable(
        version=known,
        exact=known == version,
        removed=removed,
        nargs={**tables[known]["nargs"], **still},
        short=tables[known]["short"],
    )
