"""Quantiles of Student's t and of the beta distribution, with the standard library's mathematics alone.

Both come from the regularized incomplete beta function: its continued fraction by the modified Lentz method (Press et
al., Numerical Recipes, §6.4), inverted by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_TINY = 1e-300


def beta_cdf(x: float, a: float, b: float) -> float:
    """P(X ≤ x) for X ~ Beta(a, b), a and b positive."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _continued_fraction(x, a, b) / a
    return 1.0 - front * _continued_fraction(1.0 - x, b, a) / b


def beta_quantile(probability: float, a: float, b: float) -> float:
    """The x with `beta_cdf(x, a, b) == probability`, to about 1e-12."""
    return _bisect(lambda x: beta_cdf(x, a, b), probability, 0.0, 1.0)


def t_quantile(probability: float, df: float) -> float:
    """Student's t quantile for 0 < probability < 1; `df` is positive and need not be whole."""
    if probability < 0.5:
        return -t_quantile(1.0 - probability, df)
    # With t² = df·(1 − x)/x, the two tails beyond ±t hold beta_cdf(x, df/2, 1/2).
    x = _bisect(lambda x: beta_cdf(x, df / 2.0, 0.5), 2.0 * (1.0 - probability), 0.0, 1.0)
    return math.sqrt(df * (1.0 - x) / max(x, _TINY))


def _bisect(rising: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if rising(middle) < target:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _continued_fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, _reciprocal(1.0 - (a + b) * x / (a + 1.0))
    result = d
    # It converges in O(sqrt(max(a, b))) turns; the bound serves a and b up to about a million.
    for m in range(1, 5000):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        step = 1.0
        for term in (even, odd):
            d = _reciprocal(1.0 + term * d)
            c = 1.0 + term / c
            c = c if abs(c) > _TINY else _TINY
            step = c * d
            result *= step
        if abs(step - 1.0) < 1e-15:
            break
    return result


def _reciprocal(value: float) -> float:
    return 1.0 / (value if abs(value) > _TINY else _TINY)
