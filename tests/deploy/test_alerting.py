"""A real Prometheus scrapes kvguard's own metrics, the drift alert fires, a real Alertmanager has it, and it resolves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from charts import ROOT
from prometheus_client import CollectorRegistry, generate_latest
from watching import Watch, hurried_rules, until, watched

from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.telemetry.metrics import GuardCollector
from kvguard.vocabulary import Confidence, Effective


class Exporter:
    """The metrics page of a guard whose status the test sets."""

    def __init__(self) -> None:
        self.status = Status(state=State.SERVING, effective=Effective(dtype="bfloat16", confidence=Confidence.PROVEN))
        registry = CollectorRegistry()
        registry.register(GuardCollector(lambda: self.status))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = generate_latest(registry)
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    one = Exporter()
    yield one
    one.server.shutdown()
    one.server.server_close()


@pytest.fixture
def watch(tmp_path: Path, exporter: Exporter) -> Iterator[Watch]:
    """Prometheus and Alertmanager that watch it every second."""
    with watched(tmp_path, f"127.0.0.1:{exporter.port}") as one:
        yield one


def test_drift_fires_arrives_and_resolves(watch: Watch, exporter: Exporter) -> None:
    def scraped(state: str) -> bool:
        return any(one["metric"]["state"] == state and one["value"][1] == "1" for one in watch.query("kvguard_state"))

    until(lambda: scraped("serving"), "Prometheus has scraped the exporter")
    assert watch.active("KvguardDrifted") == []
    exporter.status = exporter.status.model_copy(update={"state": State.DRIFTED})
    (alert,) = until(lambda: watch.active("KvguardDrifted"), "Alertmanager has the alert")
    assert alert["labels"] == {
        "alertname": "KvguardDrifted",
        "severity": "critical",
        "namespace": "compose",
        "pod": "kvguard",
        "job": "kvguard",
    }
    assert alert["annotations"]["runbook_url"] == "deploy/runbooks/kvguarddrifted.md"
    assert alert["annotations"]["description"].startswith("compose/kvguard passed its policy when it started")
    assert [one["name"] for one in alert["receivers"]] == ["page"]
    assert watch.active("KvguardDriftUnproven") == [], "what is proven is no ticket as well"
    # What ends before it was told is never told.
    until(lambda: watch.receiver.alerts("KvguardDrifted", "firing"), "the receiver was told")
    exporter.status = exporter.status.model_copy(update={"state": State.SERVING})
    until(lambda: not watch.active("KvguardDrifted"), "the alert is resolved at Alertmanager")
    until(lambda: watch.receiver.alerts("KvguardDrifted", "resolved"), "the receiver was told so")
    assert {path for path, _ in watch.receiver.alerts("KvguardDrifted", "firing")} == {"page"}
    recorded = "namespace_job:kvguard_replicas_serving:sum"
    until(lambda: [one["value"][1] for one in watch.query(recorded)] == ["1"], "rules record that one replica serves")


def test_hurrying_changes_times_and_nothing_else() -> None:
    shipped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text("utf-8"))
    hurried = yaml.safe_load(hurried_rules("1s"))
    for before, after in zip(shipped["groups"], hurried["groups"], strict=True):
        assert {**before, "interval": "", "rules": []} == {**after, "interval": "", "rules": []}
        for rule, other in zip(before["rules"], after["rules"], strict=True):
            assert {**rule, "for": ""} == {**other, "for": ""}
