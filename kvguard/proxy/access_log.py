"""Lines about requests: one for each if wanted, and one for each that the engine failed. Never what was asked or answered.

Lines are written by a thread of their own, so that a standard error that nobody reads holds up no request; what it cannot
take is dropped and counted in the next line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import structlog

from kvguard.proxy.asgi import Scope
from kvguard.proxy.backlog import Backlog
from kvguard.proxy.exchange import Exchange
from kvguard.proxy.headers import REQUEST_ID

log = structlog.get_logger("kvguard")

_MOST_CHARACTERS = 200
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Lines:
    """`info` and `warning` from the data plane's loop, where they return at once; the thread runs from `start` to `close`."""

    def __init__(self) -> None:
        self._backlog: Backlog[tuple[str, str, dict[str, Any]]] = Backlog("kvguard-request-log", _write)
        self._dropped = 0
        self.start = self._backlog.start
        self.close = self._backlog.close

    def info(self, event: str, **entry: Any) -> None:
        """A line of level info."""
        self._put("info", event, entry)

    def warning(self, event: str, **entry: Any) -> None:
        """A line of level warning."""
        self._put("warning", event, entry)

    def _put(self, level: str, event: str, entry: dict[str, Any]) -> None:
        if self._dropped:
            entry["dropped_before"] = self._dropped
        self._dropped = 0 if self._backlog.put((level, event, entry)) else self._dropped + 1


def _write(line: tuple[str, str, dict[str, Any]]) -> None:
    level, event, entry = line
    getattr(log, level)(event, **entry)


def identity(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The request's own names: `request_id` and, of a valid W3C traceparent, `trace_id`."""
    found = {}
    for name, value in headers:
        if name == REQUEST_ID:
            found["request_id"] = value.decode("latin-1")[:_MOST_CHARACTERS]
        elif name == b"traceparent" and (match := _TRACEPARENT.fullmatch(value.strip())):
            found["trace_id"] = match[1].decode()
    return found


def line(scope: Scope, exchange: Exchange) -> dict[str, Any]:
    """What is said of a request that ended. Times in seconds, sizes in bytes."""
    entry = {
        "method": scope["method"],
        "path": scope["path"][:_MOST_CHARACTERS],
        "status": exchange.status,
        "outcome": str(exchange.outcome),
        "seconds": round(exchange.elapsed(), 4),
        "first_byte_seconds": None if exchange.first_byte is None else round(exchange.first_byte, 4),
        "request_bytes": len(exchange.body),
        "response_bytes": exchange.received,
        "client": scope["client"][0] if scope.get("client") else None,
        **identity(scope["headers"]),
    }
    return {name: value for name, value in entry.items() if value is not None}
