"""Which requests are probed, and when: never by load, never in a client's way, every loss counted.

A request's inclusion probability follows from its stratum alone. The coin is thrown before load is looked at, so that
weights of 1/probability make totals unbiased. What load then forbids is dropped by name, and an estimate must say so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Generic, TypeVar

from kvguard.shadow.budget import Breaker, Budget, Gaps, PassTimes, Spent
from kvguard.shadow.models import PROMPT_STRATA, TURN_STRATA, Stratum
from kvguard.shadow.settings import Settings
from kvguard.shadow.tally import Drop, Row, Tally

NOT_INCLUDED = "not_included"
"""`Decision.reason` of a request that the coin left out."""

MOST_ADAPTERS = 8
"""Adapters with strata of their own; further ones are counted together, so that strata stay few."""

OTHER_ADAPTERS = "other"
"""The adapter in the strata of those."""

_SLOWLY = 0.2
_OF_A_GAP = 0.1  # one more sequence makes a step a fifth longer (on a CPU, beside three), a pass makes it many times as long
_FORGET_S = 60.0  # a pause of the machine in one pass must not blind probes for long

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of an offer. `include` is the coin; `reason` is "" when queued, NOT_INCLUDED, or the Drop."""

    include: bool
    probability: float
    reason: str


@dataclass(slots=True, eq=False)
class Item(Generic[T]):
    """A request to be probed. `tokens` is the estimate it was offered with, `offered_at` the clock's seconds."""

    payload: T = field(repr=False)
    stratum: Stratum
    probability: float
    tokens: int
    size: int
    offered_at: float
    held_by: Drop = Drop.AGE

    @property
    def weight(self) -> float:
        """How many requests this one stands for."""
        return 1.0 / self.probability


def inclusion_probability(settings: Settings, stratum: Stratum) -> float:
    """The probability that a request of this stratum is included, 0 to 1."""
    prompt = settings.prompt_multipliers[PROMPT_STRATA.index(stratum.prompt)]
    turns = settings.turn_multipliers[TURN_STRATA.index(stratum.turns)]
    return min(1.0, settings.rate * prompt * turns)


