"""Which arithmetic explains a decode: a finding in figures."""

from __future__ import annotations

import random

import pytest

from kvguard.reference.models import EXACT
from kvguard.shadow.fidelity import NEITHER, UNTESTED, candidates, choice_named, judge_fidelity
from kvguard.shadow.models import Observation
from shadow_streams import BASE, scored

LABELS = [choice.label for choice in candidates("fp8_e4m3")]


def observations(
    means: dict[str, float], requests: int = 12, spread: float = 0.1, dtype: str = "fp8_e4m3"
) -> list[Observation]:
    """Requests with these means by label, 0.13 for the dtype's other candidates, each request a little off."""
    dice = random.Random(3)
    table = {choice.label: 0.13 for choice in candidates(dtype)} | means
    return [
        Observation(1.0, BASE, {label: scored(mean * dice.uniform(1 - spread, 1 + spread)) for label, mean in table.items()})
        for _ in range(requests)
    ]


def test_candidates_are_the_exact_pass_and_the_dtypes_own() -> None:
    assert LABELS == [
        "16bit",
        "fp8_e4m3 nearest",
        "fp8_e4m3 nearest, query",
        "fp8_e4m3 nearest, softmax",
        "fp8_e4m3 truncate",
        "fp8_e4m3 truncate, query",
        "fp8_e4m3 truncate, softmax",
    ]
    assert candidates("fp8_e5m2")[1].format == "fp8_e5m2"
    assert [choice.label for choice in candidates("bfloat16")] == ["16bit", "fp8_e4m3 nearest", "fp8_e4m3 truncate"]
    assert len(set(LABELS)) == len(LABELS)
    chosen = choice_named("fp8_e4m3 truncate, query", "fp8_e4m3")
    assert (chosen.rounding, chosen.query, chosen.probabilities) == ("truncate", True, False)


@pytest.mark.parametrize("label", LABELS[1:])
def test_the_pass_that_leaves_least_explains_a_quantized_engine(label: str) -> None:
    found = judge_fidelity(observations({EXACT.label: 0.11, label: 0.03}), "fp8_e4m3")
    assert (found.explained_by, found.known, found.requests) == (label, True, 12)
    assert found.residuals[label] == pytest.approx(0.03, rel=0.1)
    assert label in found.reason


def test_the_exact_pass_explains_a_sixteen_bit_engine() -> None:
    found = judge_fidelity(observations({EXACT.label: 0.02}, dtype="bfloat16"), "bfloat16")
    assert (found.explained_by, found.known) == ("16bit", True)


@pytest.mark.parametrize(
    ("means", "dtype", "spread"),
    [
        ({EXACT.label: 0.11, "fp8_e4m3 truncate": 0.09}, "fp8_e4m3", 0.1),  # better, and not by enough
        ({EXACT.label: 0.02}, "fp8_e4m3", 0.1),  # a cache that is said to be quantized and does not look it
        ({EXACT.label: 0.11, "fp8_e4m3 nearest": 0.03}, "bfloat16", 0.1),  # and the other way round
        ({EXACT.label: 0.12}, "bfloat16", 0.1),  # no better than a quantized cache would be: not a reference
        ({}, "fp8_e4m3", 0.1),
    ],
)
def test_what_explains_nothing_is_said_in_figures(means: dict[str, float], dtype: str, spread: float) -> None:
    found = judge_fidelity(observations(means, spread=spread, dtype=dtype), dtype)
    assert (found.explained_by, found.known) == (NEITHER, False)
    assert found.reason.startswith(f"nothing explains a {dtype} cache; mean |Δ logprob|: ")
    assert set(found.residuals) == {choice.label for choice in candidates(dtype)}


def test_a_difference_carried_by_one_request_is_not_significant() -> None:
    seen = observations({EXACT.label: 0.03, "fp8_e4m3 nearest": 0.03}, spread=0.01)
    odd = Observation(1.0, BASE, {**seen[0].scores, EXACT.label: scored(2.0)})
    found = judge_fidelity([odd, *seen[1:]], "fp8_e4m3")
    assert found.residuals["fp8_e4m3 nearest"] < 0.7 * found.residuals[EXACT.label]
    assert found.explained_by == NEITHER


@pytest.mark.parametrize("requests", [0, 1])
def test_too_few_requests(requests: int) -> None:
    found = judge_fidelity(observations({"fp8_e4m3 nearest": 0.01}, requests), "fp8_e4m3")
    assert (found.explained_by, found.requests, found.reason) == (NEITHER, requests, "too few requests were scored")


def test_the_exact_pass_alone_compares_with_nothing() -> None:
    seen = [Observation(1.0, BASE, {EXACT.label: scored(0.1)})] * 5
    found = judge_fidelity(seen, "fp8_e4m3")
    assert (found.explained_by, found.reason) == (UNTESTED, "the reference has no fake-quantized passes to compare with")


def test_requests_without_a_scored_token_count_for_nothing() -> None:
    empty = Observation(1.0, BASE, {label: scored(1.0, tokens=0) for label in LABELS})
    found = judge_fidelity([empty, *observations({EXACT.label: 0.11, "fp8_e4m3 nearest": 0.03})], "fp8_e4m3")
    assert found.explained_by == "fp8_e4m3 nearest"
    assert judge_fidelity([empty, empty], "fp8_e4m3").residuals == {}
