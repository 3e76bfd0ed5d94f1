"""The alarm: a sequential test that may be looked at after every probe, for ever, without raising its false alarms.

The named test is testing by betting (Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting).
X is a request's mean |Δ logprob| of *unexplained*, cut to [0, cap]. H0: the mean of X over all requests is at most
`bound` = accepted baseline + tolerance. A gambler without debt bets λ ≥ 0 on H0 being wrong:

    wealth ← wealth · (1 + λ · v · (X − bound)),   v = weight / max_weight ≤ 1

Under H0 wealth is a supermartingale that starts at 1, so by Ville's inequality it ever reaches 1/α with probability α
at most. λ is chosen before X is seen (the paper's approximate GRAPA, mean ÷ mean square of the past payoffs, recent ones
counting most) and never above BOLDNESS / bound, which keeps wealth positive.

Weights: E[w·(X − bound)] over probed requests has the sign of the mean of X over *all* requests minus the bound, so the
payoff is weighted. It is what thinning probes with probability v would bet on average, without the coin and its loss.

Change: a regression may begin after weeks of health. Wealth is therefore an average over gamblers, the k-th of whom
starts at probe k with 1/(k(k+1)) of the money (as in Shin, Ramdas and Rinaldo, E-detectors); an average of
supermartingales is one, and an old loss costs little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from kvguard.shadow.models import COST, UNEXPLAINED, Observation
from kvguard.vocabulary import Frozen, UsageError

BOLDNESS = 0.75
"""Largest share of the wealth that one request may cost."""

HALF_LIFE = 20.0
"""Requests after which a payoff counts half in choosing the bet."""

PRIOR = 5.0
"""Requests that the expectation "one tolerance over the bound" is worth in choosing the bet."""

AGREED_FLIPS, AGREED_DELTA = 0.25, 0.5
"""A repetition that the 16-bit pass follows more closely than this (flips by token, nats) was asked for: no collapse."""

RUINED = 2.0
"""Nats by token: a request that costs more collapsed, even where the engine's own scales explain it. Measured by request
(SmolLM2-135M, 14 to 48 tokens): e4m3 0.1 to 0.3, e5m2 0.2 to 0.7, ruined scales 2.5 to 17."""

RUINED_TOKENS = 8
"""Scored tokens below which a cost is no collapse: one unlikely token would pass for ruin."""


class Status(StrEnum):
    """What the alarm says. `no_regression_shown` is not "no loss"."""

    COLLECTING = "collecting"
    NO_REGRESSION_SHOWN = "no_regression_shown"
    REGRESSION = "regression"
    BLIND = "blind"


class AlarmTest(Frozen):
    """What is tested, in nats by token.

    baseline     accepted mean over requests of unexplained |Δ logprob| for this model and configuration
    tolerance    how much more is accepted
    cap          request means are cut here. It keeps the alarm valid; the clearing speaks of the cut mean
    max_weight   largest weight the sampler can give: the inverse of its smallest inclusion probability
    alpha        chance that the stream of one healthy engine ever alarms; shared among strata if each has an alarm
    clear_alpha  chance that a regression that persists is ever cleared
    min_clusters requests before an alarm by the mean, and before a clearing
    """

    baseline: float
    tolerance: float
    cap: float = 1.0
    max_weight: float = 1.0
    alpha: float = 0.001
    clear_alpha: float = 0.01
    min_clusters: int = 30
    comparison: str = UNEXPLAINED

    @property
    def bound(self) -> float:
        """baseline + tolerance."""
        return self.baseline + self.tolerance


@dataclass(frozen=True, slots=True)
class Wealth:
    """One gambler's account: an e-process. `value` is the evidence against its null hypothesis, at the start 1."""

    clusters: int = 0
    invested: float = 0.0
    payoffs: float = 0.0
    squares: float = 0.0

    @property
    def value(self) -> float:
        """Wealth of all gamblers, those who have not started yet included."""
        return self.invested + 1.0 / (self.clusters + 1)


@dataclass(frozen=True, slots=True)
class AlarmState:
    """The alarm after the observations so far. `regression` and `blind` are reasons, "" when not so."""

    test: AlarmTest
    seen: int = 0
    wealth: Wealth = Wealth()
    clearing: Wealth = Wealth()
    regression: str = ""
    blind: str = ""

    @property
    def status(self) -> Status:
        """A regression that was shown stays shown while blind."""
        if self.regression:
            return Status.REGRESSION
        if self.blind:
            return Status.BLIND
        return Status.COLLECTING if self.wealth.clusters < self.test.min_clusters else Status.NO_REGRESSION_SHOWN

    @property
    def reason(self) -> str:
        """One sentence for the person on call."""
        test, seen = self.test, self.wealth.clusters
        if self.regression:
            return self.regression
        if self.blind:
            return self.blind
        if self.status is Status.COLLECTING:
            return f"{seen} of at least {test.min_clusters} requests"
        return (
            f"evidence {self.wealth.value:.3g} that the mean {test.comparison} |Δ logprob| exceeds {test.bound:.4g}, "
            f"of {1 / test.alpha:.4g} needed, after {seen} requests"
        )


