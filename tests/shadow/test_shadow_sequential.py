"""The alarm: what it promises is checked exactly for one step, and by streams resampled by request for the whole."""

import math
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import shadow_streams as streams
from kvguard.shadow.models import COST, UNEXPLAINED, Observation, RequestScore
from kvguard.shadow.sequential import RUINED, AlarmState, AlarmTest, Status, Wealth, begin, bet, collapse_of, sighted, update
from kvguard.vocabulary import UsageError
from shadow_streams import BASE, BASELINE, HEALTHY, SAMPLES, TEST, TOLERANCE, scaled, scored, seen

BAD = TEST.bound + 3 * TOLERANCE
DOCS = Path(__file__).parents[2] / "docs/statistics.md"


def after(state: AlarmState, *observations: Observation) -> AlarmState:
    for observation in observations:
        state = update(state, observation)
    return state


@given(
    past=st.lists(st.floats(0, 2), max_size=40),
    means=st.lists(st.floats(0, 2), min_size=2, max_size=4),
    chances=st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
)
def test_under_the_null_hypothesis_wealth_does_not_rise_on_average(
    past: list[float], means: list[float], chances: list[float], weights: list[float]
) -> None:
    """Whatever came before, and however the sampler prefers some requests, if its weights undo that."""
    test = AlarmTest(baseline=0.05, tolerance=0.03, max_weight=20.0, alpha=1e-290)
    outcomes = list(zip(means, weights, chances, strict=False))
    excess = sum(chance * weight * (min(mean, test.cap) - test.bound) for mean, weight, chance in outcomes)
    assume(excess <= 0)
    state = after(begin(test, ""), *(seen(mean, weight=7.0) for mean in past))
    total = sum(chance for _, _, chance in outcomes)
    expected = sum(update(state, seen(mean, weight)).wealth.value * chance / total for mean, weight, chance in outcomes)
    assert expected <= state.wealth.value * (1 + 1e-12)


@given(past=st.lists(st.floats(0, 2), max_size=40), high=st.floats(0.1, 1), chance=st.floats(0.01, 1))
def test_neither_does_the_evidence_for_clearing_while_the_regression_lasts(
    past: list[float], high: float, chance: float
) -> None:
    test = AlarmTest(baseline=0.05, tolerance=0.03, clear_alpha=1e-290)
    assume(chance * high >= test.bound)
    state = after(replace(begin(test, ""), regression="shown"), *(seen(mean) for mean in past))
    expected = sum(update(state, seen(mean)).clearing.value * p for mean, p in ((high, chance), (0.0, 1 - chance)))
    assert expected <= state.clearing.value * (1 + 1e-12)


@given(st.lists(st.floats(-0.08, 0.92), max_size=60))
def test_wealth_stays_positive(payoffs: list[float]) -> None:
    test, wealth = AlarmTest(baseline=0.05, tolerance=0.03), Wealth()
    for payoff in payoffs:
        wealth = bet(wealth, payoff, 0.75 / test.bound, test)
        assert 0 < wealth.value < math.inf


def test_healthy_engines_raise_no_false_alarms() -> None:
    assert max(streams.false_alarms(300, length=300).values()) <= 0.01


@pytest.mark.long
def test_at_most_one_in_a_hundred_of_ten_thousand_healthy_streams_alarms() -> None:
    shares = streams.false_alarms(10_000)
    assert max(shares.values()) <= 0.01
    assert max(shares.values()) <= 2 * TEST.alpha, "the stated α is much smaller, and so must the false alarms be"


def test_the_same_streams_fool_a_t_test_that_is_looked_at_after_every_probe() -> None:
    """So the streams can alarm, and it is the test that does not."""
    dice, fooled = random.Random(4), 0
    values = [one.scores[UNEXPLAINED].mean_abs_delta or 0.0 for one in scaled(TEST.bound)]
    for _ in range(200):
        stream = dice.choices(values, k=300)
        looks = (stream[:end] for end in range(30, 301, 10))
        fooled += any(
            statistics.mean(look) - TEST.bound > 2.0 * statistics.stdev(look) / math.sqrt(len(look)) for look in looks
        )
    assert fooled / 200 > 0.05


HARD, EASY = TEST.bound + 7 * TOLERANCE, TEST.bound - 0.7 * TOLERANCE


def probed(dice: random.Random, count: int, damage: float = 1.0) -> list[Observation]:
    """Traffic with 2 % hard requests (probed always, weight 1) and easy ones (one in twenty, weight 20)."""
    hard, easy = scaled(HARD * damage), [replace(one, weight=20.0) for one in scaled(EASY * damage)]
    return [dice.choice(hard if dice.random() < 0.02 / (0.02 + 0.98 / 20) else easy) for _ in range(count)]


