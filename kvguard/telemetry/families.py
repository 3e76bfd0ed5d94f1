"""What a metric family is, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family, by the name a query uses (counters end in _total, identities in _info)."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
