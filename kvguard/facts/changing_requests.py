"""Requests after which an engine may run something else than was proven: a table in data."""

from __future__ import annotations

from functools import cache
from typing import Literal

from kvguard.facts.versions import read_data
from kvguard.vocabulary import Frozen


class ChangingRequest(Frozen):
    """`path` is how the request's path ends (a root path or /v1 may precede it). After `asleep` there is no cache to read
    until the engine is awake."""

    path: str
    effect: Literal["changed", "asleep"]
    versions: str
    source: str


@cache
def changing_requests() -> tuple[ChangingRequest, ...]:
    """Every request in the table."""
    return tuple(ChangingRequest.model_validate(entry) for entry in read_data("changing_requests")["requests"])


def changing_request(path: str) -> ChangingRequest | None:
    """The request that a path makes, None for one that changes nothing."""
    tail = path.rstrip("/")
    return next((request for request in changing_requests() if tail.endswith(request.path)), None)