def test_weights_undo_the_sampler() -> None:
    """The mean over all traffic is under the bound; over the probed requests, as they come, it is well above."""
    chance = 0.02 / (0.02 + 0.98 / 20)
    assert TEST.bound - TOLERANCE / 2 > 0.02 * HARD + 0.98 * EASY
    assert chance * HARD + (1 - chance) * EASY > TEST.bound + 1.5 * TOLERANCE
    test, dice = TEST.model_copy(update={"max_weight": 20.0}), random.Random(6)
    healthy = [probed(dice, 400) for _ in range(60)]
    assert not any(streams.first_alarm(stream, test) for stream in healthy)
    flat = [[replace(one, weight=20.0) for one in stream] for stream in healthy]
    assert sum(streams.first_alarm(stream, test) is not None for stream in flat) > 50
    worse = [probed(dice, 400, damage=2.0) for _ in range(60)]
    assert sum(streams.first_alarm(stream, test) is not None for stream in worse) > 55


def test_a_regression_is_found_and_said_in_one_sentence() -> None:
    state = after(begin(TEST, ""), *(seen(BAD) for _ in range(40)))
    assert state.status is Status.REGRESSION
    assert state.reason.startswith(
        f"the mean unexplained |Δ logprob| exceeds {TEST.bound:.4g} "
        f"(baseline {BASELINE:.4g} + tolerance {TOLERANCE:.4g}): evidence "
    )
    assert "after 30 requests" in state.reason


def test_no_mean_alarms_before_thirty_requests() -> None:
    state = after(begin(TEST, ""), *(seen(4.6) for _ in range(29)))
    assert (state.status, state.reason) == (Status.COLLECTING, "29 of at least 30 requests")
    assert state.wealth.value > 1 / TEST.alpha
    assert update(state, seen(4.6)).status is Status.REGRESSION


def test_health_is_no_regression_shown() -> None:
    state = after(begin(TEST, ""), *scaled(BASELINE))
    assert state.status is Status.NO_REGRESSION_SHOWN
    told = re.fullmatch(
        r"evidence (\S+) that the mean unexplained \|Δ logprob\| exceeds (\S+), of 1000 needed, after (\d+) requests",
        state.reason,
    )
    assert told
    assert 0 < float(told[1]) < 1
    assert told.groups()[1:] == (f"{TEST.bound:.4g}", str(len(HEALTHY)))


def test_a_regression_after_long_health_is_found_soon() -> None:
    late = streams.simulate(scaled(TEST.bound + 2 * TOLERANCE), streams=40, length=200, healthy=1500)
    assert late.share(200) == 1.0
    assert 10 < late.median() < 80


def test_an_alarm_clears_only_on_evidence_and_can_be_raised_again() -> None:
    state = after(begin(TEST, ""), *(seen(BAD) for _ in range(40)))
    still = after(state, *(scaled(TEST.bound + TOLERANCE / 2) * 10))
    assert still.status is Status.REGRESSION
    few = after(state, *scaled(BASELINE)[:29])
    assert few.status is Status.REGRESSION
    well = after(state, *(scaled(BASELINE) * 10))
    assert well.status is Status.NO_REGRESSION_SHOWN
    assert well.regression == ""
    assert after(well, *(seen(BAD) for _ in range(80))).status is Status.REGRESSION


def test_clearing_does_not_flutter() -> None:
    """An engine just over the bound alarms at most once and stays so; its state never goes back and forth."""
    dice, requests, changes = random.Random(9), scaled(TEST.bound + TOLERANCE), 0
    state = begin(TEST, "")
    for _ in range(5000):
        was = state.status
        state = update(state, dice.choice(requests))
        changes += was is Status.REGRESSION and state.status is not Status.REGRESSION
    assert (state.status, changes) == (Status.REGRESSION, 0)


def test_blind_until_a_positive_control_was_seen() -> None:
    state = begin(TEST)
    assert (state.status, state.reason) == (Status.BLIND, "no positive control has run yet")
    state = after(state, *scaled(BASELINE))
    assert state.status is Status.BLIND
    assert sighted(state, "").status is Status.NO_REGRESSION_SHOWN
    again = sighted(sighted(state, ""), "positive control: seen in 40% of streams")
    assert (again.status, again.reason) == (Status.BLIND, "positive control: seen in 40% of streams")
    shown = after(again, *(seen(BAD) for _ in range(60)))
    assert shown.status is Status.REGRESSION, "what is shown stays shown"


def cost_and_unexplained(cost: RequestScore, unexplained: RequestScore) -> Observation:
    return Observation(1.0, BASE, {COST: cost, UNEXPLAINED: unexplained})


def test_one_collapse_is_a_regression_even_where_it_is_explained() -> None:
    """Ruined scales, faithfully reproduced by the pass with the same scales: unexplained is small, cost is not."""
    ruined = cost_and_unexplained(scored(4.6, flips=20, collapse="repeated token"), scored(0.03, collapse="repeated token"))
    state = update(begin(TEST), ruined)
    assert (state.status, state.reason) == (Status.REGRESSION, "collapse: repeated token")
    assert after(state, *(scaled(BASELINE) * 20)).regression == ""


