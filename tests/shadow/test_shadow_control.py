"""Controls: a floor that is one, and an alarm that says when it cannot see."""

import statistics
from dataclasses import replace

import pytest

from kvguard.shadow.control import CONTROL, MIN_REQUESTS, Control, noise_floor, positive_control
from kvguard.shadow.models import UNEXPLAINED, Observation
from shadow_streams import BASE, BASELINE, HEALTHY, SAMPLES, TEST, TOLERANCE, scaled, scored, seen


def controlled(control: list[float], healthy: list[float] | None = None) -> list[Observation]:
    pairs = zip(healthy or SAMPLES["fp8_e4m3_unexplained"], control, strict=False)
    return [Observation(1.0, BASE, {UNEXPLAINED: scored(now), CONTROL: scored(then)}) for now, then in pairs]


def test_a_control_of_the_right_size_is_seen() -> None:
    found = positive_control(controlled(SAMPLES["fp8_e4m3_cost"]), TEST, probes=200)
    assert found.blind == ""
    assert found.power is not None
    assert found.power >= 0.8
    assert found.effect == pytest.approx(statistics.mean(SAMPLES["fp8_e4m3_cost"]))
    assert found.target == pytest.approx(BASELINE + 2 * TOLERANCE)


def test_a_large_control_is_shrunk_to_the_tolerance() -> None:
    """Ruined scales are seen in any number of probes; what is asked is whether one tolerance over the bound is."""
    ruined = positive_control(controlled(SAMPLES["ruined_cost"]), TEST, probes=30)
    matched = positive_control(controlled(SAMPLES["fp8_e4m3_cost"]), TEST, probes=30)
    assert ruined.power is not None
    assert matched.power is not None
    assert ruined.power < 0.8
    assert matched.power < 0.8


def test_too_few_probes_are_blind_with_the_power_named() -> None:
    found = positive_control(controlled(SAMPLES["fp8_e4m3_cost"]), TEST, probes=30)
    assert found.power is not None
    assert found.blind == f"positive control: seen in {found.power:.0%} of streams of 30 requests, 80% needed"


def test_noise_that_hides_the_tolerance_is_blind() -> None:
    """The same means, tolerance and control, seen where requests are alike and not where they vary wildly."""
    test = TEST.model_copy(update={"tolerance": TOLERANCE / 2})

    def power(healthy: list[float]) -> Control:
        return positive_control(controlled([one + 1.25 * TOLERANCE for one in healthy], healthy), test, probes=100)

    assert power([5 * BASELINE, 0.0, 0.0, 0.0, 0.0] * 8).blind.startswith("positive control: seen in ")
    assert power(HEALTHY).blind == ""


def test_a_control_that_is_too_weak_is_blind() -> None:
    found = positive_control(controlled(SAMPLES["fp8_e4m3_unexplained"]), TEST)
    assert found.power is None
    assert found.blind == (
        f"positive control: it reaches {BASELINE:.4g}, below the {TEST.bound + TOLERANCE:.4g} that the alarm is asked to see"
    )


def test_few_requests_or_none_with_a_control_are_blind() -> None:
    few = controlled(SAMPLES["fp8_e4m3_cost"])[: MIN_REQUESTS - 1]
    assert positive_control(few, TEST).blind == "positive control: 7 usable requests, 8 needed"
    assert positive_control(scaled(BASELINE), TEST).blind == "positive control: 0 usable requests, 8 needed"


def test_the_same_seed_gives_the_same_answer() -> None:
    requests = controlled(SAMPLES["fp8_e4m3_cost"])
    assert positive_control(requests, TEST, probes=50) == positive_control(requests, TEST, probes=50)
    assert positive_control(requests, TEST, probes=50, seed=1).power != positive_control(requests, TEST, probes=50).power


def test_a_collapse_in_the_control_requests_is_not_what_is_seen() -> None:
    requests = [
        replace(one, scores={key: replace(score, collapse="repeated token") for key, score in one.scores.items()})
        for one in controlled(SAMPLES["fp8_e4m3_cost"])
    ]
    assert positive_control(requests, TEST, probes=30) == positive_control(
        controlled(SAMPLES["fp8_e4m3_cost"]), TEST, probes=30
    )


def test_the_noise_floor_is_the_mean_over_requests_with_its_interval() -> None:
    floor = noise_floor([seen(value) for value in SAMPLES["aa"]], UNEXPLAINED)
    mean = statistics.mean(SAMPLES["aa"])
    assert floor.value == pytest.approx(mean)
    assert floor.low is not None
    assert floor.high is not None
    assert floor.low < mean < floor.high


def test_a_thing_compared_with_itself_is_no_floor() -> None:
    floor = noise_floor([seen(0.0)] * 40, UNEXPLAINED)
    assert floor.value is None
    assert "no noise floor" in floor.note
    assert noise_floor([], UNEXPLAINED).note == "no samples"
