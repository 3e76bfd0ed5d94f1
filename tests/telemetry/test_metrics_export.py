"""What is exported: every documented family, no other, and no figure that is not known."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvguard.evidence.metrics import EngineFigures
from kvguard.guard.gate import Canaries, Status
from kvguard.guard.state import State
from kvguard.telemetry.metrics import FAMILIES, GuardCollector, ProxyMetrics
from kvguard.vocabulary import Check, CheckResult, Confidence, Effective, ScaleState

GAUGES = EngineFigures(
    kv_bytes_total=2**30,
    kv_bytes_used=2**20,
    bytes_per_token=11520.0,
    kv_tokens_total=93184,
    kv_tokens_used=91.0,
    kv_pinned_ratio=0.25,
    running=2.0,
    waiting=1.0,
    limit=8,
    preemptions_total=3.0,
)


def check(name: str, result: CheckResult = CheckResult.PASS) -> Check:
    return Check(name=name, result=result, required="r", found="f", where="w")


FULL = Status(
    state=State.SERVING,
    effective=Effective(
        dtype="fp8_e4m3",
        confidence=Confidence.PROVEN,
        scales=ScaleState.CHECKPOINT,
        attention_backends=("FLASH_ATTN", "CPU_ATTN"),
    ),
    checks=(check("dtype"), check("scales", CheckResult.WARN)),
    last_verified=1_700_000_000.0,
    record_digest="sha256:abc",
    engine_version="0.32.0",
    policy_digest="sha256:def",
    scales_digest="sha256:123",
    canaries=Canaries(answered=2, failed=1, unanswered=False),
    gauges=GAUGES,
)


class Export:
    """One registry with both sources, and its samples by name and labels."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.registry = CollectorRegistry()
        self.proxy = ProxyMetrics(self.registry)
        self.registry.register(GuardCollector(lambda: self.status))

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def families(self) -> dict[str, str]:
        lines = [line.split() for line in self.text().splitlines() if line.startswith("# TYPE ")]
        return {name: kind for _, _, name, kind in lines}

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def series(self) -> int:
        return sum(len(family.samples) for family in text_string_to_metric_families(self.text()))


def a_request(metrics: ProxyMetrics, outcome: str = "ok", status: int = 200, **labels: str) -> None:
    route, method = labels.get("route", "/v1/models"), labels.get("method", "GET")
    metrics.request_started(route)
    metrics.first_byte(route, 0.02)
    metrics.finished(route, method, status, 0.3, outcome)


def test_exported_families_are_the_documented_ones():
    export = Export(FULL)
    a_request(export.proxy)
    documented = {family.name: family.kind for family in FAMILIES}
    assert len(documented) == len(FAMILIES)
    # The text format has no info type: it shows them as gauges.
    assert export.families() == {name: "gauge" if kind == "info" else kind for name, kind in documented.items()}


def test_labels_are_the_documented_ones():
    export = Export(FULL)
    a_request(export.proxy)
    documented = {family.name: set(family.labels) for family in FAMILIES}
    for family in text_string_to_metric_families(export.text()):
        for sample in family.samples:
            base = sample.name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            assert set(sample.labels) - {"le"} == documented[base], sample


