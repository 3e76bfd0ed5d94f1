"""The unit tests of deploy/prometheus/rules.yaml, laid out from short notation into the file that promtool reads.

Every test compares *all* firing alerts at each moment, so each one also says what does not fire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Series = tuple[str, str]
"""A series and its values in promtool's notation, a minute apart."""

_FLEET = 'namespace="llm",job="llm/chat"'
_STATES = ("starting", "verifying", "serving", "refused", "drifted", "draining")
_LEVELS = ("proven", "corroborated", "echoed", "unknown")
_MINUTES = 600


@dataclass(frozen=True, slots=True)
class Case:
    """What is scraped, and the alerts that fire at each of some moments."""

    name: str
    series: list[Series]
    moments: tuple[tuple[str, list[str]], ...]


def _series(name: str, pod: str, extra: str, values: str) -> Series:
    return f'{name}{{{_FLEET},pod="{pod}"{"," + extra if extra else ""}}}', values


def _replica(
    pod: str = "a",
    now: str = "serving",
    *,
    dtype: str = "fp8_e4m3",
    scales: str = "checkpoint",
    confidence: str = "proven",
    levels: dict[str, str] | None = None,
    policy: str = "sha256:p",
    digest: str = "sha256:s",
    states: dict[str, str] | None = None,
    **changes: str | Series | None,
) -> list[Series]:
    """A healthy replica with `changes`: other values, another series, or None for an absent one."""
    effective = (
        f'kv_cache_dtype="{dtype}",kv_scales="{scales}",confidence="{confidence}",record="sha256:{pod}",'
        f'policy="{policy}",scales_digest="{digest}"'
    )
    first_byte = "kvguard_proxy_time_to_first_byte_seconds_bucket"
    n = _MINUTES
    scraped: dict[str, Series | None] = {
        "build": _series("kvguard_build_info", pod, 'version="0.1.0"', f"1x{n}"),
        "up": _series("up", pod, 'endpoint="management"', f"1x{n}"),
        "info": _series("kvguard_effective_info", pod, effective, f"1x{n}"),
        "verified": _series("kvguard_last_verified_timestamp_seconds", pod, "", f"0+60x{n}"),
        "stale": _series("kvguard_verification_stale", pod, "", f"0x{n}"),
        "drifts": _series("kvguard_drift_total", pod, 'field="kv_cache_dtype"', f"0x{n}"),
        "canary": None,
        "late": _series("kvguard_proxy_delay_seconds_sum", pod, "", f"0+0.2x{n}"),
        "beats": _series("kvguard_proxy_delay_seconds_count", pod, "", f"0+240x{n}"),
        "cpu": _series("kvguard_proxy_cpu_seconds_total", pod, "", f"0+12x{n}"),
        "ready": (f'kube_pod_container_status_ready{{namespace="llm",container="vllm",pod="{pod}"}}', f"1x{n}"),
        "waiting": _series("kvguard_batch_waiting_requests", pod, "", f"0x{n}"),
        "inflight": _series("kvguard_proxy_in_flight_requests", pod, "", f"3x{n}"),
        "shadow": _series("kvguard_shadow_state", pod, 'state="probing"', f"1x{n}"),
        "gen": _series("vllm:generation_tokens_total", pod, 'engine="0"', f"0+600x{n}"),
        "prompt": _series("vllm:prompt_tokens_total", pod, 'engine="0"', f"0+900x{n}"),
        "full": _series("kvguard_kv_cache_pinned_ratio", pod, "", f"1x{n}"),
        "preempt": _series("kvguard_engine_preemptions_total", pod, "", f"0+1x{n}"),
        "ok": _series("kvguard_proxy_requests_total", pod, 'outcome="ok"', f"0+60x{n}"),
        "fast": _series(first_byte, pod, 'le="10"', f"0+60x{n}"),
        "slow": _series(first_byte, pod, 'le="30"', f"0+60x{n}"),
        "inf": _series(first_byte, pod, 'le="+Inf"', f"0+60x{n}"),
        "check": _series("kvguard_check_status", pod, 'check="kv_cache_dtype",result="pass"', f"1x{n}"),
        "collapsed": _series("kvguard_shadow_collapsed_total", pod, "", f"0x{n}"),
    }
    for key, change in changes.items():
        before = scraped[key]
        scraped[key] = (
            (before[0], change) if isinstance(change, str) and before else change if isinstance(change, tuple) else None
        )
    given = states or {}
    in_time = [_series("kvguard_state", pod, f'state="{name}"', given.get(name, f"{int(name == now)}x{n}")) for name in _STATES]
    supports = [
        _series("kvguard_confidence", pod, f'level="{level}"', (levels or {}).get(level, f"{int(level == confidence)}x{n}"))
        for level in _LEVELS
    ]
    return [one for one in scraped.values() if one is not None] + in_time + supports


