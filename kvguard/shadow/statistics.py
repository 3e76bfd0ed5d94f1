"""Estimates of what all requests would have shown, from the probed ones, with intervals clustered by request.

Everything is a ratio of two weighted totals, Σ w·s / Σ w·n: s is a request's sum of something, n what it is counted
by, w the inverse of its inclusion probability. Its standard error is the linearized (Taylor) one with requests as the
clusters: Var = G/(G−1) · Σ (w·s − R·w·n)² / (Σ w·n)², G clusters. That needs sums only, so replicas add theirs up.

Small samples: besides the factor G/(G−1), the interval is Student's t with G* − 1 degrees of freedom, where
G* = (Σ w·n)² / Σ (w·n)² ≤ G is the number of equally large requests that would carry as much information.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import reduce

from pydantic import Field

from kvguard.shadow.distributions import beta_quantile, t_quantile
from kvguard.shadow.models import PROMPT_STRATA, TURN_STRATA, Observation, RequestScore, Stratum
from kvguard.vocabulary import Frozen

LEVEL = 0.95
"""Confidence of the intervals, two-sided."""


_ROUNDING = 1e-12
"""Residuals below this share of Σ(w·s)² are what is left of subtracting equal sums."""

_MOST_TRIALS = 1e6
"""More would not widen or narrow an interval that anybody reads; it keeps the incomplete beta function exact."""


class Measure(StrEnum):
    """What is estimated. By token unless said otherwise; logprobs are natural, distances between 0 and 1."""

    SIGNED_DELTA = "signed_delta"
    ABS_DELTA = "abs_delta"
    FLIP_RATE = "flip_rate"
    FIRST_FLIP_HAZARD = "first_flip_hazard"
    """First flips by position still without one: the chance that the next token is the first to flip, taken as constant."""
    TV_LOW = "tv_low"
    TV_HIGH = "tv_high"
    KL_LOW = "kl_low"
    REQUEST_ABS_DELTA = "request_abs_delta"
    """The mean over requests, not tokens, of their mean |Δ logprob|: what the alarm tests."""


_RATES = frozenset({Measure.FLIP_RATE, Measure.FIRST_FLIP_HAZARD})
_NOT_NEGATIVE = frozenset(Measure) - {Measure.SIGNED_DELTA}
_AT_MOST_ONE = _RATES | {Measure.TV_LOW, Measure.TV_HIGH}

_PARTS: Mapping[Measure, Callable[[RequestScore], tuple[float, float]]] = {
    Measure.SIGNED_DELTA: lambda score: (score.sum_delta, score.tokens),
    Measure.ABS_DELTA: lambda score: (score.sum_abs_delta, score.tokens),
    Measure.FLIP_RATE: lambda score: (score.flips, score.tokens),
    Measure.FIRST_FLIP_HAZARD: lambda score: (0, score.tokens) if score.first_flip is None else (1, score.first_flip + 1),
    Measure.TV_LOW: lambda score: (score.tv_low, score.tokens),
    Measure.TV_HIGH: lambda score: (score.tv_high, score.tokens),
    Measure.KL_LOW: lambda score: (score.kl_low, score.tokens),
    Measure.REQUEST_ABS_DELTA: lambda score: (score.mean_abs_delta or 0.0, 1),
}


class Estimate(Frozen):
    """A value with its interval. `value` None means no samples, `low` and `high` None no interval; `note` says why.

    `clusters` counts requests, `effective_clusters` is G* of the module's docstring.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    clusters: int = 0
    effective_clusters: float = 0.0
    note: str = ""


class SumStats(Frozen):
    """The sums one ratio needs, over requests: w, w², w·n, w·s, (w·s)², (w·s)(w·n), (w·n)².

    A commutative monoid: `SumStats()` is nothing seen, `+` puts two disjoint sets of requests together.
    """

    clusters: int = 0
    w: float = 0.0
    ww: float = 0.0
    wn: float = 0.0
    ws: float = 0.0
    ws_ws: float = 0.0
    ws_wn: float = 0.0
    wn_wn: float = 0.0

    @classmethod
    def of(cls, weight: float, s: float, n: float) -> SumStats:
        """One request with this weight, sum and count."""
        ws, wn = weight * s, weight * n
        return cls(clusters=1, w=weight, ww=weight * weight, wn=wn, ws=ws, ws_ws=ws * ws, ws_wn=ws * wn, wn_wn=wn * wn)

    def __add__(self, other: SumStats) -> SumStats:
        return SumStats(
            clusters=self.clusters + other.clusters,
            w=self.w + other.w,
            ww=self.ww + other.ww,
            wn=self.wn + other.wn,
            ws=self.ws + other.ws,
            ws_ws=self.ws_ws + other.ws_ws,
            ws_wn=self.ws_wn + other.ws_wn,
            wn_wn=self.wn_wn + other.wn_wn,
        )

    @property
    def effective_requests(self) -> float:
        """Kish's effective sample size (Σw)²/Σw²: equally weighted requests that would be worth as much."""
        return self.w * self.w / self.ww if self.ww else 0.0

    @property
    def effective_clusters(self) -> float:
        """G*: the same, with a request's weight counted by its tokens."""
        return self.wn * self.wn / self.wn_wn if self.wn_wn else 0.0

    @property
    def ratio(self) -> float | None:
        """Σ w·s / Σ w·n, None without samples."""
        return self.ws / self.wn if self.wn else None

    @property
    def standard_error(self) -> float | None:
        """Linearized, clustered by request; None below two clusters."""
        if self.ratio is None or self.clusters < 2:
            return None
        residuals = self.ws_ws - 2.0 * self.ratio * self.ws_wn + self.ratio**2 * self.wn_wn
        if residuals <= _ROUNDING * self.ws_ws:
            return 0.0
        return math.sqrt(self.clusters / (self.clusters - 1) * residuals) / self.wn