def begin(test: AlarmTest, blind: str = "no positive control has run yet") -> AlarmState:
    """Nothing seen. UsageError for a test that has no meaning."""
    wrong = [
        f"{name} must be {rule}, found {value:g}"
        for name, value, rule, good in (
            ("baseline", test.baseline, "a number ≥ 0", 0.0 <= test.baseline < math.inf),
            ("tolerance", test.tolerance, "a number > 0", 0.0 < test.tolerance < math.inf),
            ("cap", test.cap, f"above baseline + tolerance = {test.bound:g}", test.bound < test.cap < math.inf),
            ("max_weight", test.max_weight, "a number ≥ 1", 1.0 <= test.max_weight < math.inf),
            ("alpha", test.alpha, "between 0 and 1", 0.0 < test.alpha < 1.0),
            ("clear_alpha", test.clear_alpha, "between 0 and 1", 0.0 < test.clear_alpha < 1.0),
        )
        if not good
    ]
    if wrong:
        raise UsageError(f"shadow alarm: {'; '.join(wrong)}")
    return AlarmState(test, blind=blind)


def sighted(state: AlarmState, blind: str) -> AlarmState:
    """The state after a positive control: "" when the control was seen, else why the alarm cannot see."""
    return replace(state, blind=blind)


def update(state: AlarmState, observation: Observation) -> AlarmState:
    """The state after one more request. One without the tested comparison changes nothing unless it collapsed."""
    test, collapsed = state.test, collapse_of(observation)
    score = observation.scores.get(test.comparison)
    if score is None and not collapsed:
        return state
    mean = None if score is None else score.mean_abs_delta
    excess = (test.cap if mean is None else min(mean, test.cap)) - test.bound
    share = _share(observation.weight, test)
    if collapsed:
        return replace(state, seen=state.seen + 1, regression=f"collapse: {collapsed}", clearing=Wealth())
    if state.regression:
        clearing = bet(state.clearing, -share * excess, BOLDNESS / (test.cap - test.bound), test)
        if clearing.clusters >= test.min_clusters and clearing.value >= 1.0 / test.clear_alpha:
            return AlarmState(test, state.seen + 1, blind=state.blind)
        return replace(state, seen=state.seen + 1, clearing=clearing)
    wealth = bet(state.wealth, share * excess, BOLDNESS / test.bound, test)
    found = ""
    if wealth.clusters >= test.min_clusters and wealth.value >= 1.0 / test.alpha:
        found = (
            f"the mean {test.comparison} |Δ logprob| exceeds {test.bound:.4g} (baseline {test.baseline:.4g} + tolerance "
            f"{test.tolerance:.4g}): evidence {wealth.value:.3g} ≥ {1 / test.alpha:.4g} after {wealth.clusters} requests"
        )
    return AlarmState(test, state.seen + 1, wealth, Wealth(), found, state.blind)


def bet(wealth: Wealth, payoff: float, most: float, test: AlarmTest) -> Wealth:
    """Wealth after one bet that pays `payoff` for each unit staked; at most `most` is staked, and never less than 0."""
    k = wealth.clusters + 1
    payoffs = wealth.payoffs + PRIOR * test.tolerance
    squares = wealth.squares + PRIOR * (test.tolerance**2 + test.bound**2)
    stake = min(max(payoffs / squares, 0.0), most)
    keep = 0.5 ** (1.0 / HALF_LIFE)
    return Wealth(
        clusters=k,
        invested=min((wealth.invested + 1.0 / (k * (k + 1))) * (1.0 + stake * payoff), 1e300),
        payoffs=keep * wealth.payoffs + payoff,
        squares=keep * wealth.squares + payoff * payoff,
    )


def collapse_of(observation: Observation) -> str:
    """How this request collapsed, or "". One is a hard failure; a repetition counts unless the 16-bit pass follows it.

    Cost over RUINED, over enough tokens, is a collapse: ruined scales are explained by the pass that has the same, so
    only the cost shows them.
    """
    kind = next((score.collapse for score in observation.scores.values() if score.collapse), "")
    cost = observation.scores.get(COST)
    enough = cost is not None and cost.tokens >= RUINED_TOKENS
    if not kind and cost is not None and enough and (cost.mean_abs_delta or 0.0) > RUINED:
        return f"cost {cost.mean_abs_delta:.1f} nats by token"
    if kind != "repeated token" or cost is None or cost.mean_abs_delta is None or cost.flip_rate is None:
        return kind
    return kind if cost.mean_abs_delta >= AGREED_DELTA or cost.flip_rate >= AGREED_FLIPS else ""


def _share(weight: float, test: AlarmTest) -> float:
    if not 0.0 < weight <= test.max_weight * (1.0 + 1e-9):
        raise UsageError(f"shadow alarm: weights must be above 0 and at most max_weight {test.max_weight:g}, found {weight:g}")
    return weight / test.max_weight