def _loading(pod: str = "a", starting: str = "1x600") -> list[Series]:
    return _replica(
        pod,
        "starting",
        states={"starting": starting},
        dtype="unknown",
        confidence="unknown",
        verified=None,
        stale=None,
        drifts=None,
        waiting=None,
        inflight="0x600",
        gen=None,
        prompt=None,
    )


def _refused(pod: str, **changes: str | Series | None) -> list[Series]:
    return _replica(
        pod, "refused", dtype="unknown", confidence="unknown", waiting=None, inflight="0x600", gen=None, prompt=None, **changes
    )


def _gone(pod: str = "a", up: str = "1x10 stale") -> list[Series]:
    """Scraped for ten minutes, then never again."""
    gone = "1x10 stale"
    states = {name: f"{int(name == 'serving')}x10 stale" for name in _STATES}
    return _replica(
        pod,
        states=states,
        levels=dict.fromkeys(_LEVELS, "0x10 stale") | {"proven": gone},
        stale="0x10 stale",
        drifts="0x10 stale",
        build=gone,
        info=gone,
        verified="0+60x10 stale",
        waiting="0x10 stale",
        inflight="3x10 stale",
        shadow=gone,
        up=up,
    )


def _drained(in_flight: str) -> list[Series]:
    """Serves for 15 minutes, drains for five, and is gone."""
    gone = "1x20 stale"
    states = dict.fromkeys(_STATES, "0x20 stale") | {"serving": "1x15 0x5 stale", "draining": "0x15 1x5 stale"}
    return _replica(
        "a",
        states=states,
        levels=dict.fromkeys(_LEVELS, "0x20 stale") | {"proven": gone},
        stale="0x20 stale",
        drifts="0x20 stale",
        build=gone,
        up=gone,
        info=gone,
        verified="0+60x20 stale",
        waiting="0x20 stale",
        inflight=in_flight,
        shadow=gone,
        gen="0+600x20 stale",
        prompt="0+900x20 stale",
        check=gone,
    )


def _check(check: str, result: str) -> Series:
    return _series("kvguard_check_status", "a", f'check="{check}",result="{result}"', "1x600")


def _shadow(state: str) -> Series:
    return _series("kvguard_shadow_state", "a", f'state="{state}"', "1x600")


def _requests(outcome: str, values: str) -> Series:
    return _series("kvguard_proxy_requests_total", "a", f'outcome="{outcome}"', values)


def _probed(pod: str, requests: int, mean: float, deviation: float) -> list[Series]:
    """Sums over requests of weight 1 whose means have this mean and standard deviation; the baseline is 0.075."""
    square = mean**2 + deviation**2
    sums = {
        "clusters": requests,
        "w": requests,
        "ww": requests,
        "wn": requests,
        "ws": requests * mean,
        "ws_ws": requests * square,
        "ws_wn": requests * mean,
        "wn_wn": requests,
    }
    found = [
        _series("kvguard_shadow_sum", pod, f'comparison="unexplained",sum="{name}"', f"{value:g}x200")
        for name, value in sums.items()
    ]
    return [*found, _series("kvguard_shadow_noise_floor_nats", pod, "", "0.075x200")]


def _exits(ready: list[int], codes: dict[int, int]) -> list[Series]:
    """What kube-state-metrics says of containers: ready or not, and the last exit code of some."""
    labels = 'namespace="llm",container="vllm",pod="p{}"'
    return [
        *((f"kube_pod_container_status_ready{{{labels.format(i)}}}", f"{is_ready}x60") for i, is_ready in enumerate(ready)),
        *(
            (f"kube_pod_container_status_last_terminated_exitcode{{{labels.format(i)}}}", f"{code}x60")
            for i, code in codes.items()
        ),
    ]


