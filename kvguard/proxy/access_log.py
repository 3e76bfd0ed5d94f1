"""One structured line for each request, without what was asked or answered: no bodies, no query, no credentials.

Lines are written by a thread of their own, so that a standard error that nobody reads holds up no request; what it cannot
take is dropped and counted in the next line.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import structlog

from kvguard.proxy.asgi import Scope
from kvguard.proxy.exchange import Exchange
from kvguard.proxy.headers import REQUEST_ID

log = structlog.get_logger("kvguard")

_MOST_WAITING = 10_000
_MOST_CHARACTERS = 200
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class AccessLog:
    """`write` from the data plane's loop; the thread runs from `start` to `close`."""

    def __init__(self) -> None:
        self._waiting: deque[dict[str, Any]] = deque()
        self._dropped = 0
        self._something = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvguard-access-log", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Hand over one line; returns at once."""
        if len(self._waiting) >= _MOST_WAITING:
            self._dropped += 1
            return
        if self._dropped:
            entry["dropped_before"], self._dropped = self._dropped, 0
        self._waiting.append(entry)
        if not self._something.is_set():
            self._something.set()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left, as far as somebody reads it."""
        self._closed = True
        self._something.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._something.wait()
            self._something.clear()
            while self._waiting:
                log.info("request", **self._waiting.popleft())
            if self._closed:
                return


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
