"""Shadow probes as metrics: the documented families, none that is not known, and few series in all."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvguard.evidence.metrics import EngineFigures
from kvguard.guard.gate import Canaries, Status
from kvguard.shadow.control import Control
from kvguard.shadow.models import COST, PROMPT_STRATA, TURN_STRATA, UNEXPLAINED, Stratum, stratum
from kvguard.shadow.report import ShadowReport
from kvguard.shadow.statistics import Sums
from kvguard.telemetry.metrics import GuardCollector, ProxyMetrics
from kvguard.telemetry.shadow_metrics import SHADOW_FAMILIES, STATES, ShadowCollector
from kvguard.vocabulary import Check, CheckResult, Confidence, Effective, ScaleState
from shadow_reports import REASONS, full_report, sums_of_six
from shadow_streams import scored

STRATA = [Stratum(prompt, turns, adapter) for prompt in PROMPT_STRATA for turns in TURN_STRATA for adapter in ("", "a")]
FULL = full_report(STRATA)


class Export:
    def __init__(self, report: ShadowReport) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ShadowCollector(lambda: report))

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvguard_shadow_{name}", labels)


def samples(text: str) -> dict[str, set[frozenset[str]]]:
    """Label names by sample name."""
    found: dict[str, set[frozenset[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).add(frozenset(sample.labels))
    return found


def test_every_family_is_documented_and_every_documented_one_exported() -> None:
    found = samples(Export(FULL).text())
    assert found == {family.name: {frozenset(family.labels)} for family in SHADOW_FAMILIES}
    types = [line.split()[2:] for line in Export(FULL).text().splitlines() if line.startswith("# TYPE")]
    assert dict(types) == {family.name: family.kind for family in SHADOW_FAMILIES}
    assert all(family.help for family in SHADOW_FAMILIES)


def test_figures() -> None:
    export = Export(FULL)
    assert [state for state in STATES if export.value("state", state=state)] == ["probing"]
    assert export.value("fidelity_info", explained_by="fp8_e4m3 truncate") == 1
    assert (export.value("noise_floor_nats"), export.value("baseline_nats")) == (0.025, 0.03)
    assert export.value("control_power_ratio") == 0.95
    assert export.value("evidence") == 1
    assert export.value("probes_total") == 48
    assert export.value("collapsed_total") == 1
    assert export.value("pass_seconds_total") == 1.5
    assert export.value("stalls_over_budget_total") == 2
    assert export.value("skipped_total", reason="opted_out") == 2
    assert export.value("skipped_total", reason="replay: nan logprob") == 3
    assert export.value("dropped_total", cause="stall") == 2 * len(STRATA)
    cost = export.value("abs_delta_nats", comparison=COST, bound="estimate")
    low, high = (export.value("abs_delta_nats", comparison=COST, bound=bound) for bound in ("low", "high"))
    assert cost == pytest.approx(0.125)
    assert low is not None
    assert high is not None
    assert low < 0.125 < high
    assert export.value("flip_ratio", comparison=UNEXPLAINED, bound="estimate") == pytest.approx(0.5 / 32)
    clusters = 6 * len(STRATA)
    assert export.value("sum", comparison=COST, sum="clusters") == clusters
    assert export.value("sum", comparison=COST, sum="wn") == 4 * clusters
    assert export.value("sum", comparison=COST, sum="ws") == pytest.approx(4 * clusters * 0.125)


def test_strata_are_told_apart_by_length_and_by_turns() -> None:
    cells = {stratum(10, 1): sums_of_six(0.1), stratum(10, 6, "a"): sums_of_six(0.3), stratum(5000, 6): sums_of_six(0.3)}
    export = Export(ShadowReport(state="probing", sums={COST: cells}))

    def value(by: str, stratum: str, bound: str = "estimate", comparison: str = COST) -> float | None:
        labels = {"comparison": comparison, "by": by, "stratum": stratum, "bound": bound}
        return export.value("stratum_abs_delta_nats", **labels)

    assert value("prompt_tokens", "4097+") == pytest.approx(0.325)
    assert value("prompt_tokens", "0-256") == pytest.approx((0.125 + 0.325) / 2)
    assert value("turns", "1") == pytest.approx(0.125)
    assert value("turns", "5+") == pytest.approx(0.325)
    low, high = value("turns", "5+", "low"), value("turns", "5+", "high")
    assert low is not None
    assert high is not None
    assert low < 0.325 < high
    assert value("turns", "2-4") is None
    assert value("turns", "1", comparison=UNEXPLAINED) is None


def test_no_reason_is_lost() -> None:
    export = Export(FULL)
    assert {reason: export.value("skipped_total", reason=reason) for reason in REASONS} == REASONS


def test_off_is_a_state_and_nothing_else() -> None:
    assert samples(Export(ShadowReport()).text()) == {"kvguard_shadow_state": {frozenset({"state"})}}


def test_what_is_not_known_is_absent() -> None:
    found = samples(Export(ShadowReport(state="checking")).text())
    always = ("probes", "collapsed", "pass_seconds", "reference_lost", "stalls_over_budget")
    counters = {f"kvguard_shadow_{name}_total" for name in always}
    assert set(found) == {"kvguard_shadow_state", "kvguard_shadow_reference_up"} | counters


def test_one_request_has_no_interval() -> None:
    one = {COST: {stratum(10, 1): Sums.of(1.0, scored(0.2))}}
    export = Export(ShadowReport(state="probing", sums=one))
    assert export.value("abs_delta_nats", comparison=COST, bound="estimate") == pytest.approx(0.2)
    assert export.value("abs_delta_nats", comparison=COST, bound="low") is None
    assert export.value("abs_delta_nats", comparison=UNEXPLAINED, bound="estimate") is None


def test_a_control_that_was_not_simulated_has_no_power() -> None:
    blind = Control(blind="too few", probes=100, streams=200, target=0.1)
    assert Export(ShadowReport(state="blind", control=blind)).value("control_power_ratio") is None


def test_all_series_of_a_replica_stay_under_250() -> None:
    checks = tuple(Check(name=f"c{n}", result=CheckResult.PASS, required="r", found="f", where="w") for n in range(200))
    gauges = EngineFigures(**dict.fromkeys(EngineFigures.model_fields, 8))
    effective = Effective(dtype="fp8_e4m3", confidence=Confidence.PROVEN, scales=ScaleState.CHECKPOINT)
    canaries = Canaries(answered=1, unanswered=True)
    status = Status(effective=effective, checks=checks, last_verified=1.0, gauges=gauges, canaries=canaries)
    registry = CollectorRegistry()
    proxy = ProxyMetrics(registry)
    registry.register(GuardCollector(lambda: status))
    registry.register(ShadowCollector(lambda: FULL))
    for route in (f"/route{number}" for number in range(20)):
        for method in ("GET", "POST", "BREW"):
            for code in (200, 307, 404, 499, 503):
                for outcome in ("ok", "client_disconnected", "upstream_error", "refused"):
                    proxy.request_started(route)
                    proxy.first_byte(route, 0.1)
                    proxy.finished(route, method, code, 0.2, outcome)
    text = generate_latest(registry).decode()
    assert 200 < sum(len(family.samples) for family in text_string_to_metric_families(text)) < 250
