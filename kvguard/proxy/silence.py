"""How long an engine may say nothing: one timer an exchange, moved lazily, so that a chunk costs no timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvguard.proxy.connection import Connection
from kvguard.proxy.refusal import Refusal, engine_silent


class Silence:
    """Calls `end` once nothing was heard for `limit` seconds; then, or when cancelled, it is over.

    Chunks that `connection` put straight to the client are heard too.
    """

    __slots__ = ("_deadline", "_due", "_end", "_loop", "_timer", "connection", "limit")

    def __init__(self, loop: asyncio.AbstractEventLoop, end: Callable[[Refusal], None]) -> None:
        self.limit = 0.0
        self.connection: Connection | None = None
        self._loop = loop
        self._end = end
        self._deadline: float | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def expect_within(self, limit: float) -> None:
        """From now on the limit is this one, and begins anew."""
        self.limit = limit
        self._deadline = due = self._loop.time() + limit
        if self._timer is None or self._due > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._due = self._loop.call_at(due, self._check), due

    def heard(self) -> None:
        """The engine said something."""
        self._deadline = self._loop.time() + self.limit

    def suspend(self) -> None:
        """The engine is not what is waited for, until `heard`."""
        self._deadline = None

    def cancel(self) -> None:
        """No more of it."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        deadline = self._deadline
        if deadline is not None and self.connection is not None:
            deadline = max(deadline, self.connection.put_at + self.limit)
        if deadline is not None and now >= deadline:
            self._end(engine_silent(self.limit))
        else:
            self._due = deadline or now + self.limit
            self._timer = self._loop.call_at(self._due, self._check)
