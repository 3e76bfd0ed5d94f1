"""Paired statistics, against scipy and by simulation."""

from __future__ import annotations

import math
from random import Random

import pytest
from scipy import optimize, stats

from kvguard.compare.power import chance
from kvguard.compare.statistics import (
    Z_LEVEL,
    bootstrap,
    by_item,
    compare,
    holm,
    items_needed,
    items_to_see,
    sign_test,
    smallest_detectable,
    standard_error,
    t_bounds,
    t_test,
    tango,
    weak_is_seen,
)


def losses(lost: int, gained: int, n: int) -> list[float]:
    return [1.0] * lost + [-1.0] * gained + [0.0] * (n - lost - gained)


@pytest.mark.parametrize(("lost", "gained", "n"), [(10, 5, 200), (0, 0, 133), (40, 2, 90), (3, 9, 50), (1, 0, 20), (20, 0, 20)])
def test_tango_inverts_the_score_test(lost: int, gained: int, n: int) -> None:
    """The constrained likelihood is maximized by scipy instead of in closed form; its statistic is z at each bound."""
    low, high = tango(lost, gained, n)
    assert low <= (lost - gained) / n <= high
    for delta, z in ((low, Z_LEVEL), (high, -Z_LEVEL)):
        if abs(delta) > 0.999999:
            continue

        def unlikely(q: float, delta: float = delta) -> float:
            terms = ((lost, q + delta), (gained, q), (n - lost - gained, 1 - 2 * q - delta))
            return -sum(k * math.log(max(p, 1e-300)) for k, p in terms if k)

        span = (max(0.0, -delta) + 1e-12, (1 - delta) / 2 - 1e-12)
        q = optimize.minimize_scalar(unlikely, bounds=span, method="bounded", options={"xatol": 1e-12}).x
        found = (lost - gained - n * delta) / math.sqrt(n * (2 * q + delta * (1 - delta)))
        assert found == pytest.approx(z, abs=2e-3)


def test_no_pair_that_moved_is_no_proof() -> None:
    """Ten identical answers bound a loss under 21 points, not under 2; 133 do."""
    assert tango(0, 0, 10)[1] == pytest.approx(Z_LEVEL**2 / (10 + Z_LEVEL**2))
    assert tango(0, 0, 132)[1] > 0.02 > tango(0, 0, 133)[1]
    assert t_bounds([0.0] * 10)[1] == pytest.approx(tango(0, 0, 10)[1])


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (5, 0), (7, 2), (2, 7), (30, 10)])
def test_sign_test_is_scipys(lost: int, gained: int) -> None:
    moved = lost + gained
    want = stats.binomtest(lost, moved, alternative="greater").pvalue if moved else 1.0
    assert sign_test(lost, gained) == pytest.approx(want)


def test_t_is_scipys() -> None:
    draw = Random(3)
    values = [draw.gauss(0.1, 0.3) for _ in range(25)]
    want = stats.ttest_1samp(values, 0.0, alternative="greater")
    assert t_test(values) == pytest.approx(want.pvalue, abs=1e-9)
    assert t_bounds(values)[0] == pytest.approx(want.confidence_interval(0.95).low)
    assert standard_error(values) == pytest.approx(stats.sem(values))


def test_bootstrap_is_near_scipys_and_the_same_for_a_seed() -> None:
    draw = Random(4)
    values = [draw.choice([0.0, 0.0, 0.25, -0.25, 1.0]) for _ in range(60)]
    ours = bootstrap(values, 1)
    theirs = stats.bootstrap((values,), lambda v, axis: v.mean(axis=axis), confidence_level=0.9, method="percentile", rng=5)
    assert ours == bootstrap(values, 1)
    assert ours[0] == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert ours[1] == pytest.approx(theirs.confidence_interval.high, abs=0.02)


@pytest.mark.parametrize(("p_lost", "p_gained", "n"), [(0.02, 0.0, 200), (0.06, 0.04, 200), (0.12, 0.02, 80)])
def test_tango_holds_its_level(p_lost: float, p_gained: float, n: int) -> None:
    """Of 2,000 simulated tasks whose true loss is p_lost − p_gained, about 5 % have a bound below it."""
    draw = Random(11)
    under = 0
    for _ in range(2000):
        moved = [draw.random() for _ in range(n)]
        lost = sum(value < p_lost for value in moved)
        gained = sum(p_lost <= value < p_lost + p_gained for value in moved)
        under += tango(lost, gained, n)[1] < p_lost - p_gained
    assert under / 2000 <= 0.075


