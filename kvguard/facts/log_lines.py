"""The lines of vLLM's start-up log that say something about the KV cache, as data with versions and sources."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvguard.facts.versions import entry_for, in_range
from kvguard.vocabulary import Frozen, Json


@dataclass(frozen=True, slots=True)
class LogLine:
    """One template.

    `pattern` is matched at the start of a message, without its prefix. The fact's value is the group named
    `value`, or `constant` when the line has none. `kind` says how to read it: dtype, int, gib, flag, text, layer.
    `stage` is "requested" for what the operator asked for, else "observed".
    """

    field: str
    literal: str
    pattern: re.Pattern[str]
    versions: str
    source: str
    kind: str
    constant: Json
    note: str
    stage: str

    def belongs_to(self, version: str) -> bool:
        """Whether an examined release of this range printed the line."""
        return in_range(version, self.versions)


@cache
def _document() -> Json:
    return json.loads((files("kvguard.facts") / "data" / "log_lines.json").read_text("utf-8"))


@cache
def log_lines() -> tuple[LogLine, ...]:
    """Every template, in the order in which they are tried."""
    return tuple(
        LogLine(
            field=entry["field"],
            literal=entry["literal"],
            pattern=re.compile(entry["pattern"]),
            versions=entry["versions"],
            source=entry["source"],
            kind=entry["kind"],
            constant=entry.get("value"),
            note=entry.get("note", ""),
            stage=entry.get("stage", "observed"),
        )
        for entry in _document()["lines"]
    )


class LogPrefix(Frozen):
    """How lines of each kind of process begin. `colour_when_piped`: escape codes even into a file. None: no prefix."""

    engine: str
    worker: str
    api_server: str | None
    colour_when_piped: bool
    note: str


def log_prefix(version: str) -> LogPrefix | None:
    """The process prefixes of this version's lines; None where they were not read."""
    entry = entry_for(version, _document()["prefixes"])
    if entry is None:
        return None
    return LogPrefix.model_validate({key: value for key, value in entry.items() if key not in ("versions", "source")})


@cache
def request_log_files() -> frozenset[str]:
    """Source files whose lines quote requests: nothing in them is a statement of the engine."""
    return frozenset(_document()["request_log_files"])
