"""Scores of one request, against full distributions that the scorer sees only the top of."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.shadow.models import Decode, Pass
from kvguard.shadow.scoring import between, collapse, divergence, score
from kvguard.vocabulary import UsageError

SLACK = 1e-9


@st.composite
def two_distributions(draw: st.DrawFn) -> tuple[list[float], list[float], int]:
    """Two distributions over the same vocabulary, some ids far out of the second one's mind, and a k."""
    size = draw(st.integers(2, 30))
    logits = st.lists(st.floats(-12, 12), min_size=size, max_size=size)
    p, q = ([math.exp(x) for x in draw(logits)] for _ in range(2))
    return [x / sum(p) for x in p], [x / sum(q) for x in q], draw(st.integers(1, min(size, 20)))


@given(two_distributions())
def test_the_bracket_holds_the_total_variation_and_the_bound_stays_below_the_divergence(
    case: tuple[list[float], list[float], int],
) -> None:
    p, q, k = case
    ids = sorted(range(len(p)), key=lambda i: -p[i])[:k]
    low, high, kl = divergence([math.log(p[i]) for i in ids], [math.log(q[i]) for i in ids])
    true_tv = 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))
    true_kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert 0 <= low <= true_tv + SLACK
    assert true_tv - SLACK <= high <= 1
    assert 0 <= kl <= true_kl + SLACK
    tail = min(1 - sum(p[i] for i in ids), 1 - sum(q[i] for i in ids))
    assert high - low == pytest.approx(max(tail, 0), abs=1e-9)


@given(two_distributions())
def test_with_every_id_known_both_bounds_are_exact(case: tuple[list[float], list[float], int]) -> None:
    p, q, _ = case
    low, high, kl = divergence([math.log(x) for x in p], [math.log(x) for x in q])
    true_tv = 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))
    assert (low, high) == (pytest.approx(true_tv, abs=1e-9), pytest.approx(true_tv, abs=1e-9))
    assert kl == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), abs=1e-8)


def test_masked_ids_give_finite_figures() -> None:
    low, high, kl = divergence([math.log(0.9), -9999.0], [-math.inf, math.log(0.5)])
    assert low == pytest.approx(0.9)
    assert high == pytest.approx(1.0)
    assert 80 < kl < 100


def test_sums_flips_and_first_flip_of_a_request_by_hand() -> None:
    decode = Decode(
        (1, 2),
        (7, 8, 9),
        (math.log(0.6), math.log(0.3), math.log(0.8)),
        (
            ((7, math.log(0.6)), (5, math.log(0.2))),
            ((6, math.log(0.5)), (8, math.log(0.3))),
            ((9, math.log(0.8)), (5, math.log(0.1))),
        ),
        "length",
    )
    reference = Pass(
        (math.log(0.3), math.log(0.6), math.log(0.8)),
        (7, 8, 5),
        ((math.log(0.3), math.log(0.2)), (math.log(0.4), math.log(0.6)), (math.log(0.8), math.log(0.1))),
        "16bit",
    )
    found = score(decode, reference)
    assert found.tokens == 3
    assert found.sum_delta == pytest.approx(0.0, abs=1e-12)
    assert found.sum_abs_delta == pytest.approx(2 * math.log(2))
    assert found.mean_abs_delta == pytest.approx(2 * math.log(2) / 3)
    assert (found.flips, found.first_flip, found.flip_rate) == (2, 1, pytest.approx(2 / 3))
    assert found.tv_low == pytest.approx(0.3 + 0.3 + 0.0)
    assert found.tv_high == pytest.approx(0.5 * (0.3 + 0.2 + 0.5) + 0.5 * (0.1 + 0.3 + 0.2) + 0.1)
    assert found.kl_low > 0
    assert found.collapse == ""


def steady(ids: tuple[int, ...], logprob: float = -0.5) -> tuple[Decode, Pass]:
    """A decode of these ids and a pass that agrees with it everywhere."""
    decode = Decode((1,), ids, (logprob,) * len(ids), tuple(((i, logprob),) for i in ids), "length")
    return decode, Pass((logprob,) * len(ids), ids, ((logprob,),) * len(ids), "16bit")


