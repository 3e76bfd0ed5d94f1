"""An engine swapped behind `kvguard attach` for one with another KV dtype, as clients, records and the person on call see it.

Prometheus scrapes kvguard with the shipped rules, hurried (see deploy/watching.py); Alertmanager tells a receiver. Three engine
starts: the one that is verified, the other one, and the first again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from beside import Beside, Plain

from guarded import START_LIMIT, free_port
from kvguard.record.store import load_statement

sys.path.append(str(Path(__file__).parents[1] / "deploy"))
from watching import Watch, until, watched

ALERT = "KvguardDriftUnproven"


def value(watch: Watch, expression: str) -> float | None:
    """The only sample of a query; None where there is none."""
    found = watch.query(expression)
    return float(found[0]["value"][1]) if found else None


def test_a_swapped_engine_is_drift_and_alarms_until_it_is_put_back(
    plain: Callable[..., Plain], model: Path, tmp_path: Path
) -> None:
    log, port = tmp_path / "engine.log", free_port()
    address = ("--host", "127.0.0.1", "--port", str(port))
    engine = plain(log, *address, "--kv-cache-dtype", "fp8_e4m3")
    beside = Beside(tmp_path, f"http://127.0.0.1:{port}", "--log", str(log))
    try:
        with watched(tmp_path, f"127.0.0.1:{beside.management}", f"127.0.0.1:{beside.port}", held="1s") as watch:
            # What was verified serves, and nothing of it alarms.
            beside.wait("serving")
            answer = beside.chat(model)
            assert (answer.status_code, answer.headers["x-kvguard-kv-cache-dtype"]) == (200, "fp8_e4m3")
            assert answer.headers["x-kvguard-confidence"] == "corroborated"
            first = answer.headers["x-kvguard-record"]
            effective = load_statement(max(beside.records.glob("*.json"))).effective
            assert (effective.kv_tokens, effective.kv_bytes) == (93184, 1 << 30)
            until(lambda: value(watch, 'kvguard_state{state="serving"}') == 1, "Prometheus has scraped that it serves")
            shown = 'kvguard_effective_info{kv_cache_dtype="fp8_e4m3",confidence="corroborated"}'
            until(lambda: value(watch, shown) == 1, "and what")
            until(lambda: value(watch, "vllm:generation_tokens_total"), "and the engine's own figures, through kvguard")
            assert watch.active(ALERT) == []

            # Another engine on the same port: clients, the record, Prometheus and the receiver all say so.
            engine.kill()
            beside.wait("starting", 503)
            assert beside.chat(model).status_code == 503
            engine = plain(log, *address)
            beside.wait("drifted", 503)
            assert "kv_cache_dtype: fp8_e4m3 was established, now bfloat16" in beside.get("/readyz").json()["reason"]
            answer = beside.chat(model)
            assert (answer.status_code, answer.headers["x-kvguard-kv-cache-dtype"]) == (200, "bfloat16")
            changes = {change["field"]: (change["before"], change["after"]) for change in beside.newest()["drift"]}
            assert changes["kv_cache_dtype"] == ("fp8_e4m3", "bfloat16")
            until(lambda: watch.firing(ALERT), "the alert fires in Prometheus")
            path, alert = until(lambda: watch.receiver.alerts(ALERT, "firing"), "the receiver was told")[0]
            assert (path, alert["labels"]["pod"], alert["labels"]["severity"]) == ("ticket", "kvguard", "warning")
            assert alert["annotations"]["runbook_url"] == "deploy/runbooks/kvguarddriftunproven.md"
            until(lambda: value(watch, 'kvguard_drift_total{field="kv_cache_dtype"}') == 1, "the drift is counted")

            # The first one again: no drift, no alert, and the record that clients were given at first.
            engine.kill()
            engine = plain(log, *address, "--kv-cache-dtype", "fp8_e4m3")
            beside.wait("serving")
            assert beside.chat(model).headers["x-kvguard-record"] == first
            assert "drift is over" in beside.err
            until(lambda: watch.receiver.alerts(ALERT, "resolved"), "the receiver was told that it is over")
            until(lambda: not watch.firing(ALERT) and not watch.active(ALERT), "the alert is over everywhere")
            until(lambda: watch.active("KvguardDriftPassed"), "that it drifted stays a ticket for a while", START_LIMIT)
            assert watch.receiver.alerts("KvguardDrifted", "firing") == [], "nobody is woken without a proof"
            until(lambda: value(watch, "kvguard_verification_stale") == 0, "the verdict is confirmed")
    finally:
        code = beside.stop()
    assert code == 0
    assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=60).status_code == 200  # it is not ours to end
    engine.kill()
