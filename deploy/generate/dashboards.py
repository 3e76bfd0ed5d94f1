"""The Grafana dashboards of deploy/grafana, as data and one layout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from metric_names import undefined, used

_DATASOURCE = {"type": "prometheus", "uid": "$datasource"}
_HERE = 'job=~"$job", instance=~"$instance"'
_JOBS = 'job=~"$job"'
_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Query:
    """One expression. `HERE` in it stands for the selection of jobs and instances, `JOBS` for that of jobs alone."""

    expr: str
    legend: str = "{{pod}}"
    instant: bool = False

    @property
    def full(self) -> str:
        """The expression with its selections."""
        return self.expr.replace("HERE", _HERE).replace("JOBS", _JOBS)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `width` of 24, `height` in Grafana's rows."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    height: int = 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


FLEET = Dashboard(
    "kvguard-fleet",
    "kvguard / Fleet",
    (
        Panel(
            "Serving",
            "Replicas that serve.",
            (Query('sum(kvguard_state{HERE, state=~"serving|drifted"})', "serving"),),
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "Refused",
            "Replicas that hold after a refusal by policy.",
            (Query('sum(kvguard_state{HERE, state="refused"})', "refused"),),
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "Drifted",
            "Replicas that serve another KV cache than they were verified with.",
            (Query('sum(kvguard_state{HERE, state="drifted"})', "drifted"),),
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "Different KV caches",
            "Combinations of dtype, scales and their digest that serve at once; 1 is a uniform fleet.",
            (Query("count(count by (kv_cache_dtype, kv_scales, scales_digest) (kvguard_effective_info{HERE}))", "kinds"),),
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "Which replica runs what",
            "Effective KV dtype, scales and their digest, confidence, backend, engine, policy and record of each replica.",
            (
                Query(
                    "max by (namespace, pod, kv_cache_dtype, kv_scales, scales_digest, confidence, attention_backend,"
                    " engine_version, policy, record) (kvguard_effective_info{HERE})",
                    instant=True,
                ),
            ),
            kind="table",
            width=24,
        ),
        Panel(
            "States",
            "What each replica was, in time; drift is a colour of its own.",
            (Query("max by (pod, state) (kvguard_state{HERE} == 1)", "{{pod}} {{state}}"),),
            kind="state-timeline",
            width=24,
        ),
        Panel(
            "Drift timeline",
            "What began to differ from what was established, by field; a replica that never drifted has no bar.",
            (Query("sum by (pod, field) (increase(kvguard_drift_total{HERE}[$__rate_interval])) > 0", "{{pod}} {{field}}"),),
            kind="state-timeline",
            width=24,
            height=6,
        ),
        Panel(
            "Policies",
            "Replicas by the digest of the policy they run; none: no policy.",
            (Query("count by (policy) (kvguard_effective_info{HERE})", "{{policy}}"),),
        ),
        Panel(
            "Unconfirmed",
            "Replicas whose last verification could not confirm their verdict, which stands.",
            (Query("sum by (pod) (kvguard_verification_stale{HERE})"),),
        ),
        Panel(
            "Checks",
            "The current result of each policy check.",
            (Query("max by (namespace, pod, check, result) (kvguard_check_status{HERE})", instant=True),),
            kind="table",
        ),
        Panel(
            "Since the last verification",
            "Age of the last verification of a replica.",
            (Query("time() - kvguard_last_verified_timestamp_seconds{HERE}"),),
            unit="s",
        ),
        Panel(
            "Silent engines",
            "1 where the last canary, sent after five minutes without a token, was not answered;"
            " empty until an engine has been silent for five minutes.",
            (Query("max by (pod) (kvguard_canary_unanswered{HERE})"),),
        ),
        Panel(
            "Versions",
            "Versions of kvguard in the fleet.",
            (Query("count by (version) (kvguard_build_info{HERE})", "{{version}}"),),
        ),
    ),
)

MEMORY = Dashboard(
    "kvguard-memory",
    "kvguard / KV memory and batch",
    (
        Panel(
            "KV cache held",
            "Bytes of KV cache that running requests hold, of the capacity.",
            (
                Query("kvguard_kv_cache_used_bytes{HERE}", "{{pod}} held"),
                Query("kvguard_kv_cache_capacity_bytes{HERE}", "{{pod}} capacity"),
            ),
            unit="bytes",
        ),
        Panel(
            "KV tokens held",
            "Tokens of KV cache that running requests hold, of the capacity.",
            (
                Query("kvguard_kv_cache_used_tokens{HERE}", "{{pod}} held"),
                Query("kvguard_kv_cache_capacity_tokens{HERE}", "{{pod}} capacity"),
            ),
        ),
        Panel(
            "Bytes a token",
            "Bytes of KV cache a token takes, over all layers: FP8 is about half of 16 bit.",
            (Query("kvguard_kv_cache_bytes_per_token{HERE}"),),
            unit="bytes",
        ),
        Panel(
            "Pinned share",
            "Share of KV blocks that running requests hold. Full is good utilisation, as long as nothing waits.",
            (Query("kvguard_kv_cache_pinned_ratio{HERE}"),),
            unit="percentunit",
        ),
        Panel(
            "Batch",
            "Requests in the batch, waiting, and the most a batch takes, which is not known where kvguard is attached.",
            (
                Query("kvguard_batch_running_requests{HERE}", "{{pod}} running"),
                Query("kvguard_batch_waiting_requests{HERE}", "{{pod}} waiting"),
                Query("kvguard_batch_limit_requests{HERE}", "{{pod}} limit"),
            ),
        ),
        Panel(
            "Batch occupancy",
            "Running requests divided by the limit; empty where kvguard is attached, which does not know the limit.",
            (Query("kvguard_batch_occupancy_ratio{HERE}"),),
            unit="percentunit",
        ),
        Panel(
            "Preemptions",
            "Requests thrown out of the batch for lack of KV cache, a second.",
            (Query("sum by (pod) (rate(kvguard_engine_preemptions_total{HERE}[$__rate_interval]))"),),
            unit="ops",
        ),
        Panel(
            "Tokens",
            "Tokens read and written, a second.",
            (
                Query("sum by (pod) (rate(vllm:prompt_tokens_total{HERE}[$__rate_interval]))", "{{pod}} prompt"),
                Query("sum by (pod) (rate(vllm:generation_tokens_total{HERE}[$__rate_interval]))", "{{pod}} generated"),
            ),
            unit="ops",
        ),
        Panel(
            "Why requests wait",
            "Waiting requests by vLLM's reason.",
            (Query("sum by (pod, reason) (vllm:num_requests_waiting_by_reason{HERE})", "{{pod}} {{reason}}"),),
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens found in the prefix cache.",
            (
                Query(
                    "sum by (pod) (rate(vllm:prefix_cache_hits_total{HERE}[$__rate_interval]))"
                    " / sum by (pod) (rate(vllm:prefix_cache_queries_total{HERE}[$__rate_interval]))"
                ),
            ),
            unit="percentunit",
        ),
    ),
)

_MEAN = "namespace_job_comparison:kvguard_shadow_abs_delta_nats:mean"
_STDERR = "namespace_job_comparison:kvguard_shadow_abs_delta_nats:stderr"
_FLOOR = Query("max by (pod) (kvguard_shadow_noise_floor_nats{HERE})", "{{pod}} noise floor")


def _stratum(comparison: str, by: str) -> tuple[Query, ...]:
    selected = f'HERE, comparison="{comparison}", by="{by}"'
    return (Query(f"kvguard_shadow_stratum_abs_delta_nats{{{selected}}}", "{{pod}} {{stratum}} {{bound}}"),)


QUALITY = Dashboard(
    "kvguard-quality",
    "kvguard / Quality",
    (
        Panel(
            "Probes",
            "The state of shadow probing of each replica.",
            (Query("max by (pod, state) (kvguard_shadow_state{HERE} == 1)", "{{pod}} {{state}}"),),
            kind="state-timeline",
            width=24,
            height=6,
        ),
        Panel(
            "Fleet: cost of the KV format",
            "Mean |delta logprob| against the 16-bit pass by request, over all replicas, with two standard errors.",
            (
                Query(f'{_MEAN}{{JOBS, comparison="cost"}}', "{{job}} mean"),
                Query(f'{_MEAN}{{JOBS, comparison="cost"}} + 2 * {_STDERR}{{JOBS, comparison="cost"}}', "{{job}} high"),
                Query(f'{_MEAN}{{JOBS, comparison="cost"}} - 2 * {_STDERR}{{JOBS, comparison="cost"}}', "{{job}} low"),
            ),
            unit="none",
        ),
        Panel(
            "Fleet: unexplained",
            "What the KV format does not account for, with two standard errors, and the accepted baseline.",
            (
                Query(f'{_MEAN}{{JOBS, comparison="unexplained"}}', "{{job}} mean"),
                Query(
                    f'{_MEAN}{{JOBS, comparison="unexplained"}} + 2 * {_STDERR}{{JOBS, comparison="unexplained"}}',
                    "{{job}} high",
                ),
                Query(
                    f'{_MEAN}{{JOBS, comparison="unexplained"}} - 2 * {_STDERR}{{JOBS, comparison="unexplained"}}',
                    "{{job}} low",
                ),
                Query("max by (job) (kvguard_shadow_noise_floor_nats{HERE})", "{{job}} baseline"),
            ),
            unit="none",
        ),
        Panel(
            "Difference by replica",
            "Mean |delta logprob| by token, with the 95 % interval.",
            (Query("kvguard_shadow_abs_delta_nats{HERE}", "{{pod}} {{comparison}} {{bound}}"),),
            unit="none",
        ),
        Panel(
            "Cost by length of the prompt",
            "Mean |delta logprob| against the 16-bit pass, by prompt tokens, with the 95 % interval and the noise floor.",
            (*_stratum("cost", "prompt_tokens"), _FLOOR),
            unit="none",
        ),
        Panel(
            "Cost by turns",
            "Mean |delta logprob| against the 16-bit pass, by user turns, with the 95 % interval and the noise floor.",
            (*_stratum("cost", "turns"), _FLOOR),
            unit="none",
        ),
        Panel(
            "Unexplained by length of the prompt",
            "What the KV format does not account for, by prompt tokens, with the 95 % interval and the noise floor.",
            (*_stratum("unexplained", "prompt_tokens"), _FLOOR),
            unit="none",
        ),
        Panel(
            "Unexplained by turns",
            "What the KV format does not account for, by user turns, with the 95 % interval and the noise floor.",
            (*_stratum("unexplained", "turns"), _FLOOR),
            unit="none",
        ),
        Panel(
            "Top-1 flips by replica",
            "Share of tokens whose most probable one differs, with the 95 % interval.",
            (Query("kvguard_shadow_flip_ratio{HERE}", "{{pod}} {{comparison}} {{bound}}"),),
            unit="percentunit",
        ),
        Panel(
            "Evidence of a regression",
            "Wealth of the sequential test; it alarms at 1,000.",
            (Query("kvguard_shadow_evidence{HERE}"),),
            unit="none",
        ),
        Panel(
            "Power of the positive control",
            "Share of streams in which a damage of one tolerance would be seen; under 80 % the alarm is blind.",
            (Query("kvguard_shadow_control_power_ratio{HERE}"),),
            unit="percentunit",
        ),
        Panel(
            "Probes made",
            "Requests probed, and collapsed answers, an hour.",
            (
                Query("3600 * sum by (pod) (rate(kvguard_shadow_probes_total{HERE}[$__rate_interval]))", "{{pod}} probes"),
                Query(
                    "3600 * sum by (pod) (rate(kvguard_shadow_collapsed_total{HERE}[$__rate_interval]))", "{{pod}} collapsed"
                ),
            ),
        ),
        Panel(
            "Probes not made",
            "Requests drawn and dropped, by cause, and requests that cannot be probed, by reason, an hour.",
            (
                Query(
                    "3600 * sum by (cause) (rate(kvguard_shadow_dropped_total{HERE}[$__rate_interval]))", "dropped: {{cause}}"
                ),
                Query(
                    "3600 * sum by (reason) (rate(kvguard_shadow_skipped_total{HERE}[$__rate_interval]))", "skipped: {{reason}}"
                ),
            ),
        ),
        Panel(
            "Engine time of passes",
            "Share of the engine's time that reference passes take.",
            (Query("sum by (pod) (rate(kvguard_shadow_pass_seconds_total{HERE}[$__rate_interval]))"),),
            unit="percentunit",
        ),
        Panel(
            "What explains the decode",
            "By the self-check: the rounding that reproduces the engine's decode.",
            (Query("max by (pod, explained_by) (kvguard_shadow_fidelity_info{HERE})", instant=True),),
            kind="table",
        ),
    ),
)


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{{HERE}}[$__rate_interval])))"


def _quantiles(metric: str) -> tuple[Query, ...]:
    return tuple(Query(_quantile(share, metric), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))


PROXY = Dashboard(
    "kvguard-proxy",
    "kvguard / Proxy",
    (
        Panel(
            "Requests",
            "Requests a second, by status.",
            (Query("sum by (status) (rate(kvguard_proxy_requests_total{HERE}[$__rate_interval]))", "{{status}}"),),
            unit="reqps",
        ),
        Panel(
            "Outcomes",
            "How requests ended, a second. refused: kvguard's own answer; client_disconnected: the client left.",
            (Query("sum by (outcome) (rate(kvguard_proxy_requests_total{HERE}[$__rate_interval]))", "{{outcome}}"),),
            unit="reqps",
        ),
        Panel(
            "Time to the first byte",
            "Seconds from a request's headers to the first byte of the answer.",
            _quantiles("kvguard_proxy_time_to_first_byte_seconds"),
            unit="s",
        ),
        Panel(
            "Duration",
            "Seconds from a request's headers to the end of the answer.",
            _quantiles("kvguard_proxy_request_duration_seconds"),
            unit="s",
        ),
        Panel("In flight", "Requests in flight.", (Query("kvguard_proxy_in_flight_requests{HERE}"),)),
        Panel(
            "Clients that left",
            "Requests whose client left before the end, a second.",
            (Query("sum by (pod) (rate(kvguard_proxy_client_disconnects_total{HERE}[$__rate_interval]))"),),
            unit="reqps",
        ),
        Panel(
            "Delay of the data plane",
            "How late kvguard's own loop is, on average: what it adds to each chunk. Measured while requests are in flight.",
            (
                Query(
                    "sum by (pod) (rate(kvguard_proxy_delay_seconds_sum{HERE}[$__rate_interval]))"
                    " / sum by (pod) (rate(kvguard_proxy_delay_seconds_count{HERE}[$__rate_interval]))"
                ),
            ),
            unit="s",
        ),
        Panel(
            "CPU of the data plane",
            "CPU seconds a second of kvguard's one thread that relays; 1 is all it can have.",
            (Query("sum by (pod) (rate(kvguard_proxy_cpu_seconds_total{HERE}[$__rate_interval]))"),),
            unit="percentunit",
        ),
        Panel(
            "CPU by request",
            "CPU seconds of the data plane for each request.",
            (
                Query(
                    "sum by (pod) (rate(kvguard_proxy_cpu_seconds_total{HERE}[$__rate_interval]))"
                    " / sum by (pod) (rate(kvguard_proxy_requests_total{HERE}[$__rate_interval]))"
                ),
            ),
            unit="s",
        ),
        Panel(
            "Routes",
            "Requests a second, by route.",
            (Query("sum by (route) (rate(kvguard_proxy_requests_total{HERE}[$__rate_interval]))", "{{route}}"),),
            unit="reqps",
        ),
        Panel(
            "Broken",
            "Share of requests that ended with an error of the engine's connection.",
            (
                Query(
                    '(sum(rate(kvguard_proxy_requests_total{HERE, outcome="upstream_error"}[$__rate_interval])) or vector(0))'
                    " / sum(rate(kvguard_proxy_requests_total{HERE}[$__rate_interval]))",
                    "broken",
                ),
            ),
            unit="percentunit",
        ),
    ),
)

DASHBOARDS = (FLEET, MEMORY, QUALITY, PROXY)


class UnknownMetric(Exception):
    """A panel asks for a metric that neither kvguard nor vLLM defines."""


def render(dashboard: Dashboard, known: frozenset[str]) -> str:
    """The dashboard's JSON. Raises UnknownMetric."""
    panels = list(_laid_out(dashboard.panels, known))
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["kvguard", "vllm"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "utc",
        "refresh": "30s",
        "links": [
            {
                "title": "kvguard",
                "type": "dashboards",
                "tags": ["kvguard"],
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    chosen = {
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "sort": 1,
        "type": "query",
        "datasource": _DATASOURCE,
    }
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {**chosen, "name": "job", "label": "Job", "query": "label_values(kvguard_build_info, job)"},
        {**chosen, "name": "instance", "label": "Instance", "query": 'label_values(up{job=~"$job"}, instance)'},
    ]


def _laid_out(panels: Iterable[Panel], known: frozenset[str]) -> Iterable[dict[str, Any]]:
    x = y = row = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > _WIDTH:
            x, y, row = 0, y + row, 0
        yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height}, known)
        x, row = x + panel.width, max(row, panel.height)


def _panel(panel: Panel, number: int, place: dict[str, int], known: frozenset[str]) -> dict[str, Any]:
    for query in panel.queries:
        if missing := undefined(query.full, known):
            raise UnknownMetric(f"panel {panel.title!r}: no metric {', '.join(missing)}: {query.full}")
    names = sorted({name for query in panel.queries for name in used(query.full)})
    document: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.about} Metrics: {', '.join(names)}.",
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [_target(query, index, panel.kind) for index, query in enumerate(panel.queries)],
        "options": {},
    }
    if panel.kind == "table":
        hidden = {"Time": True, "Value": True}
        document["transformations"] = [
            {"id": "organize", "options": {"excludeByName": hidden, "indexByName": {}, "renameByName": {}}}
        ]
    return document


def _target(query: Query, index: int, kind: str) -> dict[str, Any]:
    target: dict[str, Any] = {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": re.sub(r"\s+", " ", query.full),
        "legendFormat": query.legend,
    }
    if query.instant:
        target |= {"instant": True, "range": False}
    if kind == "table":
        target["format"] = "table"
    return target
