"""Shadow probes as Prometheus metrics: estimates for people, sums for a fleet, never a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvguard.shadow.models import COST, PROMPT_STRATA, TURN_STRATA, UNEXPLAINED, Stratum
from kvguard.shadow.report import ShadowReport
from kvguard.shadow.statistics import Estimate, Measure, Sums
from kvguard.telemetry.families import Family

STATES = ("off", "waiting", "checking", "probing", "blind", "refused", "regression")

SHADOW_FAMILIES = (
    Family("kvguard_shadow_state", "gauge", "1 for the state of shadow probing, 0 for the others.", ("state",)),
    Family("kvguard_shadow_reference_up", "gauge", "Whether there is a reference that can score."),
    Family("kvguard_shadow_reference_lost_total", "counter", "How often an external reference went away.", ()),
    Family("kvguard_shadow_fidelity_info", "gauge", "What explains the engine's decode, by the self-check.", ("explained_by",)),
    Family("kvguard_shadow_noise_floor_nats", "gauge", "Unexplained mean |delta logprob| of a request, by the self-check."),
    Family("kvguard_shadow_baseline_nats", "gauge", "Accepted mean of the same: the policy's, or the self-check's."),
    Family("kvguard_shadow_control_power_ratio", "gauge", "Share of streams in which the positive control would be seen."),
    Family("kvguard_shadow_evidence", "gauge", "Evidence of the sequential test for a regression; 1/alpha alarms."),
    Family("kvguard_shadow_probes_total", "counter", "Requests probed.", ()),
    Family("kvguard_shadow_collapsed_total", "counter", "Probes whose answer collapsed (repetition, NaN).", ()),
    Family("kvguard_shadow_skipped_total", "counter", "Requests that cannot be probed, by reason.", ("reason",)),
    Family("kvguard_shadow_dropped_total", "counter", "Requests included and then not probed, by cause.", ("cause",)),
    Family("kvguard_shadow_pass_seconds_total", "counter", "Engine seconds spent in reference passes.", ()),
    Family("kvguard_shadow_stalls_over_budget_total", "counter", "Passes that stalled the engine beyond the stall budget.", ()),
    Family(
        "kvguard_shadow_abs_delta_nats",
        "gauge",
        "Mean |delta logprob| by token: estimate and interval.",
        ("comparison", "bound"),
    ),
    Family("kvguard_shadow_flip_ratio", "gauge", "Top-1 flips by token: estimate and interval.", ("comparison", "bound")),
    Family(
        "kvguard_shadow_stratum_abs_delta_nats",
        "gauge",
        "The same by length of the prompt in tokens, and by number of user turns: estimate and interval.",
        ("comparison", "by", "stratum", "bound"),
    ),
    Family("kvguard_shadow_sum", "gauge", "Sums of the request means a fleet adds up.", ("comparison", "sum")),
)

_SUMS = ("clusters", "wn", "ws", "ws_ws", "ws_wn", "wn_wn")
_BY: tuple[tuple[str, tuple[str, ...], Callable[[Stratum], str]], ...] = (
    ("prompt_tokens", PROMPT_STRATA, lambda stratum: stratum.prompt),
    ("turns", TURN_STRATA, lambda stratum: stratum.turns),
)
_MAX_REASONS = 30  # more than there are: candidate.Reason and replay.Problem are closed sets


class ShadowCollector(Collector):
    """Reads the report at each scrape; a figure that is not known is absent."""

    def __init__(self, report: Callable[[], ShadowReport]) -> None:
        self._report = report

    def describe(self) -> Iterable[Metric]:
        """The families, without samples."""
        return [_metric(family.name) for family in SHADOW_FAMILIES]

    def collect(self) -> Iterator[Metric]:
        """One sample or more for each figure that is known."""
        report = self._report()
        state = _metric("kvguard_shadow_state")
        for name in STATES:
            state.add_sample(state.name, {"state": name}, float(name == report.state))
        yield state
        if report.state == "off":
            return
        yield from _self_check(report)
        yield from _counts(report)
        yield from _estimates(report)


def _metric(name: str) -> Metric:
    family = next(family for family in SHADOW_FAMILIES if family.name == name)
    if family.kind == "counter":
        return CounterMetricFamily(name.removesuffix("_total"), family.help, labels=family.labels)
    return GaugeMetricFamily(name, family.help, labels=family.labels)


def _one(name: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        metric = _metric(name)
        metric.add_sample(name, {}, float(value))
        yield metric


def _self_check(report: ShadowReport) -> Iterator[Metric]:
    yield from _one("kvguard_shadow_reference_up", float(report.state not in ("waiting", "refused")))
    yield from _one("kvguard_shadow_reference_lost_total", report.lost)
    if report.fidelity is not None:
        info = _metric("kvguard_shadow_fidelity_info")
        info.add_sample(info.name, {"explained_by": report.fidelity.explained_by}, 1.0)
        yield info
    yield from _one("kvguard_shadow_noise_floor_nats", report.measured_baseline)
    yield from _one("kvguard_shadow_baseline_nats", report.baseline)
    yield from _one("kvguard_shadow_control_power_ratio", report.control.power if report.control else None)
    yield from _one("kvguard_shadow_evidence", report.alarm.wealth.value if report.alarm else None)


def _counts(report: ShadowReport) -> Iterator[Metric]:
    yield from _one("kvguard_shadow_probes_total", report.probes)
    yield from _one("kvguard_shadow_collapsed_total", report.collapsed)
    yield from _one("kvguard_shadow_pass_seconds_total", report.pass_seconds)
    yield from _one("kvguard_shadow_stalls_over_budget_total", report.stalls_over_budget)
    skipped = _metric("kvguard_shadow_skipped_total")
    for reason, requests in sorted(report.skipped.items())[:_MAX_REASONS]:
        skipped.add_sample("kvguard_shadow_skipped_total", {"reason": reason}, float(requests))
    yield skipped
    dropped = _metric("kvguard_shadow_dropped_total")
    causes: dict[str, int] = {}
    for row in report.rows:
        for drop, count in row.dropped.items():
            causes[str(drop)] = causes.get(str(drop), 0) + count.requests
    for cause, number in sorted(causes.items()):
        dropped.add_sample("kvguard_shadow_dropped_total", {"cause": cause}, float(number))
    yield dropped


def _estimates(report: ShadowReport) -> Iterator[Metric]:
    totals = {name: report.total(name) for name in (COST, UNEXPLAINED)}
    for family, measure in (
        ("kvguard_shadow_abs_delta_nats", Measure.ABS_DELTA),
        ("kvguard_shadow_flip_ratio", Measure.FLIP_RATE),
    ):
        metric = _metric(family)
        for name, sums in totals.items():
            _add_interval(metric, {"comparison": name}, sums.estimate(measure))
        yield metric
    yield _by_stratum(report)
    yield _fleet_sums(totals)


def _by_stratum(report: ShadowReport) -> Metric:
    """Margins of the table of strata: all its cells, times adapters, would be too many series. /shadow has them."""
    metric = _metric("kvguard_shadow_stratum_abs_delta_nats")
    for name in (COST, UNEXPLAINED):
        cells = report.sums.get(name, {})
        for by, strata, place in _BY:
            for stratum in strata:
                found = sum((sums for where, sums in cells.items() if place(where) == stratum), Sums())
                labels = {"comparison": name, "by": by, "stratum": stratum}
                _add_interval(metric, labels, found.estimate(Measure.ABS_DELTA))
    return metric


def _add_interval(metric: Metric, labels: dict[str, str], found: Estimate) -> None:
    for bound, value in (("estimate", found.value), ("low", found.low), ("high", found.high)):
        if value is not None:
            metric.add_sample(metric.name, {**labels, "bound": bound}, value)


def _fleet_sums(totals: dict[str, Sums]) -> Metric:
    metric = _metric("kvguard_shadow_sum")
    for name, sums in totals.items():
        stats = sums.measures.get(Measure.REQUEST_ABS_DELTA)
        if stats is not None:
            for part in _SUMS:
                metric.add_sample(metric.name, {"comparison": name, "sum": part}, float(getattr(stats, part)))
    return metric
