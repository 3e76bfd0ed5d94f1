"""Estimates against textbook forms, the bootstrap and repeated sampling; sums that replicas can add up."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from kvguard.shadow.models import COST, UNEXPLAINED, Observation, RequestScore, Stratum, stratum
from kvguard.shadow.statistics import Estimate, Measure, Sums, SumStats, combine, estimate, sums_by_stratum, sums_of

WHOLE = st.integers(0, 1000)
FEW_SUMS = st.lists(st.tuples(WHOLE, WHOLE, st.integers(1, 1000)), max_size=5).map(
    lambda rows: sum((SumStats.of(w, s, n) for w, s, n in rows), SumStats())
)


def request(dice: random.Random, mean: float = 0.1, flip: float = 0.05, hard: float = 0.6) -> RequestScore:
    """One request: tokens of a random number, their level and sign shared, so that they are correlated."""
    tokens = dice.randint(8, 64)
    level = math.exp(dice.gauss(math.log(mean) - hard**2 / 2, hard))
    deltas = [level * dice.expovariate(1) * dice.choice((-1, 1)) for _ in range(tokens)]
    flips = [i for i in range(tokens) if dice.random() < flip * level / mean]
    sums = (sum(deltas), sum(map(abs, deltas)), len(flips), flips[0] if flips else None)
    return RequestScore(tokens, *sums, 0.03 * tokens * level, 0.05 * tokens * level, 0.01 * tokens * level)


def observations(count: int, seed: int = 3) -> list[Observation]:
    dice = random.Random(seed)
    return [Observation(dice.choice((1.0, 5.0, 20.0)), stratum(10, 1), {COST: request(dice)}) for _ in range(count)]


@given(FEW_SUMS, FEW_SUMS, FEW_SUMS)
def test_sums_are_a_commutative_monoid(a: SumStats, b: SumStats, c: SumStats) -> None:
    assert a + (b + c) == (a + b) + c
    assert a + b == b + a
    assert a + SumStats() == a == SumStats() + a


@given(st.lists(st.sampled_from(observations(20)), max_size=12), st.integers(0, 12))
@example([observations(20)[3]] * 9, 4)
@settings(max_examples=40)
def test_a_fleet_estimates_what_one_replica_with_all_its_probes_would(seen: list[Observation], cut: int) -> None:
    parts = [sums_of(seen[:cut], COST), sums_of(seen[cut:], COST)]
    exported = [Sums.model_validate_json(part.model_dump_json()) for part in parts]
    fleet, whole = combine(exported), sums_of(seen, COST)
    assert (fleet.requests, fleet.tokens, fleet.collapsed) == (whole.requests, whole.tokens, whole.collapsed)
    for measure in Measure:
        ours, theirs = fleet.estimate(measure), whole.estimate(measure)
        assert ours.value == (None if theirs.value is None else pytest.approx(theirs.value))
        assert ours.high == (None if theirs.high is None else pytest.approx(theirs.high, rel=1e-5, abs=1e-6))


def test_equal_requests_of_equal_weight_give_the_textbook_interval() -> None:
    dice = random.Random(1)
    values = [dice.gauss(0.1, 0.03) for _ in range(12)]
    found = estimate(combine_values(values))
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert found.value == pytest.approx(np.mean(values))
    assert found.standard_error == pytest.approx(stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def combine_values(values: Sequence[float]) -> SumStats:
    return sum((SumStats.of(2.0, 10 * value, 10) for value in values), SumStats())


@pytest.mark.parametrize("measure", [Measure.SIGNED_DELTA, Measure.ABS_DELTA, Measure.FLIP_RATE, Measure.FIRST_FLIP_HAZARD])
def test_the_standard_error_is_the_bootstraps_over_requests(measure: Measure) -> None:
    seen = observations(150)
    rows = [Sums.of(one.weight, one.scores[COST]).measures[measure] for one in seen]
    ws, wn = np.array([row.ws for row in rows]), np.array([row.wn for row in rows])
    found = sums_of(seen, COST).estimate(measure)
    boot = stats.bootstrap(
        (ws, wn), lambda s, n, axis: s.sum(axis) / n.sum(axis), paired=True, vectorized=True, n_resamples=2000,
        method="percentile", random_state=np.random.default_rng(5),
    )  # fmt: skip
    assert found.value == pytest.approx(ws.sum() / wn.sum())
    assert found.standard_error == pytest.approx(boot.standard_error, rel=0.12)
    naive = math.sqrt(abs(found.value or 0) / sum(one.scores[COST].tokens for one in seen))
    assert measure is not Measure.FLIP_RATE or found.standard_error > 1.3 * naive, "tokens of a request are not independent"


@pytest.mark.parametrize(
    "measure", [Measure.ABS_DELTA, Measure.FLIP_RATE, Measure.FIRST_FLIP_HAZARD, Measure.REQUEST_ABS_DELTA]
)
def test_intervals_of_40_probes_cover_the_truth(measure: Measure) -> None:
    """Long prompts differ more and are probed ten times as often: only weights give the traffic's own mean."""
    dice = random.Random(11)
    traffic = [(0.5, request(dice, 0.3, 0.15)) if i % 10 == 0 else (0.05, request(dice, 0.1, 0.05)) for i in range(6000)]
    truth = sum((Sums.of(1.0, score).measures[measure] for _, score in traffic), SumStats()).ratio
    assert truth is not None
    covered, inside, trials = 0, 0.0, 400
    for _ in range(trials):
        probed = dice.choices(traffic, weights=[rate for rate, _ in traffic], k=40)
        found = estimate(sum((Sums.of(1 / rate, s).measures[measure] for rate, s in probed), SumStats()), measure)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
        inside += found.value or 0.0
    assert covered / trials >= 0.92
    assert inside / trials == pytest.approx(truth, rel=0.05)