def _alert(name: str, pod: str = "a", severity: str = "warning", extra: str = "") -> str:
    labels = [_FLEET, *([f'pod="{pod}"'] if pod else []), f'severity="{severity}"', *([extra] if extra else [])]
    return f'ALERTS{{alertname="{name}",alertstate="firing",{",".join(labels)}}}'


def _page(name: str, pod: str = "a") -> str:
    return _alert(name, pod, "critical")


def _absent(figure: str) -> str:
    return _alert("KvguardFiguresAbsent", extra=f'figure="{figure}",state="serving"')


def _mixed(policy: str = "sha256:p") -> str:
    return _alert("KvguardMixedReplicas", "", "critical", f'policy="{policy}"')


def _canary(values: str) -> Series:
    return _series("kvguard_canary_unanswered", "a", "", values)


_DRIFTS = "0x9 1x600"
_DRIFT = {"serving": "1x9 0x20 1x60", "drifted": "0x9 1x20 0x60"}
_EXITED = 'ALERTS{alertname="KvguardExitedForPolicy",alertstate="firing",namespace="llm",severity="critical"}'
_FLEET_REGRESSION = (
    f'ALERTS{{alertname="KvguardFleetRegression",alertstate="firing",{_FLEET},comparison="unexplained",severity="warning"}}'
)
_NONE: list[str] = []

