"""What became of every request that was offered: by stratum, in requests and in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvguard.shadow.models import Stratum


class Drop(StrEnum):
    """Why a request that was included was not probed. Each is a label of a metric, so the set is closed."""

    QUEUE_FULL = "queue_full"
    """As many requests, or as many bytes, were waiting as the settings allow."""
    AGE = "age"
    """It waited too long for its turn."""
    BUDGET = "budget"
    """The minute's probes or engine time were spent for as long as it was allowed to wait."""
    WAITING = "waiting"
    """Clients' requests waited in the engine for as long."""
    KV_PINNED = "kv_pinned"
    """Running requests held too much of the KV cache for as long."""
    BATCH_FULL = "batch_full"
    """The engine ran as many sequences as it can, so that a replay would have made a client wait."""
    GAPS = "gaps"
    """Requests ran for as long, and probes had lengthened as many gaps between their tokens as the settings allow."""
    LOAD_UNKNOWN = "load_unknown"
    """The engine's load could not be read for as long."""
    STALL = "stall"
    """The pass was predicted to stall the engine for longer than the settings allow."""
    TOO_LONG = "too_long"
    """Longer than one batch the engine schedules."""
    BREAKER = "breaker"
    """A pass had failed, and probes were paused."""
    REPLAY = "replay"
    """The engine refused or failed the replay, or its answer could not be scored."""
    FAILED = "failed"
    """The reference pass failed."""
    REFERENCE = "reference"
    """The reference was away, or another engine than may be one."""
    SHUTDOWN = "shutdown"
    """kvguard was stopping."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many requests, and their tokens as estimated when they were offered."""

    requests: int = 0
    tokens: int = 0

    def plus(self, requests: int, tokens: int) -> Count:
        """The sum."""
        return Count(self.requests + requests, self.tokens + tokens)


_NONE = Count()


@dataclass(frozen=True, slots=True)
class Row:
    """One stratum's account: offered = not_included + queued + running + done + all of dropped.

    `probability` is the inclusion probability of the stratum's requests.
    """

    stratum: Stratum
    probability: float
    offered: Count = _NONE
    not_included: Count = _NONE
    queued: Count = _NONE
    running: Count = _NONE
    done: Count = _NONE
    dropped: Mapping[Drop, Count] = field(default_factory=dict)

    @property
    def coverage(self) -> float | None:
        """Share of the included requests' tokens that were probed, of those that are settled; None when there are none.

        Below 1, estimates of this stratum lack the dropped probes, which are those of busy times or long prompts.
        """
        settled = self.done.tokens + sum(count.tokens for count in self.dropped.values())
        return self.done.tokens / settled if settled else None


class Tally:
    """Moves requests between the places of a Row."""

    def __init__(self) -> None:
        self._offered: dict[Stratum, Count] = {}
        self._places: dict[Stratum, dict[str, Count]] = {}
        self._probabilities: dict[Stratum, float] = {}

    def offer(self, stratum: Stratum, probability: float, tokens: int) -> None:
        """A request was offered; `move` says where it is."""
        self._probabilities[stratum] = probability
        self._offered[stratum] = self._offered.get(stratum, _NONE).plus(1, tokens)

    def move(self, stratum: Stratum, tokens: int, to: str, *, out_of: str | None = None) -> None:
        """One request to a place, "not_included", "queued", "running", "done" or a Drop, out of the one it was in."""
        places = self._places.setdefault(stratum, {})
        if out_of is not None:
            places[out_of] = places[out_of].plus(-1, -tokens)
        places[to] = places.get(to, _NONE).plus(1, tokens)

    def rows(self) -> tuple[Row, ...]:
        """The account of every stratum that was offered anything, in order of first offer."""
        return tuple(self._row(stratum) for stratum in self._offered)

    def _row(self, stratum: Stratum) -> Row:
        places = self._places.get(stratum, {})
        return Row(
            stratum,
            self._probabilities[stratum],
            offered=self._offered[stratum],
            not_included=places.get("not_included", _NONE),
            queued=places.get("queued", _NONE),
            running=places.get("running", _NONE),
            done=places.get("done", _NONE),
            dropped={cause: places[cause] for cause in Drop if cause in places},
        )