def test_unweighted_estimates_would_be_wrong() -> None:
    dice = random.Random(2)
    probed = [Observation(1.0, stratum(9000, 1), {COST: request(dice, 0.4)}) for _ in range(50)]
    probed += [Observation(20.0, stratum(9, 1), {COST: request(dice, 0.1)}) for _ in range(50)]
    weighted = sums_of(probed, COST).estimate(Measure.ABS_DELTA).value
    flat = sums_of([Observation(1.0, one.stratum, one.scores) for one in probed], COST).estimate(Measure.ABS_DELTA).value
    assert weighted == pytest.approx(0.11, abs=0.03)
    assert flat == pytest.approx(0.25, abs=0.06)


def test_no_flip_in_sixty_requests_is_not_zero_flips() -> None:
    quiet = [Observation(1.0, stratum(9, 1), {COST: RequestScore(40, 0.0, 0.1, 0, None, 0.0, 0.1, 0.0)}) for _ in range(60)]
    found = sums_of(quiet, COST).estimate(Measure.FLIP_RATE)
    exact = stats.binomtest(0, 60).proportion_ci(0.95, "exact")
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(exact.high)


def test_one_token_a_request_is_clopper_pearson() -> None:
    rows = [RequestScore(1, 0.0, 0.1, int(i < 7), 0 if i < 7 else None, 0.0, 0.1, 0.0) for i in range(80)]
    found = sums_of([Observation(3.0, stratum(9, 1), {COST: row}) for row in rows], COST).estimate(Measure.FLIP_RATE)
    exact = stats.binomtest(7, 80).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == (pytest.approx(exact.low, rel=0.03), pytest.approx(exact.high, rel=0.03))


def test_requests_that_all_flip_alike_have_an_interval_of_their_number() -> None:
    rows = [Observation(20.0, stratum(9, 1), {COST: RequestScore(37, 0.1, 0.3, 7, 3, 0.0, 0.1, 0.0)}) for _ in range(11)]
    found = sums_of(rows, COST).estimate(Measure.FLIP_RATE)
    assert (found.standard_error, found.value) == (0.0, pytest.approx(7 / 37))
    assert found.low == pytest.approx(stats.beta.ppf(0.025, 11 * 7 / 37, 11 - 11 * 7 / 37 + 1))
    assert found.high == pytest.approx(stats.beta.ppf(0.975, 11 * 7 / 37 + 1, 11 - 11 * 7 / 37))


