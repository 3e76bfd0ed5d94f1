"""What kvguard itself costs while requests pass: how late its loop is, and the CPU time of its thread.

Bytes that wait for a busy loop wait exactly as long as a timer that is due there, so a timer measures what clients feel of
kvguard, whatever the engine does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

EVERY = 0.25
"""Seconds between two measurements while requests are in flight; an idle kvguard measures nothing."""


class Observes(Protocol):
    """A summary of seconds."""

    def observe(self, amount: float) -> None: ...


class Counts(Protocol):
    """A counter of seconds."""

    def inc(self, amount: float = 1) -> None: ...


class Pulse:
    """Measures on the loop that calls it. `thread_time` gives the CPU seconds of the calling thread."""

    def __init__(self, delay: Observes, cpu: Counts, thread_time: Callable[[], float] = time.thread_time) -> None:
        self._delay = delay
        self._cpu = cpu
        self._thread_time = thread_time
        self._counted = 0.0
        self._in_flight = 0
        self._beating = False

    def request_started(self) -> None:
        """A request arrived; begins to measure unless that is under way."""
        self._in_flight += 1
        if self._beating:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # whoever counts requests outside a loop has none that could be late
            return
        self._beating = True
        self._next(loop)

    def request_ended(self) -> None:
        """A request ended."""
        self._in_flight -= 1

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + EVERY
        loop.call_at(due, self._beat, loop, due)

    def _beat(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._delay.observe(max(0.0, loop.time() - due))
        now = self._thread_time()
        self._cpu.inc(max(0.0, now - self._counted))
        self._counted = now
        self._beating = self._in_flight > 0
        if self._beating:
            self._next(loop)