def test_samples_of_an_item_count_once() -> None:
    scores = by_item([("a", 1.0), ("a", 0.0), ("a", 0.0), ("a", 1.0), ("b", 1.0)])
    assert scores == {"a": 0.5, "b": 1.0}
    once = compare({"a": 1.0, "b": 1.0}, scores)
    assert once is not None
    assert (once.items, once.loss, once.lost) == (2, 0.25, 1)
    assert once.method.startswith("Student's t")
    assert once.bootstrap_high is not None
    assert once.high >= once.bootstrap_high


def test_only_items_of_both_are_paired() -> None:
    assert compare({"a": 1.0}, {"b": 1.0}) is None
    found = compare({"a": 1.0, "b": 0.0, "c": 1.0}, {"a": 0.0, "b": 1.0})
    assert found is not None
    assert (found.items, found.lost, found.gained, found.loss) == (2, 1, 1, 0.0)


def test_holm_is_stricter_with_more_tasks() -> None:
    assert holm({"a": 0.04}) == {"a": True}
    assert holm({"a": 0.04, "b": 0.9}) == {"a": False, "b": False}
    assert holm({"c": 0.9, "a": 0.01, "b": 0.02}) == {"c": False, "a": True, "b": True}
    assert holm({"a": 0.03, "b": 0.03, "c": 0.001}) == {"a": False, "b": False, "c": True}
    assert holm({}) == {}


def test_a_weak_arm_thinned_to_the_margin_is_seen_on_enough_items() -> None:
    assert weak_is_seen(losses(150, 0, 150), 0.02).seen
    few = weak_is_seen(losses(20, 0, 20), 0.02)
    assert not few.seen
    assert few.share == pytest.approx(0.02)


def test_a_weak_arm_that_hurts_nothing_shows_that_the_task_cannot_tell() -> None:
    """A task at its floor: nothing can be lost where nothing is right."""
    found = weak_is_seen(losses(0, 0, 5000), 0.02)
    assert not found.seen
    assert "the weak arm itself loses 0.0 points" in found.why
    assert not weak_is_seen([], 0.02).seen
    assert not weak_is_seen(losses(3, 0, 4), 0.9).seen, "a loss under the margin cannot be thinned to it"


def test_the_thinned_weak_arm_is_what_simulation_gives() -> None:
    """Items of the weak arm drawn with the share: mean and variance of the mixture are as computed."""
    full = losses(60, 5, 100)
    found = weak_is_seen(full, 0.1)
    assert found.share is not None
    assert found.low is not None
    draw = Random(2)
    means = [sum(value for value in full if draw.random() < found.share) / 100 for _ in range(4000)]
    assert sum(means) / len(means) == pytest.approx(0.1, abs=0.003)
    spread = (0.1 - found.low) / Z_LEVEL
    # Drawing items of fixed losses varies less than drawing items too, which is what the bound is for.
    assert stats.tstd(means) <= spread
    again = [
        sum(value for value in (draw.choice(full) for _ in range(100)) if draw.random() < found.share) / 100
        for _ in range(4000)
    ]
    assert stats.tstd(again) == pytest.approx(spread, rel=0.05)


def test_items_needed_would_tell() -> None:
    quiet = items_needed(losses(0, 0, 20), 0.02)
    assert quiet is not None
    assert quiet == pytest.approx(133, abs=1)
    noisy = items_needed(losses(5, 5, 100), 0.02)
    assert noisy is not None
    assert chance(noisy, 0.0, 0.1, 0.02, runs=300)[0] == pytest.approx(0.8, abs=0.08)
    assert items_needed(losses(2, 0, 100), 0.02) is None
    assert smallest_detectable(losses(0, 0, 20)) == pytest.approx(tango(0, 0, 20)[1])


def test_overlap_of_two_errors_accepts_a_loss_of_ten_points() -> None:
    """Why it is a column and never the verdict."""
    free, _, overlap = chance(200, 0.10, 0.02, 0.02, runs=300)
    assert free == 0.0
    assert overlap > 0.4


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_the_items_that_a_weak_arm_takes_are_the_fewest_that_show_it(share: float) -> None:
    needed = items_to_see([1.0] * round(100 * share) + [0.0] * round(100 * (1 - share)), 0.02)
    assert needed is not None
    for items, seen in ((8 * needed, True), (needed // 8, False)):
        lost = round(share * items)
        assert weak_is_seen([1.0] * lost + [0.0] * (items - lost), 0.02).seen is seen
    assert items_to_see([0.0] * 50, 0.02) is items_to_see([], 0.02) is None