def test_a_repetition_that_the_sixteen_bit_pass_follows_was_asked_for() -> None:
    zeros = cost_and_unexplained(scored(0.02, collapse="repeated token"), scored(0.01, collapse="repeated token"))
    assert update(begin(TEST, ""), zeros).status is Status.COLLECTING
    assert update(begin(TEST, ""), seen(0.01, collapse="repeated token")).status is Status.REGRESSION, "nobody to ask"


@pytest.mark.parametrize("kind", ["nan logprob", "positive logprob"])
def test_logprobs_that_are_none_are_a_collapse_at_once(kind: str) -> None:
    nothing = RequestScore(0, 0.0, 0.0, 0, None, 0.0, 0.0, 0.0, kind)
    assert update(begin(TEST, ""), cost_and_unexplained(nothing, nothing)).reason == f"collapse: {kind}"
    only_cost = Observation(1.0, BASE, {COST: nothing})
    assert update(begin(TEST, ""), only_cost).status is Status.REGRESSION


def test_a_request_without_the_tested_comparison_changes_nothing() -> None:
    state = begin(TEST, "")
    assert update(state, Observation(1.0, BASE, {COST: scored(0.3)})) == state


@pytest.mark.parametrize("weight", [0.0, -1.0, 2.0, math.nan])
def test_a_weight_that_the_sampler_cannot_give_is_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="weights must be above 0 and at most max_weight 1, found"):
        update(begin(TEST), seen(0.1, weight))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"baseline": math.nan}, "baseline must be a number ≥ 0, found nan"),
        ({"tolerance": 0.0}, "tolerance must be a number > 0, found 0"),
        ({"cap": 0.05}, rf"cap must be above baseline \+ tolerance = {TEST.bound:g}, found 0\.05"),
        ({"alpha": 1.0}, "alpha must be between 0 and 1, found 1"),
        ({"max_weight": 0.5}, "max_weight must be a number ≥ 1, found 0.5"),
    ],
)
def test_a_test_without_meaning_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        begin(TEST.model_copy(update=wrong))


def test_ruined_scales_that_their_own_pass_explains_are_seen_by_their_cost() -> None:
    ruined = Observation(1.0, BASE, {COST: scored(3.62), UNEXPLAINED: scored(BASELINE)})
    assert update(begin(TEST), ruined).reason == "collapse: cost 3.6 nats by token"
    dear = Observation(1.0, BASE, {COST: scored(RUINED), UNEXPLAINED: scored(BASELINE)})
    assert update(begin(TEST, ""), dear).status is Status.COLLECTING
    assert collapse_of(seen(3.62)) == "", "unexplained is the mean's matter"
    assert collapse_of(cost_and_unexplained(scored(3.62, collapse="nan logprob"), scored(0.0))) == "nan logprob"


def test_measured_ruin_is_seen_within_five_probes() -> None:
    share = statistics.mean(value > RUINED for value in SAMPLES["ruined_cost"])
    assert 1 - (1 - share) ** 5 >= 0.999
    assert streams.simulate(streams.costly("ruined_cost"), streams=2000, length=5).share(5) >= 0.999


@pytest.mark.parametrize("healthy", ["fp8_e4m3_cost", "fp8_e5m2_cost"])
def test_no_measured_request_with_good_scales_is_taken_for_ruined(healthy: str) -> None:
    assert max(SAMPLES[healthy]) < RUINED / 2
    assert not any(collapse_of(one) for one in streams.costly(healthy))
    assert streams.simulate(streams.costly(healthy), streams=50, length=300).share(300) == 0.0


def documented(first: str) -> list[list[float]]:
    """The numbers of the documented table whose header begins with `first`."""
    table = DOCS.read_text().split(f"| {first}", 1)[1].split("\n\n", 1)[0]
    return [[float(cell) for cell in row.strip("| ").split("|")] for row in table.splitlines()[2:]]


def test_the_documented_power_is_what_the_simulation_gives() -> None:
    figures = f"baseline {BASELINE:.3f}, tolerance {TOLERANCE:.3f}, bound {TEST.bound:.3f}, α {TEST.alpha:g}"
    assert figures in DOCS.read_text()
    table = documented("excess")
    assert [row[0] for row in table] == list(streams.EXCESSES)
    for (excess, mean, *shares, median), (simulated, outcome) in zip(table, streams.power(200).items(), strict=True):
        assert excess == simulated
        assert mean == pytest.approx(TEST.bound + excess * TOLERANCE, abs=6e-4)
        assert shares == [pytest.approx(outcome.share(within), abs=0.12) for within in streams.PROBES]
        assert median == pytest.approx(outcome.median(), rel=0.2)


def test_a_short_answer_with_one_unlikely_token_is_no_collapse() -> None:
    short = Observation(1.0, BASE, {COST: scored(RUINED * 2, tokens=7), UNEXPLAINED: scored(BASELINE, tokens=7)})
    assert collapse_of(short) == ""
    longer = Observation(1.0, BASE, {COST: scored(RUINED * 2, tokens=8), UNEXPLAINED: scored(BASELINE, tokens=8)})
    assert collapse_of(longer)
