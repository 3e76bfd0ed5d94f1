"""Prometheus metrics: the proxy's own, counted as requests pass, and the guard's, read from its status at each scrape.

A figure that the engine does not give is absent, never 0. `FAMILIES` lists every family there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import kvguard
from kvguard.guard.drift import FIELDS
from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.telemetry.families import Family
from kvguard.telemetry.pulse import Pulse
from kvguard.vocabulary import Confidence

_PROXY = (
    Family(
        "kvguard_proxy_requests_total",
        "counter",
        "Requests by method, known route, status (499: the client left before an answer) and outcome.",
        ("method", "route", "status", "outcome"),
    ),
    Family(
        "kvguard_proxy_request_duration_seconds",
        "histogram",
        "Seconds from a request's headers to the end of its response.",
    ),
    Family(
        "kvguard_proxy_time_to_first_byte_seconds",
        "histogram",
        "Seconds from a request's headers to the first byte of the engine's response body.",
    ),
    Family("kvguard_proxy_in_flight_requests", "gauge", "Requests in flight."),
    Family("kvguard_proxy_client_disconnects_total", "counter", "Requests whose client left before the end."),
    Family(
        "kvguard_proxy_delay_seconds",
        "summary",
        "How late kvguard's data plane gets to what is due, measured four times a second while requests are in flight.",
    ),
    Family("kvguard_proxy_cpu_seconds_total", "counter", "CPU seconds of the data plane's thread."),
)

_GUARD = (
    Family("kvguard_build_info", "info", "The version of kvguard.", ("version",)),
    Family(
        "kvguard_effective_info",
        "info",
        "The KV cache this engine really runs, with how well that is supported.",
        (
            "kv_cache_dtype",
            "kv_scales",
            "confidence",
            "attention_backend",
            "engine_version",
            "record",
            "policy",
            "scales_digest",
        ),
    ),
    Family("kvguard_confidence", "gauge", "1 for how well the effective KV dtype is supported, 0 for the others.", ("level",)),
    Family("kvguard_state", "gauge", "1 for the state the guard is in, 0 for the others.", ("state",)),
    Family("kvguard_check_status", "gauge", "1 for the current result of each policy check.", ("check", "result")),
    Family(
        "kvguard_last_verified_timestamp_seconds",
        "gauge",
        "Unix time of the last verification that confirmed or changed the verdict.",
    ),
    Family("kvguard_verification_stale", "gauge", "1 while the last verification could not confirm the verdict, which stands."),
    Family("kvguard_drift_total", "counter", "Times that a field began to differ from what was established.", ("field",)),
    Family(
        "kvguard_canary_unanswered",
        "gauge",
        "1 while the last canary, sent after five minutes without a token, got none; 0 since one came. Absent before.",
    ),
    Family("kvguard_canary_requests_total", "counter", "Canaries sent to a silent engine, by what came of them.", ("result",)),
    Family("kvguard_kv_cache_capacity_bytes", "gauge", "Bytes of KV cache of this replica."),
    Family("kvguard_kv_cache_used_bytes", "gauge", "Bytes of KV cache that running requests hold."),
    Family("kvguard_kv_cache_bytes_per_token", "gauge", "Bytes of KV cache a token takes, over all layers."),
    Family("kvguard_kv_cache_capacity_tokens", "gauge", "Tokens the KV cache holds."),
    Family("kvguard_kv_cache_used_tokens", "gauge", "Tokens of KV cache that running requests hold."),
    Family(
        "kvguard_kv_cache_pinned_ratio",
        "gauge",
        "Share of KV blocks that running requests hold; evictable prefix blocks count as free.",
    ),
    Family("kvguard_batch_running_requests", "gauge", "Requests in the engine's batch."),
    Family("kvguard_batch_waiting_requests", "gauge", "Requests that wait for the engine's batch."),
    Family("kvguard_batch_limit_requests", "gauge", "Most requests the engine's batch takes (max_num_seqs)."),
    Family("kvguard_batch_occupancy_ratio", "gauge", "Running requests divided by the limit."),
    Family("kvguard_engine_preemptions_total", "counter", "The engine's own count of preempted requests."),
)

FAMILIES: tuple[Family, ...] = _PROXY + _GUARD
"""Every family kvguard exports."""

_BY_NAME = {family.name: family for family in FAMILIES}

_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

# The whole replica stays under 250 series: at most 32 of requests, 30 of histograms, 20 of checks, 124 of shadow probes.
_MAX_REQUEST_SERIES = 16
_MAX_CHECKS = 20
_METHODS = frozenset({"GET", "POST"})


class ProxyMetrics:
    """The forwarder's observer. One for each process, registered in its one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # A `_created` series for each counter and histogram would double them. (The function has no annotations.)
        disable_created_metrics()  # type: ignore[no-untyped-call]
        requests, duration, first_byte, in_flight, disconnects, delay, cpu = _PROXY
        self._requests = Counter(requests.name, requests.help, requests.labels, registry=registry)
        self._duration = Histogram(duration.name, duration.help, buckets=_DURATION_BUCKETS, registry=registry)
        self._first_byte = Histogram(first_byte.name, first_byte.help, buckets=_FIRST_BYTE_BUCKETS, registry=registry)
        self._in_flight = Gauge(in_flight.name, in_flight.help, registry=registry)
        self._disconnects = Counter(disconnects.name, disconnects.help, registry=registry)
        self._pulse = Pulse(Summary(delay.name, delay.help, registry=registry), Counter(cpu.name, cpu.help, registry=registry))
        self._children: dict[tuple[str, str, int, str], Counter] = {}

    def request_started(self, route: str) -> None:  # noqa: ARG002 - the observer's signature
        """A request arrived."""
        self._in_flight.inc()
        self._pulse.request_started()

    def first_byte(self, route: str, seconds: float) -> None:  # noqa: ARG002
        """The first byte of the engine's body left for the client."""
        self._first_byte.observe(seconds)

    def finished(self, route: str, method: str, status: int, seconds: float, outcome: str) -> None:
        """The request ended."""
        self._in_flight.dec()
        self._pulse.request_ended()
        self._duration.observe(seconds)
        self._request_counter(route, method, status, outcome).inc()
        if outcome == "client_disconnected":
            self._disconnects.inc()

    def _request_counter(self, route: str, method: str, status: int, outcome: str) -> Counter:
        key = (method, route, status, outcome)
        child = self._children.get(key)
        if child is None:
            child = self._requests.labels(*self._bounded(*key))
            if len(self._children) < _MAX_REQUEST_SERIES:
                self._children[key] = child
        return child

    def _bounded(self, method: str, route: str, status: int, outcome: str) -> tuple[str, str, str, str]:
        """Labels of their own for the first combinations seen, coarse ones (at most 20 series) for the rest."""
        if len(self._children) < _MAX_REQUEST_SERIES:
            return method if method in _METHODS else "other", route, str(status), outcome
        return "other", "other", f"{status // 100}xx", outcome


