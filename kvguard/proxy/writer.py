"""Writes of one response past uvicorn's `send`: whole chunks as they are, and a head that leaves with its body."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PUT = "kvguard.put"
"""The ASGI extension under which a request carries its `Writer`."""


class Writer:
    """Writes for one response that need no coroutine each, and no system call each.

    Bound to its own cycle: with pipelining the connection's current one may be the next.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._held: list[bytes] | None = None

    def put(self, chunk: bytes) -> bool:
        """Write a chunk, framing and all. False when it must go through `send`: no chunks here, or the client is behind."""
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(chunk)
        return True

    def hold(self) -> None:
        """Collect what is written from now on, so that a head and its body leave together."""
        self._held = []
        self._cycle.transport = cast(asyncio.Transport, self)

    def flush(self) -> None:
        """Write what was collected."""
        held, self._held = self._held, None
        if held is not None:
            self._cycle.transport = self._transport
            if held:
                self._transport.write(b"".join(held))

    # --- in place of the transport ---

    def write(self, data: bytes) -> None:
        """asyncio's call."""
        if self._held is not None:
            self._held.append(data)

    def is_closing(self) -> bool:
        """asyncio's call."""
        return self._transport.is_closing()

    def close(self) -> None:
        """asyncio's call."""
        self.flush()
        self._transport.close()
