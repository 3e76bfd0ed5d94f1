"""What probes may cost: starts and engine time by the minute, the stall of one pass, and a pause after a failure."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 60.0
"""Seconds that the budget looks back."""

LEAST_TOKENS = 128
"""Passes over fewer tokens count as this many: below it, fixed costs are most of the time."""


@dataclass(slots=True)
class Spent:
    """One probe on the books: when it started, and its engine time in seconds, expected first and then measured."""

    at: float
    cost: float


class Budget:
    """At most `starts` probes and `share` of the time in any 60 seconds. Times are seconds of one monotonic clock.

    Only a probe that starts on empty books, or costs more than was expected, can exceed a window's share. It stays on the
    books until the share has paid for it, so that the share holds in the long run whatever one probe costs.
    """

    def __init__(self, starts: float, share: float) -> None:
        self._starts = max(1, int(starts))
        self._start_window = WINDOW_S if starts >= 1 else WINDOW_S / starts
        self._share = share
        self._books: list[Spent] = []

    @property
    def most(self) -> float:
        """Seconds of engine time that one window allows."""
        return WINDOW_S * self._share

    def affords(self, now: float, cost: float) -> bool:
        """Whether a probe of this cost, in seconds of engine time, may start now."""
        self._books = [spent for spent in self._books if now < spent.at + self._kept_s(spent)]
        started = sum(1 for spent in self._books if now < spent.at + self._start_window)
        return started < self._starts and sum(spent.cost for spent in self._books) + cost <= self.most

    def spend(self, now: float, cost: float) -> Spent:
        """A probe starts. Set the entry's `cost` when it is known, before the next probe starts."""
        spent = Spent(now, cost)
        self._books.append(spent)
        return spent

    def _kept_s(self, spent: Spent) -> float:
        return max(WINDOW_S, self._start_window, spent.cost / self._share)


@dataclass(slots=True)
class _Length:
    """What passes of one power of two of tokens took, in seconds by token, the longest in tokens, and since when refused."""

    mean: float = 0.0
    deviation: float = 0.0
    best: float = 0.0
    longest: int = 0
    refused_since: float | None = None


class PassTimes:
    """How long a reference pass will stall the engine, from those measured: seconds by token, and a margin.

    Lengths are kept apart by powers of two. Slower than expected counts at once, faster only slowly. A length that was
    never measured is foreseen from the nearest shorter one, its time by token taken to grow with the length, as exact
    attention's does. Where the forecast refuses a whole length, it would never learn better, so from the first refusal on
    it falls by half every `forget_s` seconds, down to the best time by token seen.
    """

    _QUICKNESS = 0.2
    _DEVIATIONS = 2.0

    def __init__(self, prior_s_per_token: float, forget_s: float) -> None:
        self._prior = prior_s_per_token
        self._lengths: dict[int, _Length] = {}
        self._forget_s = forget_s

    def predict(self, now: float, tokens: int) -> float:
        """Seconds, on the cautious side, that a pass over this many tokens takes."""
        units = max(tokens, LEAST_TOKENS)
        by_token = self._foreseen(units)
        since = self._of(units).refused_since
        if since is not None:
            best = min((each.best for each in self._lengths.values() if each.longest), default=self._prior)
            by_token = max(min(best, by_token), by_token * 0.5 ** ((now - since) / self._forget_s))
        return units * by_token

    def refuse(self, now: float, tokens: int) -> None:
        """A pass over this many tokens was refused for its predicted time."""
        length = self._of(max(tokens, LEAST_TOKENS))
        if length.refused_since is None:
            length.refused_since = now

    def measure(self, tokens: int, seconds: float) -> None:
        """A pass over this many tokens took this long."""
        units = max(tokens, LEAST_TOKENS)
        by_token = seconds / units
        length = self._of(units)
        if not length.longest:
            length.mean = length.best = by_token
            length.deviation = by_token / 4
        elif by_token > length.mean + self._DEVIATIONS * length.deviation:
            length.mean = by_token
        else:
            length.deviation += self._QUICKNESS * (abs(by_token - length.mean) - length.deviation)
            length.mean += self._QUICKNESS * (by_token - length.mean)
        length.best = min(length.best, by_token)
        length.longest = max(length.longest, units)
        length.refused_since = None

    def _of(self, units: int) -> _Length:
        return self._lengths.setdefault((units - 1).bit_length(), _Length())

    def _foreseen(self, units: int) -> float:
        measured = sorted(each.longest for each in self._lengths.values() if each.longest)
        if not measured:
            return self._prior
        nearest = max((most for most in measured if most <= units), default=measured[0])
        own = self._of(units)
        length = own if own.longest else self._of(nearest)
        return (length.mean + self._DEVIATIONS * length.deviation) * max(1.0, units / length.longest)


class Gaps:
    """How many gaps between clients' tokens probes may lengthen: `share` of those that the engine makes.

    A pass, like the prefill of a replay, lengthens one gap of every request that runs, and none where nothing runs. One more
    than was earned may be, and is earned back before the next. What a quiet time earned is kept up to `_MOST` gaps, so that
    it cannot be spent in one crowded minute.
    """

    _MOST = 32.0

    def __init__(self, share: float) -> None:
        self._share = share
        self._earned = 0.0
        self._total: float | None = None

    def made(self, total: float | None) -> None:
        """The engine has generated `total` tokens since it started, None where it does not say. A fall is another start."""
        if total is not None and self._total is not None and total > self._total:
            self._earned = min(self._MOST, self._earned + self._share * (total - self._total))
        self._total = total if total is not None else self._total

    def affords(self, running: float) -> bool:
        """Whether one gap of so many running requests may be lengthened now."""
        return running <= 0 or self._earned > 0

    def spend(self, running: float) -> None:
        """One gap of each was."""
        self._earned -= max(running, 0.0)


class Breaker:
    """Stops probes after one failed pass, for a time that doubles with each failure of the trial after it."""

    _MOST_DOUBLINGS = 6

    def __init__(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._failures = 0
        self._closed_from: float | None = None

    def open(self, now: float) -> bool:
        """Whether probes are stopped. When the time is over, one probe at a time goes through as a trial."""
        return self._closed_from is not None and now < self._closed_from

    @property
    def state(self) -> str:
        """`closed` or `tripped`: whether the last pass failed."""
        return "closed" if self._closed_from is None else "tripped"

    def fail(self, now: float) -> None:
        """A pass failed."""
        self._closed_from = now + self._retry_after_s * 2 ** min(self._failures, self._MOST_DOUBLINGS)
        self._failures += 1

    def reset(self) -> None:
        """A pass succeeded, or a person says that the cause is gone."""
        self._closed_from = None
        self._failures = 0
