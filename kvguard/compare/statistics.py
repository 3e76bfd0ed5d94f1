"""Paired statistics of two arms over the same items. Pure; a loss is the reference's score minus the arm's, by item.

Scores are between 0 and 1. An item sampled several times counts once, with its mean: items are the clusters. Losses that
are all −1, 0 or 1 (one greedy answer each) get Tango's score interval (Statistics in Medicine 17, 1998), which stays honest
where no or few pairs differ; others Student's t and a bootstrap over items, of which the wider counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

from kvguard.shadow.distributions import t_quantile
from kvguard.vocabulary import Frozen

T = TypeVar("T")

LEVEL = 0.95
"""Confidence of a one-sided bound; the interval of both bounds holds 90 %."""

POWER = 0.8
Z_LEVEL = 1.6448536269514722
Z_POWER = 0.8416212335729143
RESAMPLES = 2000
_LEAST_RESAMPLES, _MOST_DRAWS = 200, 400_000


class Paired(Frozen):
    """The loss of an arm on one task, in shares of 1. `items` is how many pairs, `lost` and `gained` how many moved.

    `low` and `high` are one-sided 95 % bounds; `p_loss` the one-sided p-value of no loss; `smallest` the smallest loss that
    would be shown with 80 % power; `within_two_errors` whether the two means are within two standard errors of their
    difference, taken as independent: the rule of thumb, shown and not used.
    """

    items: int
    reference: float
    arm: float
    reference_error: float | None
    arm_error: float | None
    loss: float
    error: float | None
    low: float
    high: float
    p_loss: float
    lost: int
    gained: int
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    smallest: float | None = None
    within_two_errors: bool | None = None
    method: str


def by_item(scores: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Each item's mean score over its samples."""
    found: dict[str, list[float]] = {}
    for item, value in scores:
        found.setdefault(item, []).append(value)
    return {item: math.fsum(values) / len(values) for item, values in found.items()}


def compare(reference: Mapping[str, float], arm: Mapping[str, float], seed: int = 0) -> Paired | None:
    """The loss over the items that both have; None without any."""
    items = [item for item in reference if item in arm]
    if not items:
        return None
    ours, theirs = [arm[item] for item in items], [reference[item] for item in items]
    losses = [a - b for a, b in zip(theirs, ours, strict=True)]
    n, loss = len(losses), mean(losses)
    error = standard_error(losses)
    lost, gained = sum(value > 0 for value in losses), sum(value < 0 for value in losses)
    boot = bootstrap(losses, seed) if n > 1 else None
    if _whole(losses):
        low, high = tango(lost, gained, n)
        method = "Tango's score interval, exact sign test"
    else:
        low, high = t_bounds(losses)
        if boot is not None:
            low, high = min(low, boot[0]), max(high, boot[1])
        method = "Student's t and a bootstrap over items, the wider"
    errors = standard_error(theirs), standard_error(ours)
    together = math.hypot(errors[0], errors[1]) if errors[0] is not None and errors[1] is not None else None
    return Paired(
        items=n,
        reference=mean(theirs),
        arm=mean(ours),
        reference_error=errors[0],
        arm_error=errors[1],
        loss=loss,
        error=error,
        low=low,
        high=high,
        p_loss=p_value(losses),
        lost=lost,
        gained=gained,
        bootstrap_low=boot[0] if boot else None,
        bootstrap_high=boot[1] if boot else None,
        smallest=smallest_detectable(losses),
        within_two_errors=None if together is None else abs(loss) <= 2.0 * together,
        method=method,
    )


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None below two values."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values))


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of them do not exceed; None where so few values have no such tail."""
    if not values or len(values) * (1.0 - share) < 1.0 - 1e-9:
        return None
    return sorted(values)[math.ceil(share * len(values)) - 1]


def wilson(right: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, `right` of `n`: five of five are consistent with 57 %."""
    z = 1.959963984540054
    middle, share = 1.0 + z * z / n, right / n
    half = z * math.sqrt(share * (1.0 - share) / n + z * z / (4.0 * n * n)) / middle
    centre = (share + z * z / (2.0 * n)) / middle
    return max(0.0, centre - half), min(1.0, centre + half)


def tango(lost: int, gained: int, n: int, z: float = Z_LEVEL) -> tuple[float, float]:
    """Both one-sided bounds of the difference of paired proportions (lost − gained) ÷ n, by inverting the score test."""
    return -_tango_high(gained, lost, n, z), _tango_high(lost, gained, n, z)


def _tango_high(lost: int, gained: int, n: int, z: float) -> float:
    low, high = (lost - gained) / n, 1.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        if _score(lost, gained, n, middle) < -z:
            high = middle
        else:
            low = middle
    return high


def _score(lost: int, gained: int, n: int, delta: float) -> float:
    """The score statistic of a true difference `delta`; q is the constrained estimate of the share that gains."""
    a, b, c = 2.0 * n, -lost - gained + (2.0 * n - lost + gained) * delta, -gained * delta * (1.0 - delta)
    q = (math.sqrt(max(b * b - 4.0 * a * c, 0.0)) - b) / (2.0 * a)
    variance = n * (2.0 * q + delta * (1.0 - delta))
    distance = lost - gained - n * delta
    if variance <= 0.0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def sign_test(lost: int, gained: int) -> float:
    """One-sided exact p-value of no loss: the chance of at least `lost` of all that moved, each way being as likely."""
    moved = lost + gained
    return sum(math.comb(moved, k) for k in range(lost, moved + 1)) / 2**moved if moved else 1.0


