"""What the self-check's passes say: which arithmetic explains the engine, what is normal here, and whether damage shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvguard.reference.models import EXACT, Choice
from kvguard.shadow.control import CONTROL
from kvguard.shadow.fidelity import UNTESTED, Fidelity, choice_named, judge_fidelity
from kvguard.shadow.models import COST, UNEXPLAINED, Observation, Stratum
from kvguard.shadow.sampler import inclusion_probability
from kvguard.shadow.sequential import AlarmTest, collapse_of
from kvguard.shadow.settings import Settings
from kvguard.shadow.statistics import Measure, sums_of

TOLERANCE, LEAST_TOLERANCE = 0.5, 0.02
"""What is accepted above the baseline where nobody said: this share of it, and at least so many nats by token."""

DAMAGED = 0.5
"""Nats by token that no healthy kernel leaves unexplained (measured: 0.03 to 0.05; ruined scales 4.6)."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the self-check found.

    choice        the pass that stands for the engine's own arithmetic, None where nothing explains it: unexplained is then
                  the whole difference from the exact pass, here and live
    measured      upper end of the interval of unexplained |Δ logprob|, in nats by token; None where nothing could be tested
    test          the alarm that live probes are held to
    observations  the prompts' scores under the names of live ones
    damage        why the engine is damaged already, "" when that does not show
    """

    fidelity: Fidelity
    choice: Choice | None
    measured: float | None
    test: AlarmTest
    observations: tuple[Observation, ...]
    damage: str


def conclude(
    seen: Sequence[Observation],
    dtype: str,
    settings: Settings,
    accepted: float | None,
    tolerance: float | None,
    *,
    not_a_number: bool,
) -> Conclusion:
    """Judge the self-check. `accepted` and `tolerance` are a person's, in nats by token; None: what is found here."""
    fidelity = judge_fidelity(seen, dtype)
    choice = choice_named(fidelity.explained_by, dtype) if fidelity.known else None
    tested = fidelity.explained_by != UNTESTED
    named = tuple(as_live(observation, own_label(choice) if tested else "") for observation in seen)
    found = sums_of(named, UNEXPLAINED).estimate(Measure.REQUEST_ABS_DELTA)
    # The upper end: a baseline from a dozen requests that is too low by chance would alarm on a healthy engine.
    measured = (found.high if found.high is not None else (found.value or 0.0)) if tested else None
    baseline = (measured or 0.0) if accepted is None else accepted
    tolerance = tolerance or max(TOLERANCE * baseline, LEAST_TOLERANCE)
    cap = max(1.0, 4.0 * (baseline + tolerance))
    test = AlarmTest(baseline=baseline, tolerance=tolerance, cap=cap, max_weight=max_weight(settings))
    broken = "nan logprob" if not_a_number else next((how for one in named if (how := collapse_of(one))), "")
    least = found.low if found.low is not None else (measured or 0.0)
    damage = ""
    if broken or (measured or 0.0) > DAMAGED:
        how = f"one answer: {broken}" if broken else f"unexplained |Δ logprob| {measured:.3g} by token"
        damage = f"the self-check shows damage: {how}"
    elif accepted is not None and least > test.bound:
        damage = (
            f"the self-check finds unexplained |Δ logprob| of at least {least:.4g} by token, more than the accepted "
            f"baseline {baseline:.4g} + tolerance {tolerance:.4g}"
        )
    return Conclusion(fidelity, choice, measured, test, named, damage)


def own_label(choice: Choice | None) -> str:
    """Label of the pass that stands for the engine's own arithmetic."""
    return choice.label if choice is not None else EXACT.label


def control_choice(dtype: str) -> Choice:
    """A coarser format than the engine's own: what the alarm must be able to see."""
    worse = dtype == "fp8_e5m2"
    return Choice(label=CONTROL, format="fp8_e5m2", rounding="truncate", query=worse, probabilities=worse)


def as_live(observation: Observation, own: str, more: Sequence[str] = ()) -> Observation:
    """The same observation under the names that are tested and shown: cost, unexplained, control.

    `own` is the label of the pass that stands for the engine's own arithmetic; "" where there can be none, and nothing is
    then said of what is unexplained.
    """
    scores = observation.scores
    named = {COST: scores[EXACT.label]}
    if own:
        named[UNEXPLAINED] = scores.get(own, scores[EXACT.label])
    if CONTROL in scores:
        named[CONTROL] = scores[CONTROL]
    named |= {label: scores[label] for label in more if label in scores}
    return Observation(observation.weight, observation.stratum, named)


def weight_of(settings: Settings, where: Stratum) -> float:
    """The weight a live request of this stratum has, so that the positive control bets as the live alarm does."""
    probability = inclusion_probability(settings, where)
    return 1.0 / probability if probability > 0 else 1.0


def max_weight(settings: Settings) -> float:
    """The largest weight the sampler can give: the inverse of its smallest inclusion probability."""
    smallest = settings.rate * min(settings.prompt_multipliers) * min(settings.turn_multipliers)
    return max(1.0, 1.0 / smallest) if smallest > 0 else 1.0
