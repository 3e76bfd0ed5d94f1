"""A request to stop, and the draining that follows it."""

from __future__ import annotations

import asyncio
import time

import structlog

from kvguard.guard.board import Board
from kvguard.guard.settings import Settings
from kvguard.guard.state import Event
from kvguard.guard.surface import Surface

log = structlog.get_logger("kvguard")


class Stop:
    """Whether to stop, and how urgently. `request` may be called from a signal handler of the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked.is_set()

    def request(self) -> None:
        """Begin to stop; a second call ends the waiting for requests."""
        self.count += 1
        self._asked.set()

    async def wait(self) -> None:
        """Until a stop is asked for."""
        await self._asked.wait()


async def drain(board: Board, surface: Surface, settings: Settings, stop: Stop, *, reserve: float) -> None:
    """Unready at once; accept while routers take note; then finish what is in flight within the grace.

    `reserve`, in seconds, is the part of the grace that is kept for what comes after.
    """
    begun = time.monotonic()
    board.move(Event.STOP_REQUESTED, "draining")
    log.info("draining", settle_s=settings.settle, grace_s=settings.grace)
    deadline = begun + settings.grace - reserve
    settled = min(begun + settings.settle, deadline)
    while stop.count < 2 and time.monotonic() < settled:
        await asyncio.sleep(0.05)
    surface.stop_accepting()
    idle = False
    while not idle and stop.count < 2 and time.monotonic() < deadline:
        idle = await asyncio.to_thread(surface.wait_idle, 0.1)
    if not idle and not surface.wait_idle(0):
        why = "a second signal" if stop.count > 1 else "the grace period is over"
        log.warning("requests in flight are cut off", because=why, grace_s=settings.grace)
    board.move(Event.STOPPED, "stopped")
    log.info("drained", seconds=round(time.monotonic() - begun, 2))