def p_value(losses: Sequence[float]) -> float:
    """One-sided p-value of no loss, by the test that fits these losses."""
    return sign_test(*_moved(losses)) if _whole(losses) else t_test(losses)


def t_bounds(values: Sequence[float]) -> tuple[float, float]:
    """One-sided 95 % bounds of a mean. Without variation, or with one value, as wide as that many unmoved pairs allow."""
    n, error, middle = len(values), standard_error(values), mean(values)
    if not error:
        wide = Z_LEVEL**2 / (n + Z_LEVEL**2)
        return max(-1.0, middle - wide), min(1.0, middle + wide)
    half = t_quantile(LEVEL, n - 1) * error
    return max(-1.0, middle - half), min(1.0, middle + half)


def t_test(values: Sequence[float]) -> float:
    """One-sided p-value of a mean of at most 0, by inverting Student's t."""
    error = standard_error(values)
    if not error:
        return 1.0
    statistic, df = mean(values) / error, len(values) - 1
    low, high = 1e-12, 1.0 - 1e-12
    for _ in range(60):
        middle = 0.5 * (low + high)
        if t_quantile(middle, df) < statistic:
            low = middle
        else:
            high = middle
    return 1.0 - 0.5 * (low + high)


def bootstrap(values: Sequence[float], seed: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """One-sided 95 % bounds of the mean from resampled items: the 5th and 95th percentile."""
    n = len(values)
    draw = Random(seed).random  # noqa: S311 (its sequence is the same on every version of Python, and nothing here is secret)
    turns = max(_LEAST_RESAMPLES, min(resamples, _MOST_DRAWS // n))
    means = sorted(math.fsum(values[int(draw() * n)] for _ in range(n)) / n for _ in range(turns))
    last = len(means) - 1
    return means[round((1.0 - LEVEL) * last)], means[round(LEVEL * last)]


def smallest_detectable(losses: Sequence[float]) -> float:
    """The smallest true loss that such pairs would show with 80 % power, at least what no moved pair at all allows."""
    n, error = len(losses), standard_error(losses)
    floor = Z_LEVEL**2 / (n + Z_LEVEL**2)
    return min(1.0, max(floor, (Z_LEVEL + Z_POWER) * (error or 0.0)))


def items_needed(losses: Sequence[float], margin: float) -> int | None:
    """How many items would tell, with 80 % power, given how these pairs vary.

    For a loss below the margin: to bound it under the margin were it as seen (at least 0); above it: to show it. None where
    the seen loss is the margin itself, which no number tells.
    """
    seen = max(mean(losses), 0.0) if losses else 0.0
    variance = (standard_error(losses) or 0.0) ** 2 * len(losses)
    distance = margin - seen if seen < margin else seen
    if abs(margin - seen) < 1e-9:
        return None
    by_variance = (Z_LEVEL + Z_POWER) ** 2 * variance / distance**2
    unmoved = Z_LEVEL**2 * (1.0 - margin) / margin
    return math.ceil(max(by_variance, unmoved))


def items_to_see(losses: Sequence[float], margin: float) -> int | None:
    """How many items a weak arm that loses like this would take to be seen, thinned to the margin as in `weak_is_seen`.

    None where it does not lose more than the margin: then more items show no more.
    """
    loss = mean(losses) if losses else 0.0
    if loss <= margin:
        return None
    variance = margin / loss * mean([value * value for value in losses]) - margin**2
    return math.floor(Z_LEVEL**2 * max(variance, 0.0) / margin**2) + 1


class Seen(Frozen):
    """Whether a loss of exactly the margin would be seen, from the weak arm: `share` of its items, the rest unharmed."""

    seen: bool
    share: float | None
    low: float | None
    why: str


def weak_is_seen(losses: Sequence[float], margin: float) -> Seen:
    """The weak arm, thinned to the margin: each item is its with a chance that makes the expected loss the margin.

    Mean and variance of that mixture follow from the weak arm's losses, so nothing is drawn. It is seen when its one-sided
    95 % lower bound is above 0, and the weak arm's own loss is shown.
    """
    if not losses:
        return Seen(seen=False, share=None, low=None, why="the weak arm was not run")
    loss, n = mean(losses), len(losses)
    shown_low = tango(*_moved(losses), n)[0] if _whole(losses) else t_bounds(losses)[0]
    if loss <= margin or shown_low <= 0.0:
        why = f"the weak arm itself loses {100 * loss:.1f} points here, which is not above the margin, or not shown"
        return Seen(seen=False, share=None, low=shown_low, why=why)
    share = margin / loss
    variance = share * mean([value * value for value in losses]) - margin**2
    low = margin - Z_LEVEL * math.sqrt(max(variance, 0.0) / n)
    why = f"a loss of the margin on {n} items has the lower bound {100 * low:.1f} points"
    return Seen(seen=low > 0.0, share=share, low=low, why=why)


def holm(p_values: Mapping[T, float], alpha: float = 1.0 - LEVEL) -> dict[T, bool]:
    """Which hypotheses Holm's procedure rejects, so that the chance of any false one is at most `alpha`."""
    ordered = sorted(p_values, key=lambda name: p_values[name])
    rejected: dict[T, bool] = {}
    going = True
    for place, name in enumerate(ordered):
        going = going and p_values[name] <= alpha / (len(ordered) - place)
        rejected[name] = going
    return {name: rejected[name] for name in p_values}


def _whole(losses: Sequence[float]) -> bool:
    return all(value in (-1.0, 0.0, 1.0) for value in losses)


def _moved(losses: Sequence[float]) -> tuple[int, int]:
    return sum(value > 0 for value in losses), sum(value < 0 for value in losses)
