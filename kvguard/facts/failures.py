"""Errors that vLLM ends with because of the KV cache: the cause in one line, and the way out."""

from __future__ import annotations

import re
from functools import cache

from kvguard.facts.versions import read_data
from kvguard.vocabulary import Frozen


class Failure(Frozen):
    """One known error. `id` is stable; `cause` and `do` are for the person on call."""

    id: str
    cause: str
    do: str
    source: str

    def __str__(self) -> str:
        return f"{self.id}: {self.cause}; instead: {self.do}"


@cache
def _known() -> tuple[tuple[re.Pattern[str], Failure], ...]:
    return tuple(
        (re.compile(entry["pattern"]), Failure(id=entry["id"], cause=entry["cause"], do=entry["do"], source=entry["source"]))
        for entry in read_data("failures")["failures"]
    )


def known_failure(text: str) -> Failure | None:
    """The known failure an error message speaks of, or None."""
    return next((failure for pattern, failure in _known() if pattern.search(text)), None)
