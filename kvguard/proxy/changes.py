"""Requests that can change the engine, told to the guard as they pass."""

from __future__ import annotations

from typing import Protocol

from kvguard.facts.changing_requests import changing_request
from kvguard.proxy.forward import Observer


class Changes(Protocol):
    """Told of each such request when it comes and when it ends, on the data plane's thread. Must return at once."""

    def __call__(self, path: str, *, answered: bool) -> None: ...


class ChangeObserver:
    """An observer that counts as `inner` does and tells `changes` of requests that can change the engine."""

    def __init__(self, inner: Observer) -> None:
        self.changes: Changes | None = None
        self._inner = inner

    def request_started(self, route: str) -> None:
        """A request arrived."""
        self._tell(route, answered=False)
        self._inner.request_started(route)

    def first_byte(self, route: str, seconds: float) -> None:
        """The first byte of the engine's body left for the client."""
        self._inner.first_byte(route, seconds)

    def finished(self, route: str, method: str, status: int, seconds: float, outcome: str) -> None:
        """The request ended, in whichever way: one that failed may have changed the engine half."""
        self._inner.finished(route, method, status, seconds, outcome)
        self._tell(route, answered=True)

    def _tell(self, route: str, *, answered: bool) -> None:
        if self.changes is not None and changing_request(route) is not None:
            self.changes(route, answered=answered)
