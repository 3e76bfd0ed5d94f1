"""The drift watch: verify again on a timer and on signs of change, and post what that shows. It never ends serving."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from kvguard.evidence.tensors import TensorReading
from kvguard.facts.changing_requests import changing_request
from kvguard.guard import drift as state
from kvguard.guard.board import Board
from kvguard.guard.state import Event
from kvguard.guard.verify import Evidence
from kvguard.policy.models import DriftPolicy
from kvguard.verdict.checks import violates
from kvguard.vocabulary import Check, Effective, Frozen

log = structlog.get_logger("kvguard")

GAP = 1.0
"""Seconds from one verification to the next at least, however often a change is reported."""

_LONGEST_SLEEP_REQUEST = 60  # seconds
CONFIRM = 5.0
"""Seconds after which drift that would make the engine unready is looked at again, at most."""


class Verified(Frozen):
    """One verification: the evidence, the checks, the engine's version."""

    evidence: Evidence
    checks: tuple[Check, ...]
    engine_version: str

    @property
    def effective(self) -> Effective:
        """What it showed."""
        return self.evidence.effective

    @property
    def tensors(self) -> TensorReading | None:
        """What the workers said."""
        return self.evidence.tensors

    def established(self) -> state.Established:
        """As far as drift is about it."""
        return state.established(self.effective, self.checks, engine_version=self.engine_version, tensors=self.evidence.tensors)


Verify = Callable[[], Awaitable[Verified | str]]
"""Reads the engine again; a text says why nothing could be read."""

Record = Callable[[Verified, state.Drift], None]
"""Writes a run record of what runs now."""


class DriftWatch:
    """Watches one engine from its first verdict on. All methods but `ask` belong to the loop that runs it."""

    def __init__(
        self,
        board: Board,
        first: Verified,
        verify: Verify,
        record: Record,
        policy: DriftPolicy,
        *,
        every: float,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`every` is the timer in seconds, 0 for none; `clock` gives Unix seconds."""
        self.drift = state.Drift()
        self._board = board
        self._first = first.established()
        self._verify = verify
        self._record = record
        self._policy = policy
        self._every = every
        self._clock = clock
        self._pause = pause
        self._asked = asyncio.Event()
        self._going_to_sleep = 0
        self._why = ""
        self._loop = asyncio.get_running_loop()

    @property
    def unready(self) -> str:
        """Why drift makes the engine unready, "" when it does not."""
        return state.unready(self.drift, self._policy)

    def ask(self, why: str) -> None:
        """Verify again at once. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._ask, why)

    def request_changed(self, path: str, *, answered: bool) -> None:
        """A request that can change the engine (see `facts.changing_requests`) came, or was answered. From any thread."""
        request = changing_request(path)
        if request is None:
            return
        if request.effect == "asleep":
            # Counted before the engine gets it, so that no question to the workers follows it into sleep.
            self._going_to_sleep = max(0, self._going_to_sleep + (-1 if answered else 1))
        if answered:
            self.ask(f"{path} was answered")

    def _ask(self, why: str) -> None:
        self._why = why
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            why = await self._next()
            await self.once(why)
            await self._pause(min(GAP, self._every or GAP))

    async def _next(self) -> str:
        """Wait for the timer or a sign of change; returns which it was."""
        delay = self._every
        if state.awaits_confirmation(self.drift, self._policy):
            delay = min(CONFIRM, self._every or CONFIRM)
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._asked.wait())]
        if delay:
            waiting.append(asyncio.ensure_future(self._pause(delay)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if not self._asked.is_set():
            return ""
        self._asked.clear()
        return self._why

    async def once(self, why: str = "") -> None:
        """One verification, and what follows from it. `why` is the sign of change, "" for the timer."""
        if why:
            log.info("verifying again", because=why)
        try:
            await self._stay_awake()
            found = await self._verify()
        except Exception as error:  # a bug in verifying must not end serving
            log.error("verification failed", error=repr(error))
            found = f"verification failed: {type(error).__name__}"
        try:
            self.take(found)
        except Exception as error:
            log.error("what a verification found could not be posted", error=repr(error))

    async def _stay_awake(self) -> None:
        """Wait for requests that put the engine to sleep to be answered; not for ever, since a client may stall."""
        for _ in range(_LONGEST_SLEEP_REQUEST):
            if self._going_to_sleep <= 0:
                return
            await self._pause(1.0)

    def take(self, found: Verified | str) -> None:
        """Draw the conclusion from a verification."""
        after = found.established() if isinstance(found, Verified) else None
        problem = found if isinstance(found, str) else "; ".join(found.evidence.problems)
        before, self.drift = self.drift, state.consider(self.drift, self._first, after, problem, self._policy)
        now = self.drift
        if now.stale and now.stale != before.stale:
            log.warning("the verdict could not be confirmed; it stands as it was", because=now.stale)
        elif before.stale and not now.stale:
            log.info("the verdict is confirmed again")
        if isinstance(found, Verified) and now.changes != before.changes:
            self._post(found, before)
        updates: dict[str, Any] = {"drift_counts": dict(now.counts), "stale": now.stale, "drift": now.words()}
        if isinstance(found, Verified) and not now.stale:
            updates |= {"last_verified": self._clock(), "checks": found.checks}
        self._board.update(**updates)

    def _post(self, found: Verified, before: state.Drift) -> None:
        """Drift began, changed or ended: say so in the record, the log, the headers and the state."""
        effective, now = found.effective, self.drift
        self._board.update(effective=effective, checks=found.checks, engine_version=found.engine_version)
        self._record(found, now)
        for change in now.changes:
            if change not in before.changes:
                log.error("drift", field=change.field, before=change.before, after=change.after)
        if now.changes:
            self._board.move(Event.DRIFT_FOUND, f"drifted: {now.words()}")
        else:
            log.info("drift is over", was=before.words(), record=self._board.status.record_path)
            self._board.move(Event.DRIFT_GONE, "serving")

    def resume(self, found: Verified) -> bool:
        """The engine was away and is back: open the gate again with what this verification shows.

        What was established is another process's: where less can be read than then, a policy that requires it keeps the gate
        closed, and this returns False.
        """
        now = found.established()
        doubt = state.weaker(self._first, now)
        if doubt and violates(found.checks):
            self.take(f"not verified since the engine was started again: {doubt}")
            return False
        if self._first.failed and not now.failed:
            log.info("the policy is met now", was=", ".join(self._first.failed))
            self._first, self.drift = now, self.drift.model_copy(update={"changes": (), "in_a_row": 0})
            self._record(found, self.drift)
        elif doubt:
            self._record(found, self.drift)
        self._board.update(effective=found.effective, engine_version=found.engine_version)
        self.take(found)
        self._board.move(Event.VERDICT_ALLOWS, "serving")
        if self.drift.changes:
            self._board.move(Event.DRIFT_FOUND, f"drifted: {self.drift.words()}")
        return True