def test_nearly_equal_requests_have_a_finite_narrow_interval() -> None:
    rows = [RequestScore(10**6, 0.1, 0.3, 10**5 + i % 2, 3, 0.0, 0.1, 0.0) for i in range(50)]
    found = sums_of([Observation(1.0, stratum(9, 1), {COST: row}) for row in rows], COST).estimate(Measure.FLIP_RATE)
    assert found.low == pytest.approx(0.1, rel=0.01)
    assert found.high == pytest.approx(0.1, rel=0.01)


def test_the_hazard_counts_exposure_up_to_the_first_flip_only() -> None:
    rows = [RequestScore(30, 0.0, 1.0, 9, 4, 0.0, 0.0, 0.0), RequestScore(20, 0.0, 1.0, 0, None, 0.0, 0.0, 0.0)]
    found = sums_of([Observation(1.0, stratum(9, 1), {COST: row}) for row in rows], COST)
    assert found.estimate(Measure.FIRST_FLIP_HAZARD).value == pytest.approx(1 / (5 + 20))
    assert found.estimate(Measure.FLIP_RATE).value == pytest.approx(9 / 50)


def test_a_constant_hazard_is_recovered_from_censored_requests() -> None:
    dice = random.Random(8)
    seen = []
    for _ in range(800):
        tokens = dice.randint(4, 64)
        first = next((i for i in range(tokens) if dice.random() < 0.03), None)
        seen.append(
            Observation(
                dice.choice((1.0, 9.0)),
                stratum(9, 1),
                {COST: RequestScore(tokens, 0, 1, int(first is not None), first, 0, 0, 0)},
            )
        )
    found = sums_of(seen, COST).estimate(Measure.FIRST_FLIP_HAZARD)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.03 < found.high
    assert found.high - found.low < 0.01


def test_a_stratum_without_samples_says_so_and_never_zero() -> None:
    seen = [Observation(2.0, stratum(5000, 6), {COST: request(random.Random(1))})] * 3
    table = sums_by_stratum(
        [*seen, Observation(1.0, Stratum("0-256", "1", "french"), {UNEXPLAINED: request(random.Random(1))})], COST
    )
    assert len(table) == 12
    empty = table[Stratum("0-256", "1")]
    assert empty.estimate(Measure.FLIP_RATE) == Estimate(note="no samples")
    assert table[Stratum("4097+", "5+")].requests == 3
    assert Stratum("0-256", "1", "french") in sums_by_stratum(seen, COST, adapters=("", "french"))


def test_one_request_has_a_value_and_no_interval() -> None:
    found = sums_of(observations(1), COST).estimate(Measure.ABS_DELTA)
    assert found.value is not None
    assert (found.low, found.high, found.note) == (None, None, "no interval from one request")


def test_a_request_without_a_scored_token_counts_as_collapsed_only() -> None:
    nothing = RequestScore(0, 0.0, 0.0, 0, None, 0.0, 0.0, 0.0, "nan logprob")
    found = sums_of([Observation(1.0, stratum(9, 1), {COST: nothing})], COST)
    assert (found.requests, found.collapsed, found.tokens) == (1, 1, 0)
    assert found.estimate(Measure.REQUEST_ABS_DELTA).note == "no samples"


def test_effective_sizes() -> None:
    even = sum((SumStats.of(4.0, 1.0, 10) for _ in range(9)), SumStats())
    assert (even.effective_requests, even.effective_clusters) == (pytest.approx(9), pytest.approx(9))
    uneven = SumStats.of(1.0, 1.0, 10) + SumStats.of(3.0, 1.0, 10)
    assert uneven.effective_requests == pytest.approx(16 / 10)
    assert SumStats().effective_requests == 0.0


def test_values_that_cannot_be_negative_have_no_negative_interval() -> None:
    rows = [0.0, 0.0, 0.0, 0.9]
    wide = sum((SumStats.of(1.0, value, 1) for value in rows), SumStats())
    assert estimate(wide, Measure.ABS_DELTA).low == 0.0
    assert (estimate(wide, Measure.SIGNED_DELTA).low or 0.0) < 0.0
    assert estimate(wide, Measure.TV_HIGH).high is not None
    assert (estimate(wide, Measure.TV_HIGH).high or 0.0) <= 1.0