CASES = (
    Case(
        "nothing fires on a healthy fleet with a full KV cache, also overnight",
        _replica("a") + _replica("b"),
        (
            ("1h", _NONE),
            ("6h30m", _NONE),
        ),
    ),
    Case(
        "nothing fires while an engine loads for half an hour",
        _loading(),
        (
            ("10m", _NONE),
            ("40m", _NONE),
        ),
    ),
    Case(
        "drift pages within two minutes, and resolves when it is gone",
        _replica(states=_DRIFT, drifts=_DRIFTS),
        (
            ("9m", _NONE),
            ("12m", [_page("KvguardDrifted")]),
            ("35m", [_alert("KvguardDriftPassed")]),
            ("45m", _NONE),
        ),
    ),
    Case(
        "drift seen from outside is a ticket, and does not page",
        _replica(states=_DRIFT, drifts=_DRIFTS, confidence="corroborated"),
        (
            ("9m", _NONE),
            ("12m", [_alert("KvguardDriftUnproven")]),
            ("45m", _NONE),
        ),
    ),
    Case(
        "drift does not page on the engine's word alone, although the tensors proved what was before",
        _replica(states=_DRIFT, levels={"proven": "1x9 0x600", "echoed": "0x9 1x600"}),
        (("12m", [_alert("KvguardDriftUnproven")]), ("20m", [_alert("KvguardDriftUnproven")])),
    ),
    Case(
        "drift between two scrapes is a ticket for half an hour",
        _replica(drifts=_DRIFTS),
        (
            ("9m", _NONE),
            ("12m", [_alert("KvguardDriftPassed")]),
            ("45m", _NONE),
        ),
    ),
    Case("drift of long ago is none", _replica(drifts="3x600"), (("1h", _NONE),)),
    Case(
        "drift does not outlast the engine that drifted",
        _replica(states={"serving": "1x9 0x600", "drifted": "0x9 1x10 0x600", "starting": "0x19 1x600"}),
        (("12m", [_page("KvguardDrifted")]), ("21m", _NONE)),
    ),
    Case(
        "one missed scrape does not resolve drift",
        _replica(states={"serving": "0x60", "drifted": "1x10 _x2 1x60"}, info="1x10 _x2 1x60"),
        (
            ("12m", [_page("KvguardDrifted")]),
            ("15m", [_page("KvguardDrifted")]),
        ),
    ),
    Case(
        "drift that is absent altogether says nothing, and its absence does",
        _replica(shadow=None, verified=None, stale=None, drifts=None),
        (
            ("10m", _NONE),
            (
                "30m",
                [
                    _absent("kvguard_last_verified_timestamp_seconds"),
                    _absent("kvguard_verification_stale"),
                    _absent("kvguard_drift_total"),
                    _absent("kvguard_shadow_state"),
                ],
            ),
        ),
    ),
    Case(
        "two dtypes behind one Service page after half an hour",
        _replica("a") + _replica("b", dtype="bfloat16", scales="not_quantized"),
        (
            ("25m", _NONE),
            ("40m", [_mixed()]),
        ),
    ),
    Case(
        "two kinds of scales behind one Service page too",
        _replica("a") + _replica("b", scales="unit_default"),
        (("40m", [_mixed()]),),
    ),
    Case(
        "two sets of scales of one kind behind one Service page too",
        _replica("a") + _replica("b", digest="sha256:other"),
        (
            ("25m", _NONE),
            ("40m", [_mixed()]),
        ),
    ),
    Case("mixed does not page where scales were not read", _replica("a") + _replica("b", digest="none"), (("70m", _NONE),)),
    Case(
        "mixed does not page for two policies behind one Service, each with a cache of its own",
        _replica("a") + _replica("b", dtype="bfloat16", scales="not_quantized", digest="none", policy="sha256:q"),
        (("70m", _NONE),),
    ),
    Case("mixed does not page for different records of equal caches", _replica("a") + _replica("b"), (("70m", _NONE),)),
    Case(
        "mixed does not page during a rollout",
        _replica("a") + _replica("b", dtype="bfloat16", scales="not_quantized") + _loading("c"),
        (("70m", _NONE),),
    ),
    Case(
        "mixed pages although a replica never ends starting",
        _replica("a") + _replica("b", dtype="bfloat16", scales="not_quantized", digest="none") + _loading("c"),
        (("1h55m", _NONE), ("2h10m", _NONE), ("2h35m", [_mixed()])),
    ),
    Case(
        "mixed does not page while a rollout has just begun, beside a replica that never ends starting",
        _replica("a")
        + _replica("b", dtype="bfloat16", scales="not_quantized", digest="none")
        + _loading("c")
        + _loading("d", "_x100 1x500"),
        (("2h50m", _NONE),),
    ),
    Case(
        "mixed does not page for what is not established yet",
        _replica("a") + _replica("b", dtype="unknown", scales="unknown", confidence="unknown"),
        (("70m", _NONE),),
    ),
    Case(
        "most replicas refused pages",
        _replica("a") + _refused("b") + _refused("c"),
        (("10m", [_page("KvguardTooFewServing", "")]),),
    ),
    Case(
        "one missed scrape of a refused replica does not hold up the page",
        _replica("a")
        + [one for one in _refused("b") if "kvguard_state" not in one[0] and "build_info" not in one[0]]
        + [
            _series("kvguard_build_info", "b", 'version="0.1.0"', "1x4 stale 1x600"),
            _series("kvguard_state", "b", 'state="refused"', "1x4 stale 1x600"),
            _series("kvguard_state", "b", 'state="serving"', "0x4 stale 0x600"),
        ]
        + _refused("c", build="1x600"),
        (("7m", [_page("KvguardTooFewServing", "")]),),
    ),
    Case(
        "one refused replica of three is a ticket, and does not page",
        _replica("a") + _replica("b") + _refused("c"),
        (("10m", _NONE), ("1h", [_alert("KvguardReplicaRefused", "c")])),
    ),
    Case("engines that exit 3 page when too few are ready", _exits([1, 0, 0], {1: 3, 2: 3}), (("10m", [_EXITED]),)),
    Case("an old exit 3 of a ready container does not page in a rollout", _exits([1, 0, 0], {0: 3, 1: 0}), (("30m", _NONE),)),
    Case("exit 3 does not page while most are ready", _exits([1, 1, 0], {2: 3}), (("30m", _NONE),)),
    Case("other exit codes are not policy violations", _exits([1, 0, 0], {1: 4, 2: 137}), (("30m", _NONE),)),
    Case(
        "serving in violation is a ticket",
        _replica(check=_check("kv_scales", "fail")),
        (("15m", [_alert("KvguardServingInViolation", extra='check="kv_scales"')]),),
    ),
    Case(
        "a refused replica's failing check is no ticket of its own",
        _refused("a", check=_check("kv_scales", "fail")) + _replica("b") + _replica("c"),
        (("1h", [_alert("KvguardReplicaRefused")]),),
    ),
    Case(
        "verification that is old is a ticket; a fresh one is none",
        _replica(verified="0x600"),
        (
            ("20m", _NONE),
            ("30m", [_alert("KvguardVerificationStale")]),
        ),
    ),
    Case(
        "verification that runs and confirms nothing is a ticket",
        _replica(stale="0x5 1x600"),
        (
            ("20m", _NONE),
            ("30m", [_alert("KvguardVerificationStale")]),
        ),
    ),
    Case("verification that fails now and then is none", _replica(stale="0x4 1x4 0x4 1x4 0x600"), (("35m", _NONE),)),
    Case(
        "verification of an engine that loads is not stale",
        _replica(verified="0x600", stale="1x600", states={"serving": "0x600", "starting": "1x600"}),
        (("40m", _NONE),),
    ),
    Case(
        "collapse pages at once, and stops by itself",
        _replica(collapsed="0x10 1x600"),
        (
            ("5m", _NONE),
            ("12m", [_page("KvguardAnswersCollapse")]),
            ("1h", _NONE),
        ),
    ),
    Case("collapses of long ago do not page", _replica(collapsed="7x600"), (("1h", _NONE),)),
    Case(
        "a shown regression is a ticket",
        _replica(shadow=_shadow("regression")),
        (("10m", [_alert("KvguardShadowRegression")]),),
    ),
    Case(
        "blind probes are a ticket after six hours, not after five",
        _replica(shadow=_shadow("blind")),
        (
            ("5h", _NONE),
            ("6h30m", [_alert("KvguardShadowBlind")]),
        ),
    ),
    Case("probes that are off are not blind", _replica(shadow=_shadow("off")), (("6h30m", _NONE),)),
    Case(
        "a fleet whose replicas are each unsure shows a regression together",
        _probed("a", 40, 0.18, 0.1) + _probed("b", 40, 0.18, 0.1),
        (("45m", [_FLEET_REGRESSION]),),
    ),
    Case(
        "the fleet's cost at its baseline is no regression",
        _probed("a", 40, 0.075, 0.1) + _probed("b", 40, 0.075, 0.1),
        (("70m", _NONE),),
    ),
    Case(
        "a difference within its interval is no regression",
        _probed("a", 40, 0.14, 0.2) + _probed("b", 40, 0.14, 0.2),
        (("70m", _NONE),),
    ),
    Case("few probes show nothing", _probed("a", 20, 0.5, 0.05), (("70m", _NONE),)),
    Case(
        "requests without a token page",
        _replica(gen="0+600x20 12000x600", prompt="0+900x20 18000x600"),
        (
            ("20m", _NONE),
            ("30m", _NONE),
            ("38m", [_page("KvguardEngineHangs")]),
        ),
    ),
    Case(
        "an idle engine that leaves the canary unanswered hangs",
        _replica(gen="600x600", prompt="900x600", inflight="0x600", canary=_canary("_x6 1x600")),
        (
            ("10m", _NONE),
            ("20m", [_page("KvguardEngineHangs")]),
        ),
    ),
    Case(
        "an engine that does not even say its metrics hangs when it leaves the canary unanswered",
        _replica(gen="0+600x20 stale", prompt="0+900x20 stale", canary=_canary("_x26 1x600")),
        (
            ("25m", _NONE),
            ("45m", [_page("KvguardEngineHangs"), _absent("vllm:generation_tokens_total")]),
        ),
    ),
    Case(
        "an engine that went away after a canary was unanswered, and loads again, does not hang",
        _replica(
            gen="600x20 stale",
            prompt="900x20 stale",
            inflight="0x600",
            canary=_canary("_x18 1x600"),
            states={"serving": "1x20 0x600", "starting": "0x20 1x600"},
        ),
        (("40m", _NONE),),
    ),
    Case(
        "requests that never end do not hang an engine that answers the canary",
        _replica(gen="600x600", prompt="900x600", canary=_canary("_x6 0x600")),
        (("20m", _NONE), ("1h", _NONE)),
    ),
    Case(
        "one unanswered canary before tokens came is no hang",
        _replica(canary=_canary("_x6 1x2 0x600")),
        (("9m", _NONE), ("30m", _NONE)),
    ),
    Case("an idle engine does not hang", _replica(gen="600x600", prompt="900x600", inflight="0x600"), (("1h", _NONE),)),
    Case(
        "one long prefill does not hang",
        _replica(gen="600x600", prompt="900x600", inflight="0x5 1x8 0x600"),
        (
            ("12m", _NONE),
            ("30m", _NONE),
        ),
    ),
    Case("a pooling model, which writes no tokens, does not hang", _replica(gen="0x600"), (("1h", _NONE),)),
    Case(
        "hang without vLLM's metrics says that they are absent",
        _replica(gen=None, prompt=None),
        (("30m", [_absent("vllm:generation_tokens_total")]),),
    ),
    Case("constant preemption is a ticket", _replica(preempt="0+30x600"), (("30m", [_alert("KvguardPreemptions")]),)),
    Case("a preemption now and then is none", _replica(preempt="0+3x600"), (("70m", _NONE),)),
    Case(
        "waiting with slow answers is a ticket",
        _replica(waiting="5x600", fast="0+30x600"),
        (("30m", [_alert("KvguardWaitingForCapacity", pod="")]),),
    ),
    Case("waiting with quick answers is none", _replica(waiting="5x600"), (("70m", _NONE),)),
    Case("slow answers without waiting are none", _replica(fast="0+30x600"), (("70m", _NONE),)),
    Case(
        "waiting on one replica of two is none: the router's business",
        _replica("a", waiting="5x600", fast="0+30x600") + _replica("b"),
        (("70m", _NONE),),
    ),
    Case(
        "a drain that ends with requests in flight is a ticket",
        _drained("3x20 stale"),
        (("24m", [_alert("KvguardDrainCutRequests")]),),
    ),
    Case("a drain that ends empty is none", _drained("3x15 0x5 stale"), (("24m", _NONE),)),
    Case(
        "a broken engine connection is a ticket",
        [*_replica(), _requests("upstream_error", "0+3x600")],
        (("30m", [_alert("KvguardProxyErrors", pod="")]),),
    ),
    Case(
        "a proxy that is late is a ticket",
        _replica(late="0+12x600"),
        (("14m", _NONE), ("30m", [_alert("KvguardProxyOverhead")])),
    ),
    Case(
        "a proxy whose thread is busy is a ticket",
        _replica(cpu="0+58x600"),
        (("14m", _NONE), ("30m", [_alert("KvguardProxyOverhead")])),
    ),
    Case("a proxy without requests has no overhead", _replica(late="7x600", beats="60x600", cpu="5x600"), (("1h", _NONE),)),
    Case("clients that leave are no errors", [*_replica(), _requests("client_disconnected", "0+30x600")], (("1h", _NONE),)),
    Case(
        "a target that is down is a ticket while another serves",
        _gone(up="1x10 0x600") + _replica("b"),
        (
            ("14m", _NONE),
            ("25m", [_alert("KvguardTargetDown")]),
        ),
    ),
    Case(
        "exit codes that nobody collects are for reading after an hour",
        _replica(ready=None),
        (
            ("50m", _NONE),
            ("70m", ['ALERTS{alertname="KvguardExitCodesAbsent",alertstate="firing",namespace="llm",severity="info"}']),
        ),
    ),
    Case("targets that kvguard never guarded are not its business", [_series("up", "x", "", "0x600")], (("1h", _NONE),)),
    Case(
        "a fleet that vanished is a ticket for six hours",
        _gone(),
        (
            ("15m", _NONE),
            ("30m", [_alert("KvguardAbsent", pod="")]),
            ("8h", _NONE),
        ),
    ),
)


def rule_tests() -> str:
    """The file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Generated by `python deploy/generate`. What is not listed as firing must not fire."
    yield "rule_files: [rules.yaml]"
    yield "evaluation_interval: 1m"
    yield "tests:"
    for case in CASES:
        yield f"  - name: {_quoted(case.name)}"
        yield "    interval: 1m"
        yield "    input_series:"
        for series, values in case.series:
            yield f"      - {{series: {_quoted(series)}, values: {_quoted(values)}}}"
        yield "    promql_expr_test:"
        for moment, alerts in case.moments:
            yield '      - expr: ALERTS{alertstate="firing"}'
            yield f"        eval_time: {moment}"
            yield "        exp_samples:" + ("" if alerts else " []")
            for labels in alerts:
                yield f"          - {{labels: {_quoted(labels)}, value: 1}}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
