"""Can the alarm see? The noise floor it stands on, and a positive control: a damage of known size that it must find.

A control pass is the reference fake-quantized with something coarser than the engine's own format; the same decode
scored against it shows the engine as if it had that much wrong. What is asked of the alarm is matched to its tolerance:
a mean one tolerance above the bound. Controls that are larger are shrunk to it, request by request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from kvguard.shadow.models import Observation, RequestScore
from kvguard.shadow.sequential import AlarmTest, Status, begin, update
from kvguard.shadow.statistics import Estimate, Measure, sums_of
from kvguard.vocabulary import Frozen

CONTROL = "control"
"""Key of the control pass in `Observation.scores`."""

POWER = 0.8
"""Least share of simulated streams in which the alarm must find the control."""

MIN_REQUESTS = 8
"""Fewer requests than this are too few to resample."""


class Control(Frozen):
    """The outcome of a positive control. `blind` says why the alarm cannot see; "" means it can.

    `power` is the share of `streams` simulated streams that alarmed within `probes` requests, None when not simulated.
    `effect` is the control's mean over requests before it was matched, `target` what it was matched to, in nats by token.
    """

    blind: str
    power: float | None = None
    probes: int
    streams: int
    effect: float | None = None
    target: float


def noise_floor(observations: Sequence[Observation], comparison: str) -> Estimate:
    """Mean over requests of |Δ logprob| where nothing differs but noise: 16-bit decode against the pass on a 16-bit
    engine, the fidelity residual (unexplained) on a quantized one.

    Exactly zero is a thing compared with itself, which is no floor: its value is None and the note says so.
    """
    floor = sums_of(observations, comparison).estimate(Measure.REQUEST_ABS_DELTA)
    if floor.value == 0.0:
        return Estimate(
            clusters=floor.clusters, note="every difference is exactly 0: the same computation twice is no noise floor"
        )
    return floor


def positive_control(
    observations: Sequence[Observation], test: AlarmTest, probes: int = 100, streams: int = 200, seed: int = 0
) -> Control:
    """Power of the alarm against the control, by resampling whole requests with their weights; same seed, same answer.

    Each observation needs both the tested comparison and CONTROL in its scores. Takes streams × probes updates, about
    5 µs each.
    """
    both = [seen for seen in observations if {test.comparison, CONTROL} <= seen.scores.keys()]
    both = [seen for seen in both if all(seen.scores[key].tokens for key in (test.comparison, CONTROL))]
    target = test.bound + test.tolerance
    if len(both) < MIN_REQUESTS:
        return Control(
            blind=f"positive control: {len(both)} usable requests, {MIN_REQUESTS} needed",
            probes=probes,
            streams=streams,
            target=target,
        )
    now = sums_of(both, test.comparison).estimate(Measure.REQUEST_ABS_DELTA).value or 0.0
    effect = sums_of(both, CONTROL).estimate(Measure.REQUEST_ABS_DELTA).value or 0.0
    if effect < target or effect <= now:
        return Control(
            blind=f"positive control: it reaches {effect:.4g}, below the {target:.4g} that the alarm is asked to see",
            probes=probes,
            streams=streams,
            effect=effect,
            target=target,
        )
    share = max(0.0, (target - now) / (effect - now))
    matched = [_blend(seen, test.comparison, share) for seen in both]
    dice = random.Random(seed)  # noqa: S311 -- a simulation, not a secret
    power = sum(_alarms(dice.choices(matched, k=probes), test) for _ in range(streams)) / streams
    blind = (
        "" if power >= POWER else f"positive control: seen in {power:.0%} of streams of {probes} requests, {POWER:.0%} needed"
    )
    return Control(blind=blind, power=power, probes=probes, streams=streams, effect=effect, target=target)


def _blend(seen: Observation, comparison: str, share: float) -> Observation:
    """The request as it would score with this share of the control's damage, as the alarm reads it."""
    now, damaged = seen.scores[comparison], seen.scores[CONTROL]
    total = (1.0 - share) * (now.mean_abs_delta or 0.0) + share * (damaged.mean_abs_delta or 0.0)
    score: RequestScore = replace(now, sum_abs_delta=total * now.tokens, collapse="")
    return Observation(seen.weight, seen.stratum, {comparison: score})


def _alarms(stream: Sequence[Observation], test: AlarmTest) -> bool:
    state = begin(test)
    for seen in stream:
        state = update(state, seen)
        if state.status is Status.REGRESSION:
            return True
    return False