class Sampler(Generic[T]):
    """Offers come from the data plane, `next` and the endings from whoever runs probes; a lock is held for microseconds.

    `clock` gives monotonic seconds, the same that `now` counts in. `batch_tokens` is the longest pass the engine may
    take (its max_num_batched_tokens), None where the reference is another engine, which stalls nothing here.
    `batch_sequences` is the engine's max_num_seqs, None when unknown. `passes` is the number of passes of one probe.
    One probe runs at a time: every item that `next` returns ends in exactly one of `done`, `failed` and `drop`.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float],
        rng: Random,
        *,
        batch_tokens: int | None,
        batch_sequences: int | None = None,
        passes: int = 1,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._batch_tokens = batch_tokens
        self._batch_sequences = batch_sequences
        self._passes = passes
        self._lock = threading.Lock()
        self._tally = Tally()
        self._queue: deque[Item[T]] = deque()
        self._queued_bytes = 0
        self._running: tuple[Item[T], Spent] | None = None
        self._budget = Budget(settings.probes_per_minute, settings.engine_share)
        self._times = PassTimes(settings.prior_ms_per_token / 1000, _FORGET_S)
        self._gaps = Gaps(settings.gap_share)
        self._overhead_s = 0.0
        self._breaker = Breaker(settings.retry_after_s)
        self._adapters: set[str] = {""}
        self._closed = False
        self._away = False

    # --- the data plane ---

    def offer(self, stratum: Stratum, tokens_estimate: int, payload: T, size: int = 0) -> Decision:
        """A request whose client has its answer. `size` is the payload's in bytes, for the bound on memory."""
        with self._lock:
            now = self._clock()
            stratum = self._bounded(stratum)
            probability = inclusion_probability(self._settings, stratum)
            include = self._rng.random() < probability
            self._tally.offer(stratum, probability, tokens_estimate)
            self._expire(now)
            reason = self._obstacle(now, size) if include else NOT_INCLUDED
            self._tally.move(stratum, tokens_estimate, reason or "queued")
            if not reason:
                self._queue.append(Item(payload, stratum, probability, tokens_estimate, size, now))
                self._queued_bytes += size
            return Decision(include, probability, reason)

    def _bounded(self, stratum: Stratum) -> Stratum:
        if stratum.adapter not in self._adapters:
            if len(self._adapters) > MOST_ADAPTERS:
                return replace(stratum, adapter=OTHER_ADAPTERS)
            self._adapters.add(stratum.adapter)
        return stratum

    def _obstacle(self, now: float, size: int) -> str:
        if self._closed:
            return Drop.SHUTDOWN
        if self._away:
            return Drop.REFERENCE
        if self._breaker.open(now):
            return Drop.BREAKER
        full = len(self._queue) >= self._settings.queue_items or self._queued_bytes + size > self._settings.queue_bytes
        return Drop.QUEUE_FULL if full else ""

    # --- whoever runs probes ---

    def generated(self, total: float | None) -> None:
        """The engine has generated so many tokens since it started, which earns gaps."""
        with self._lock:
            self._gaps.made(total)

    def promising(self, now: float, in_flight: int) -> bool:
        """Whether a probe could start, were the engine's load right; `in_flight` requests are with it by kvguard's own count.

        To ask the engine for its load lengthens a gap of its streams, so it is asked only then.
        """
        with self._lock:
            self._expire(now)
            self._drop_impossible(now)
            if not self._queue or self._running is not None:
                return False
            hold: Drop | None = None
            if self._breaker.open(now):
                hold = Drop.BREAKER
            elif not self._budget.affords(now, self._cost(now, self._queue[0].tokens)):
                hold = Drop.BUDGET
            elif not self._gaps.affords(in_flight):
                hold = Drop.GAPS
            self._held_by(hold)
            return hold is None

    def replayed(self, running: float, tokens: int) -> None:
        """A replay generated so many tokens beside so many running requests: each of its steps was one of theirs."""
        with self._lock:
            self._gaps.spend(running * (1 + _OF_A_GAP * tokens))

    def next(self, now: float, waiting: float | None, kv_pinned: float | None, running: float | None) -> Item[T] | None:
        """The request to probe now, or None. The three figures are the engine's, None where it does not say.

        `waiting` and `running` count requests; `kv_pinned` is the share of KV blocks that running requests hold.
        """
        with self._lock:
            self._expire(now)
            if self._running is not None:
                return None
            hold = self._hold(now, waiting, kv_pinned, running)
            if hold is None:
                self._drop_impossible(now)
            if hold is None and self._queue:
                item = self._queue[0]
                cost = self._cost(now, item.tokens)
                if self._budget.affords(now, cost):
                    self._leave_queue("running")
                    self._running = (item, self._budget.spend(now, cost))
                    return item
                hold = Drop.BUDGET
            self._held_by(hold)
            return None

    def clearance(
        self, now: float, tokens: int, waiting: float | None, kv_pinned: float | None, running: float | None
    ) -> Drop | None:
        """Asked right before each pass, with its exact number of tokens: None to go ahead, else what forbids it now.

        WAITING, KV_PINNED, BATCH_FULL, GAPS and LOAD_UNKNOWN may pass; the others will not. A pass on another engine
        waits for none of them, and one of a running probe not for GAPS: its replay has cost more of them.
        """
        with self._lock:
            if self._closed:
                return Drop.SHUTDOWN
            if self._batch_tokens is None:
                return Drop.BREAKER if self._breaker.open(now) else None
            forbids = self._never(now, tokens) or self._hold(now, waiting, kv_pinned, running)
            if forbids is Drop.GAPS and self._running is not None:
                forbids = None
            if forbids is None:
                self._gaps.spend(running or 0.0)
            return forbids

    def done(self, item: Item[T], *, tokens: int, pass_seconds: float, engine_seconds: float) -> None:
        """The item was probed: `tokens` in each pass, seconds of the longest one, and of the engine's time in all.

        Of a replay that ran in a batch with others, its part of the batch's time.
        """
        with self._lock:
            self._end(item, "done", engine_seconds)
            if self._batch_tokens is not None:
                self._times.measure(tokens, pass_seconds)
            here = 0.0 if self._batch_tokens is None else self._passes * pass_seconds
            overhead = max(0.0, engine_seconds - here)
            self._overhead_s = max(overhead, self._overhead_s + _SLOWLY * (overhead - self._overhead_s))
            self._breaker.reset()

    def failed(self, item: Item[T], engine_seconds: float = 0.0) -> None:
        """The item's pass failed: no other one until the breaker's time is over."""
        with self._lock:
            self._end(item, Drop.FAILED, engine_seconds)
            self._breaker.fail(self._clock())

    def drop(self, item: Item[T], cause: Drop, engine_seconds: float = 0.0) -> None:
        """The item ended for another reason than its pass."""
        with self._lock:
            self._end(item, cause, engine_seconds)

    def measured(self, tokens: int, pass_seconds: float) -> None:
        """A pass outside of probes, at start-up, took this long."""
        with self._lock:
            self._times.measure(tokens, pass_seconds)

    def set_passes(self, passes: int) -> None:
        """The number of passes of each later probe."""
        with self._lock:
            self._passes = passes

    def reset_breaker(self) -> None:
        """The cause of a failure is gone."""
        with self._lock:
            self._breaker.reset()

    def reference_away(self) -> None:
        """There is nothing to score with: what waits is dropped by that name, and every later offer."""
        with self._lock:
            self._away = True
            while self._queue:
                self._leave_queue(Drop.REFERENCE)

    def reference_back(self) -> None:
        """There is a reference again, and no failure of the earlier one counts."""
        with self._lock:
            self._away = False
            self._breaker.reset()

    def close(self) -> None:
        """Stop: what waits is dropped, and every later offer. A running item still ends by itself."""
        with self._lock:
            self._closed = True
            while self._queue:
                self._leave_queue(Drop.SHUTDOWN)

    # --- what became of the requests ---

    @property
    def queued(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    def rows(self) -> tuple[Row, ...]:
        """The account by stratum."""
        with self._lock:
            return self._tally.rows()

    @property
    def breaker(self) -> str:
        """`closed`, or `tripped` when the last pass failed."""
        return self._breaker.state

    # --- under the lock ---

    def _hold(self, now: float, waiting: float | None, kv_pinned: float | None, running: float | None) -> Drop | None:
        """What forbids every probe at this moment. NaN figures are unknown ones."""
        if self._breaker.open(now):
            return Drop.BREAKER
        if waiting is None or kv_pinned is None or running is None or not waiting + kv_pinned + running >= 0:
            return Drop.LOAD_UNKNOWN
        if waiting > 0:
            return Drop.WAITING
        if kv_pinned > self._settings.kv_pinned_max:
            return Drop.KV_PINNED
        full = self._batch_sequences is not None and running >= self._batch_sequences
        if full:
            return Drop.BATCH_FULL
        return None if self._gaps.affords(running) else Drop.GAPS

    def _never(self, now: float, tokens: int) -> Drop | None:
        """What forbids a pass over this many tokens at any load."""
        if self._batch_tokens is None:
            return None
        if tokens > self._batch_tokens:
            return Drop.TOO_LONG
        if self._times.predict(now, tokens) * 1000 > self._settings.max_stall_ms:
            self._times.refuse(now, tokens)
            return Drop.STALL
        return None

    def _drop_impossible(self, now: float) -> None:
        """Those at the head whose passes no load would allow."""
        while self._queue and (never := self._never(now, self._queue[0].tokens)) is not None:
            self._leave_queue(never)

    def _cost(self, now: float, tokens: int) -> float:
        """Engine seconds that the probe is expected to take, at most a whole window's: it then starts on empty books."""
        stalls = 0.0 if self._batch_tokens is None else self._passes * self._times.predict(now, tokens)
        return min(stalls + self._overhead_s, self._budget.most)

    def _held_by(self, hold: Drop | None) -> None:
        for item in self._queue:
            item.held_by = hold or item.held_by

    def _expire(self, now: float) -> None:
        while self._queue and now - self._queue[0].offered_at > self._settings.max_age_s:
            self._leave_queue(self._queue[0].held_by)

    def _leave_queue(self, to: str) -> None:
        item = self._queue.popleft()
        self._queued_bytes -= item.size
        self._tally.move(item.stratum, item.tokens, to, out_of="queued")

    def _end(self, item: Item[T], to: str, engine_seconds: float) -> None:
        if self._running is None or self._running[0] is not item:
            raise ValueError("this item is not running")
        self._running[1].cost = engine_seconds
        self._running = None
        self._tally.move(item.stratum, item.tokens, to, out_of="running")
