"""What probes may cost: the minute's budget, the forecast of a stall, the pause after a failure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.shadow.budget import LEAST_TOKENS, WINDOW_S, Breaker, Budget, Gaps, PassTimes

moments = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0, 0.7)).map(lambda pair: (round(pair[0], 3), round(pair[1], 3))), max_size=80
)


def started(budget: Budget, steps: Sequence[tuple[float, float]], factor: float = 1.0) -> list[tuple[float, float]]:
    """(start, real cost) of the probes that a budget lets start when one is wanted after each step."""
    now, starts = 0.0, []
    for wait, cost in steps:
        now += wait
        if budget.affords(now, cost):
            budget.spend(now, cost).cost = cost * factor
            starts.append((now, cost * factor))
    return starts


@given(steps=moments, rate=st.sampled_from([0.5, 1.0, 3.0, 12.0]), share=st.sampled_from([0.005, 0.02, 0.1]))
def test_no_window_of_a_minute_holds_more_than_the_budget(steps: list[tuple[float, float]], rate: float, share: float) -> None:
    starts = started(Budget(rate, share), steps)
    window = max(WINDOW_S, WINDOW_S / rate)
    for begin, _ in starts:
        assert sum(begin <= at < begin + window for at, _ in starts) <= max(1, rate)
        assert sum(cost for at, cost in starts if begin <= at < begin + WINDOW_S) <= WINDOW_S * share + 1e-9


@given(steps=moments, factor=st.floats(1, 50))
def test_the_share_holds_in_the_long_run_whatever_probes_really_cost(steps: list[tuple[float, float]], factor: float) -> None:
    share = 0.02
    starts = started(Budget(600, share), steps, factor)
    if starts:
        paid = sum(cost for _, cost in starts[:-1])
        # The last start needed the earlier ones to be paid for, up to one window's allowance and its overrun.
        assert paid <= share * (starts[-1][0] - starts[0][0]) + (factor + 1) * WINDOW_S * share + 1e-9


def test_an_expensive_probe_keeps_others_out_until_it_is_paid_for() -> None:
    budget = Budget(12, 0.02)
    budget.spend(0.0, 0.1).cost = 10.0
    assert not budget.affords(499.0, 0.0)
    assert budget.affords(500.0, 1.2)


def test_before_any_measurement_the_prior_decides() -> None:
    times = PassTimes(0.001, 300)
    assert times.predict(0.0, 500) == pytest.approx(0.5)
    assert times.predict(0.0, 1) == pytest.approx(0.001 * LEAST_TOKENS)


def test_the_first_measurement_replaces_the_prior() -> None:
    times = PassTimes(1.0, 300)
    times.measure(1000, 0.1)
    assert 0.1 < times.predict(0.0, 1000) <= 0.2


def test_longer_than_anything_measured_is_taken_to_grow_with_the_square() -> None:
    times = PassTimes(1.0, 300)
    times.measure(500, 0.1)
    assert times.predict(0.0, 2000) == pytest.approx(16 * times.predict(0.0, 500))


@given(st.lists(st.floats(1e-5, 1e-2), min_size=1, max_size=60))
def test_a_slow_pass_counts_at_once(by_token: list[float]) -> None:
    times = PassTimes(0.001, 300)
    for seconds in by_token:
        times.measure(1000, seconds * 1000)
    assert times.predict(0.0, 1000) >= 0.999 * by_token[-1] * 1000


def test_steady_passes_shrink_the_margin() -> None:
    times = PassTimes(0.001, 300)
    for _ in range(50):
        times.measure(1000, 0.1)
    assert times.predict(0.0, 1000) == pytest.approx(0.1, rel=0.01)


def test_a_forecast_that_refuses_forgets_down_to_the_best_seen() -> None:
    times = PassTimes(0.001, 300)
    times.measure(1000, 0.1)
    times.measure(1000, 5.0)
    assert times.predict(1e6, 1000) == pytest.approx(5.0, rel=0.2)  # age alone forgets nothing
    times.refuse(1000.0, 1000)
    times.refuse(1200.0, 1000)
    assert times.predict(1300.0, 1000) == pytest.approx(0.5 * times.predict(1000.0, 1000))
    assert times.predict(1e6, 1000) == pytest.approx(0.1)
    times.measure(1000, 0.12)
    assert times.predict(1e6, 1000) > 1.0


def test_a_refused_length_learns_whatever_shorter_passes_do() -> None:
    times = PassTimes(0.001, 60)
    times.measure(128, 0.01)
    before = times.predict(0.0, 4096)
    times.refuse(0.0, 4096)
    times.measure(128, 0.01)
    assert times.predict(60.0, 4096) == pytest.approx(before / 2, rel=0.1)
    assert times.predict(1e6, 4096) == pytest.approx(4096 * 0.01 / 128)


def test_a_slow_long_pass_says_nothing_of_short_ones() -> None:
    times = PassTimes(0.001, 60)
    times.measure(128, 0.01)
    times.measure(4096, 20.0)
    assert times.predict(0.0, 128) < 0.02
    assert times.predict(0.0, 4096) >= 20.0
    assert times.predict(0.0, 5000) > times.predict(0.0, 4096)


@given(
    share=st.sampled_from([0.001, 0.01, 0.5]),
    steps=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 64)), max_size=60),
)
def test_no_more_gaps_are_lengthened_than_were_earned_and_one_pass(share: float, steps: list[tuple[int, int]]) -> None:
    gaps, made, lengthened, most = Gaps(share), 0, 0, 0
    gaps.made(0.0)
    for tokens, running in steps:
        made += tokens
        gaps.made(float(made))
        if gaps.affords(running):
            gaps.spend(running)
            lengthened, most = lengthened + running, max(most, running)
    assert lengthened <= share * made + most + 1e-6


def test_where_nothing_runs_no_gap_is_lengthened() -> None:
    gaps = Gaps(0.001)
    assert gaps.affords(0)
    assert not gaps.affords(1), "nothing is known of what the engine makes"
    gaps.made(None)
    gaps.made(500.0)
    assert not gaps.affords(1), "what was made before is not known"
    gaps.made(1500.0)
    assert gaps.affords(8)
    gaps.spend(8)
    assert not gaps.affords(1)
    assert gaps.affords(0)


def test_a_quiet_hour_does_not_pay_for_a_crowded_minute() -> None:
    gaps = Gaps(0.001)
    gaps.made(0.0)
    gaps.made(1e9)
    spent = 0
    while gaps.affords(1):
        gaps.spend(1)
        spent += 1
    assert spent == 32


def test_another_start_of_the_engine_counts_from_anew() -> None:
    gaps = Gaps(0.001)
    gaps.made(1e6)
    gaps.made(10.0)
    assert not gaps.affords(1)
    gaps.made(1010.0)
    assert gaps.affords(1)


def test_the_breaker_opens_for_longer_after_each_failed_trial() -> None:
    breaker = Breaker(10)
    assert not breaker.open(0.0)
    breaker.fail(0.0)
    assert breaker.open(9.9)
    assert not breaker.open(10.0)
    assert breaker.state == "tripped"
    breaker.fail(10.0)
    assert breaker.open(29.9)
    assert not breaker.open(30.0)
    for _ in range(20):
        breaker.fail(0.0)
    assert not breaker.open(640.0)
    breaker.reset()
    assert not breaker.open(0.0)
    assert breaker.state == "closed"
    breaker.fail(0.0)
    assert not breaker.open(10.0)