class GuardCollector(Collector):
    """Reads the status at each scrape. Register it in the process's registry."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """The families, without samples, so that the registry can refuse duplicates without a status."""
        return [_metric(family.name) for family in _GUARD]

    def collect(self) -> Iterator[Metric]:
        """One sample or more for each figure that is known."""
        status = self._status()
        build = _metric("kvguard_build_info")
        build.add_sample("kvguard_build_info", {"version": kvguard.__version__}, 1)
        yield build
        yield _effective(status)
        yield _confidence(status)
        yield _state(status)
        yield _checks(status)
        yield from _drift(status)
        yield from _canaries(status)
        yield from _figures(status)


def _metric(name: str) -> Metric:
    family = _BY_NAME[name]
    match family.kind:
        case "counter":
            return CounterMetricFamily(name.removesuffix("_total"), family.help, labels=family.labels)
        case "info":
            return InfoMetricFamily(name.removesuffix("_info"), family.help, labels=family.labels)
        case _:
            return GaugeMetricFamily(name, family.help, labels=family.labels)


def _effective(status: Status) -> Metric:
    effective = status.effective
    metric = _metric("kvguard_effective_info")
    labels = {
        "kv_cache_dtype": effective.dtype,
        "kv_scales": effective.scales.value,
        "confidence": effective.confidence.value,
        "attention_backend": ",".join(effective.attention_backends) or "unknown",
        "engine_version": status.engine_version or "unknown",
        "record": status.record_digest or "unknown",
        "policy": status.policy_digest or "none",
        "scales_digest": status.scales_digest or "none",
    }
    metric.add_sample("kvguard_effective_info", labels, 1)
    return metric


def _confidence(status: Status) -> Metric:
    metric = _metric("kvguard_confidence")
    for level in Confidence:
        metric.add_sample(metric.name, {"level": level.value}, int(level is status.effective.confidence))
    return metric


def _state(status: Status) -> Metric:
    metric = _metric("kvguard_state")
    for state in State:
        metric.add_sample("kvguard_state", {"state": state.value}, int(state is status.state))
    return metric


def _checks(status: Status) -> Metric:
    metric = _metric("kvguard_check_status")
    current = {check.name: check.result.value for check in status.checks[:_MAX_CHECKS]}
    for name, result in current.items():
        metric.add_sample("kvguard_check_status", {"check": name, "result": result}, 1)
    return metric


def _drift(status: Status) -> Iterator[Metric]:
    """From the first verification on, all fields of it, so that a rate sees the first drift."""
    if status.last_verified is None:
        return
    stale = _metric("kvguard_verification_stale")
    stale.add_sample("kvguard_verification_stale", {}, int(bool(status.stale)))
    yield stale
    drift = _metric("kvguard_drift_total")
    for name in FIELDS:
        drift.add_sample("kvguard_drift_total", {"field": name}, status.drift_counts.get(name, 0))
    yield drift


def _canaries(status: Status) -> Iterator[Metric]:
    """From the first one on."""
    canaries = status.canaries
    if canaries.unanswered is None:
        return
    unanswered = _metric("kvguard_canary_unanswered")
    unanswered.add_sample(unanswered.name, {}, int(canaries.unanswered))
    yield unanswered
    requests = _metric("kvguard_canary_requests_total")
    for result, number in (("answered", canaries.answered), ("unanswered", canaries.failed)):
        requests.add_sample("kvguard_canary_requests_total", {"result": result}, number)
    yield requests


def _figures(status: Status) -> Iterator[Metric]:
    gauges = status.gauges
    occupancy = gauges.running / gauges.limit if gauges.running is not None and gauges.limit else None
    figures: dict[str, float | None] = {
        "kvguard_last_verified_timestamp_seconds": status.last_verified,
        "kvguard_kv_cache_capacity_bytes": gauges.kv_bytes_total,
        "kvguard_kv_cache_used_bytes": gauges.kv_bytes_used,
        "kvguard_kv_cache_bytes_per_token": gauges.bytes_per_token,
        "kvguard_kv_cache_capacity_tokens": gauges.kv_tokens_total,
        "kvguard_kv_cache_used_tokens": gauges.kv_tokens_used,
        "kvguard_kv_cache_pinned_ratio": gauges.kv_pinned_ratio,
        "kvguard_batch_running_requests": gauges.running,
        "kvguard_batch_waiting_requests": gauges.waiting,
        "kvguard_batch_limit_requests": gauges.limit,
        "kvguard_batch_occupancy_ratio": occupancy,
        "kvguard_engine_preemptions_total": gauges.preemptions_total,
    }
    for name, value in figures.items():
        if value is not None:
            metric = _metric(name)
            metric.add_sample(name, {}, value)
            yield metric