class Sums(Frozen):
    """Everything a replica exports about one comparison in one stratum; `+` adds replicas, or strata, up.

    `requests` counts probes, `collapsed` those that collapsed, `tokens` the scored tokens, unweighted.
    """

    requests: int = 0
    collapsed: int = 0
    tokens: int = 0
    measures: dict[Measure, SumStats] = Field(default_factory=dict)

    @classmethod
    def of(cls, weight: float, score: RequestScore) -> Sums:
        """One request. One without a scored token counts as a request, and in no measure."""
        return cls(
            requests=1,
            collapsed=int(bool(score.collapse)),
            tokens=score.tokens,
            measures={m: SumStats.of(weight, *parts(score)) for m, parts in _PARTS.items()} if score.tokens else {},
        )

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            requests=self.requests + other.requests,
            collapsed=self.collapsed + other.collapsed,
            tokens=self.tokens + other.tokens,
            measures={
                m: self.measures.get(m, _NOTHING) + other.measures.get(m, _NOTHING) for m in self.measures | other.measures
            },
        )

    def estimate(self, measure: Measure, level: float = LEVEL) -> Estimate:
        """The estimate of one measure with its two-sided interval at `level`."""
        return estimate(self.measures.get(measure, _NOTHING), measure, level)


_NOTHING = SumStats()


def estimate(sums: SumStats, measure: Measure = Measure.SIGNED_DELTA, level: float = LEVEL) -> Estimate:
    """A ratio with its interval: Korn–Graubard for the two rates, Student's t cut to the measure's range otherwise."""
    value, error = sums.ratio, sums.standard_error
    if value is None:
        return Estimate(note="no samples")
    found = Estimate(value=value, clusters=sums.clusters, effective_clusters=sums.effective_clusters)
    if error is None:
        return found.model_copy(update={"note": "no interval from one request"})
    df = max(sums.effective_clusters - 1.0, 0.1)
    if measure in _RATES:
        low, high = _rate_interval(min(value, 1.0), error, sums, df, level)
    else:
        half = t_quantile(0.5 + level / 2.0, df) * error
        low = max(0.0, value - half) if measure in _NOT_NEGATIVE else value - half
        high = min(1.0, value + half) if measure in _AT_MOST_ONE else value + half
    return found.model_copy(update={"low": low, "high": high, "standard_error": error})


def combine(replicas: Iterable[Sums]) -> Sums:
    """The sums of a fleet from its replicas' exported sums; each request was probed by one replica only."""
    return reduce(Sums.__add__, replicas, Sums())


def sums_of(observations: Iterable[Observation], comparison: str) -> Sums:
    """All observations that carry this comparison, whatever their stratum."""
    return combine(Sums.of(seen.weight, seen.scores[comparison]) for seen in observations if comparison in seen.scores)


def sums_by_stratum(
    observations: Iterable[Observation], comparison: str, adapters: Iterable[str] = ("",)
) -> dict[Stratum, Sums]:
    """Sums of every stratum of these adapters and of any other that was seen; one without samples is `Sums()`."""
    table = {
        Stratum(prompt, turns, adapter): Sums() for adapter in adapters for prompt in PROMPT_STRATA for turns in TURN_STRATA
    }
    for seen in observations:
        if comparison in seen.scores:
            table[seen.stratum] = table.get(seen.stratum, Sums()) + Sums.of(seen.weight, seen.scores[comparison])
    return table


def _rate_interval(rate: float, error: float, sums: SumStats, df: float, level: float) -> tuple[float, float]:
    """Clopper–Pearson on the effective number of trials (Korn and Graubard 1998), which stays honest at no events.

    Without variation (no flip at all, or everywhere) the trials are the effective clusters: tokens of one request
    may all go the same way.
    """
    alpha = 1.0 - level
    trials = sums.effective_clusters
    if error > 0.0 and 0.0 < rate < 1.0:
        shrink = t_quantile(1.0 - alpha / 2.0, max(sums.clusters - 1.0, 1.0)) / t_quantile(1.0 - alpha / 2.0, df)
        trials = min(max(rate * (1.0 - rate) / error**2 * shrink**2, 1.0), _MOST_TRIALS)
    events = rate * trials
    low = beta_quantile(alpha / 2.0, events, trials - events + 1.0) if events > 0.0 else 0.0
    high = beta_quantile(1.0 - alpha / 2.0, events + 1.0, trials - events) if trials > events else 1.0
    return low, high
