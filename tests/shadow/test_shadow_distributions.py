"""Our quantiles against scipy's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvguard.shadow.distributions import beta_cdf, beta_quantile, t_quantile

PROBABILITIES = st.sampled_from([0.005, 0.025, 0.1, 0.4, 0.6, 0.9, 0.975, 0.995, 0.9995])


@given(PROBABILITIES, st.floats(0.5, 1e5))
def test_t_quantile(probability: float, df: float) -> None:
    assert t_quantile(probability, df) == pytest.approx(stats.t.ppf(probability, df), rel=1e-6)


@given(PROBABILITIES, st.floats(0.5, 5e4), st.floats(0.5, 5e4))
def test_beta_quantile(probability: float, a: float, b: float) -> None:
    assert beta_quantile(probability, a, b) == pytest.approx(stats.beta.ppf(probability, a, b), rel=1e-6, abs=1e-9)


@given(st.floats(0, 1), st.floats(0.1, 500), st.floats(0.1, 500))
def test_beta_cdf(x: float, a: float, b: float) -> None:
    assert beta_cdf(x, a, b) == pytest.approx(stats.beta.cdf(x, a, b), rel=1e-7, abs=1e-10)


def test_the_median_of_t_is_zero() -> None:
    assert t_quantile(0.5, 7.0) == pytest.approx(0.0, abs=1e-6)
