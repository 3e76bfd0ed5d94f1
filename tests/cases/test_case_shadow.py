"""Cases about measuring quality while serving: what must not be pooled, claimed without a control, or run under load."""

from __future__ import annotations

from random import Random

import pytest

from kvguard.shadow.models import UNEXPLAINED, Observation, RequestScore, Stratum
from kvguard.shadow.sampler import Sampler
from kvguard.shadow.sequential import AlarmTest, Status, begin, update
from kvguard.shadow.settings import Settings
from kvguard.shadow.statistics import Measure, combine, sums_by_stratum, sums_of
from kvguard.shadow.tally import Drop

SHORT, LONG = Stratum("0-256", "1"), Stratum("4097+", "1")


def request(stratum: Stratum, flips: int, tokens: int = 10) -> Observation:
    score = RequestScore(tokens, 0.0, 0.01 * tokens, flips, 0 if flips else None, 0.0, 0.0, 0.0)
    return Observation(1.0, stratum, {UNEXPLAINED: score})


def test_74_long_prompts_are_judged_by_themselves():
    """Nine tokens in ten agree over all requests, and four in ten of the long prompts' do."""
    observations = [request(SHORT, 0) for _ in range(50)] + [request(LONG, 6) for _ in range(8)]
    strata = sums_by_stratum(observations, UNEXPLAINED)
    rates = {stratum.prompt: sums.estimate(Measure.FLIP_RATE).value for stratum, sums in strata.items() if sums.requests}
    assert rates == {"0-256": 0.0, "4097+": pytest.approx(0.6)}
    assert combine(strata.values()).estimate(Measure.FLIP_RATE).value < 0.1


def test_77_without_a_control_nothing_is_concluded():
    """Noise between two equal runs, or a control never seen, leaves the alarm blind: neither good nor bad."""
    state = begin(AlarmTest(baseline=0.05, tolerance=0.05))
    for _ in range(40):
        state = update(state, request(SHORT, 0))
    assert state.status is Status.BLIND
    assert "positive control" in state.reason


def test_95_probes_wait_while_clients_do():
    """Requests wait and were preempted: no probe runs, and each one that is lost is counted by its cause."""
    sampler: Sampler[str] = Sampler(
        Settings(rate=1.0, max_age_s=60), lambda: 0.0, Random(1), batch_tokens=2048, batch_sequences=8
    )
    sampler.offer(SHORT, 100, "probe")
    assert sampler.next(1.0, waiting=12, kv_pinned=0.4, running=3) is None
    assert sampler.next(61.0, waiting=0, kv_pinned=0.4, running=3) is None
    (row,) = sampler.rows()
    assert {cause: count.requests for cause, count in row.dropped.items()} == {Drop.WAITING: 1}
    assert row.coverage == 0.0


def test_87_more_than_a_mean_is_estimated():
    """Equal perplexity hides flips: rates and distances are measures of their own beside the mean difference."""
    observations = [request(SHORT, 5) for _ in range(5)]
    sums = sums_of(observations, UNEXPLAINED)
    assert sums.estimate(Measure.SIGNED_DELTA).value == 0
    assert sums.estimate(Measure.FLIP_RATE).value == pytest.approx(0.5)