def test_figures():
    export = Export(FULL)
    assert export.value(
        "kvguard_effective_info",
        kv_cache_dtype="fp8_e4m3",
        kv_scales="checkpoint",
        confidence="proven",
        attention_backend="FLASH_ATTN,CPU_ATTN",
        engine_version="0.32.0",
        record="sha256:abc",
        policy="sha256:def",
        scales_digest="sha256:123",
    ) == pytest.approx(1)
    assert [export.value("kvguard_confidence", level=level) for level in Confidence] == [
        float(level is Confidence.PROVEN) for level in Confidence
    ]
    assert export.value("kvguard_canary_unanswered") == 0
    assert export.value("kvguard_canary_requests_total", result="answered") == 2
    assert export.value("kvguard_canary_requests_total", result="unanswered") == 1
    assert export.value("kvguard_state", state="serving") == 1
    assert export.value("kvguard_state", state="drifted") == 0
    assert export.value("kvguard_check_status", check="scales", result="warn") == 1
    assert export.value("kvguard_check_status", check="scales", result="pass") is None
    assert export.value("kvguard_last_verified_timestamp_seconds") == 1_700_000_000
    assert export.value("kvguard_kv_cache_capacity_bytes") == 2**30
    assert export.value("kvguard_kv_cache_used_bytes") == 2**20
    assert export.value("kvguard_kv_cache_bytes_per_token") == 11520
    assert export.value("kvguard_kv_cache_capacity_tokens") == 93184
    assert export.value("kvguard_kv_cache_used_tokens") == 91
    assert export.value("kvguard_kv_cache_pinned_ratio") == 0.25
    assert export.value("kvguard_batch_running_requests") == 2
    assert export.value("kvguard_batch_waiting_requests") == 1
    assert export.value("kvguard_batch_limit_requests") == 8
    assert export.value("kvguard_batch_occupancy_ratio") == 0.25
    assert export.value("kvguard_engine_preemptions_total") == 3


def test_what_is_not_known_is_absent():
    export = Export(Status())
    guard = {name for name in export.families() if "_proxy_" not in name}
    assert guard == {
        "kvguard_build_info",
        "kvguard_effective_info",
        "kvguard_confidence",
        "kvguard_state",
        "kvguard_check_status",
    }
    export.status = Status(gauges=EngineFigures(running=3.0))
    assert export.value("kvguard_batch_running_requests") == 3
    assert export.value("kvguard_batch_occupancy_ratio") is None
    export.status = Status(gauges=EngineFigures(running=0.0, limit=8))
    assert export.value("kvguard_batch_occupancy_ratio") == 0


def test_without_a_policy_or_scales_the_labels_say_none():
    export = Export(FULL.model_copy(update={"policy_digest": "", "scales_digest": ""}))
    (labels,) = [s.labels for f in export.registry.collect() for s in f.samples if s.name == "kvguard_effective_info"]
    assert (labels["policy"], labels["scales_digest"]) == ("none", "none")


def test_result_of_a_check_moves():
    export = Export(FULL.model_copy(update={"checks": (check("dtype"),)}))
    assert export.value("kvguard_check_status", check="dtype", result="pass") == 1
    export.status = export.status.model_copy(update={"checks": (check("dtype", CheckResult.FAIL),)})
    assert export.value("kvguard_check_status", check="dtype", result="pass") is None
    assert export.value("kvguard_check_status", check="dtype", result="fail") == 1


def test_requests_are_counted_and_in_flight_returns_to_zero():
    export = Export(FULL)
    export.proxy.request_started("/v1/models")
    assert export.value("kvguard_proxy_in_flight_requests") == 1
    export.proxy.finished("/v1/models", "GET", 499, 0.1, "client_disconnected")
    assert export.value("kvguard_proxy_in_flight_requests") == 0
    assert export.value("kvguard_proxy_client_disconnects_total") == 1
    labels = {"method": "GET", "route": "/v1/models", "status": "499", "outcome": "client_disconnected"}
    assert export.value("kvguard_proxy_requests_total", **labels) == 1
    assert export.value("kvguard_proxy_request_duration_seconds_count") == 1
    assert export.value("kvguard_proxy_time_to_first_byte_seconds_count") == 0


def test_series_stay_under_250_whatever_clients_send():
    export = Export(FULL.model_copy(update={"checks": tuple(check(f"check_{number}") for number in range(200))}))
    total = 0
    for route in (f"/route{number}" for number in range(20)):
        for method in ("GET", "POST", "PUT", "BREW"):
            for status in (200, 307, 400, 404, 413, 499, 500, 502, 503):
                for outcome in ("ok", "client_disconnected", "upstream_error", "refused"):
                    a_request(export.proxy, outcome, status, route=route, method=method)
                    total += 1
    assert export.series() < 250
    families = text_string_to_metric_families(export.text())
    requests = next(family for family in families if family.name.startswith("kvguard_proxy_requests"))
    assert sum(sample.value for sample in requests.samples) == total