def test_a_request_that_never_flips_is_censored() -> None:
    found = score(*steady(tuple(range(40))))
    assert (found.tokens, found.flips, found.first_flip, found.sum_abs_delta) == (40, 0, None, 0.0)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (tuple(range(50)), ""),
        ((), ""),
        ((5,) * 15, ""),
        ((*range(100, 110), *(5,) * 15, 6), ""),
        ((*range(100, 150), *(5,) * 16, 6), "repeated token"),
        ((5, 5, 5, 5, 9) * 5, "repeated token"),
        ((5, 5, 5, 9) * 6, ""),
        ((5, 5, 5, 5, 9) * 4, ""),
    ],
)
def test_repetition_is_a_run_of_16_or_four_fifths_of_24(ids: tuple[int, ...], expected: str) -> None:
    decode, reference = steady(ids)
    assert collapse(decode) == expected
    assert score(decode, reference).collapse == expected


@pytest.mark.parametrize(("bad", "why"), [(math.nan, "nan logprob"), (0.2, "positive logprob"), (math.inf, "positive logprob")])
def test_a_logprob_that_is_none_ends_the_scored_part(bad: float, why: str) -> None:
    decode, reference = steady(tuple(range(10)))
    broken = replace(decode, logprobs=(*decode.logprobs[:4], bad, *decode.logprobs[5:]))
    found = score(broken, reference)
    assert (found.tokens, found.collapse) == (4, why)
    assert math.isfinite(found.sum_delta)
    in_top = replace(decode, top=(((0, bad),), *decode.top[1:]))
    assert (score(in_top, reference).tokens, score(in_top, reference).collapse) == (0, why)
    assert score(in_top, reference).mean_abs_delta is None


def test_rounding_just_above_zero_is_a_logprob() -> None:
    decode, reference = steady(tuple(range(10)), logprob=4e-6)
    assert score(decode, reference).collapse == ""


def test_a_decode_and_a_pass_of_different_tokens_are_refused() -> None:
    decode, reference = steady(tuple(range(5)))
    with pytest.raises(UsageError, match="5 generated tokens but 4 positions in reference logprobs of pass '16bit'"):
        score(decode, replace(reference, logprobs=reference.logprobs[:4]))
    with pytest.raises(UsageError, match="position 2 needs the same top-k ids on both sides"):
        score(decode, replace(reference, at=(*reference.at[:2], (-0.5, -0.5), *reference.at[3:])))
    with pytest.raises(UsageError, match="position 0 needs"):
        score(replace(decode, top=((), *decode.top[1:])), reference)


def test_a_broken_reference_says_nothing_about_the_engine() -> None:
    decode, reference = steady(tuple(range(5)))
    with pytest.raises(UsageError, match="pass '16bit' gives a nan logprob at position 3"):
        score(decode, replace(reference, at=(*reference.at[:3], (math.nan,), reference.at[4])))


def test_one_pass_against_another_on_tokens_of_neither() -> None:
    """0.5 / 0.3 against 0.6 / 0.25 at the two most likely ids; the decode's own numbers do not matter."""
    logs = {value: math.log(value) for value in (0.25, 0.3, 0.5, 0.6)}
    decode = Decode((1,), (7,), (-9.0,), (((7, -9.0), (8, -8.0)),), "length")
    made = Pass((logs[0.5],), (7,), ((logs[0.5], logs[0.3]),), "made")
    exact = Pass((logs[0.6],), (7,), ((logs[0.6], logs[0.25]),), "16bit")
    found = between(decode, made, exact)
    assert found.sum_delta == pytest.approx(logs[0.5] - logs[0.6])
    assert (found.flips, found.tokens) == (0, 1)
    assert found.tv_low == pytest.approx(0.1)
    flipped = between(decode, Pass(made.logprobs, (9,), made.at, "made"), exact)
    assert flipped.flips == 1, "its most likely id was not among the decode's"
