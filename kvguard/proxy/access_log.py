"""What a line about a request says: never what was asked or answered.

The log writes on a thread of its own (see `telemetry.logging`), so a standard error that nobody reads holds up no request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kvguard.proxy.asgi import Scope
from kvguard.proxy.exchange import Exchange
from kvguard.proxy.headers import REQUEST_ID

_MOST_CHARACTERS = 200
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


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
