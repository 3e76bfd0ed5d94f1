"""A real Prometheus scrapes kvguard's own metrics, the drift alert fires, a real Alertmanager has it, and it resolves."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import ROOT, tool
from prometheus_client import CollectorRegistry, generate_latest

from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.telemetry.metrics import GuardCollector
from kvguard.vocabulary import Confidence, Effective

LIMIT = 90.0


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> Any:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
        return json.load(answer)
    return None


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {LIMIT:g} s: {what}")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Exporter, str, str]]:
    """An exporter, and the addresses of the Prometheus and the Alertmanager that watch it every half second."""
    programs = {name: str(tool(name)) for name in ("prometheus", "alertmanager")}
    exporter = Exporter()
    prometheus, alertmanager = free_port(), free_port()
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text("utf-8"))
    for group in rules["groups"]:
        group["interval"] = "500ms"
        for rule in group["rules"]:
            rule.pop("for", None)  # what `for` does is promtool's test
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules), "utf-8")
    config = yaml.safe_load((ROOT / "deploy" / "compose" / "prometheus.yaml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{exporter.port}"]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config), "utf-8")
    commands = (
        [
            programs["prometheus"],
            f"--config.file={tmp_path}/prometheus.yaml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        ],
        [
            programs["alertmanager"],
            f"--config.file={ROOT}/deploy/compose/alertmanager.yaml",
            f"--storage.path={tmp_path}/alertmanager",
            f"--web.listen-address=127.0.0.1:{alertmanager}",
            "--cluster.listen-address=",
        ],
    )
    log = (tmp_path / "log").open("wb")
    # Alertmanager finds its templates beside itself.
    started = [subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(command[0]).parent) for command in commands]
    try:
        until(lambda: get(f"http://127.0.0.1:{alertmanager}/api/v2/status"), "Alertmanager answers")
        yield exporter, f"http://127.0.0.1:{prometheus}", f"http://127.0.0.1:{alertmanager}"
    finally:
        for process in started:
            process.kill()
            process.wait()
        log.close()
        exporter.server.shutdown()
        exporter.server.server_close()


def test_drift_fires_arrives_and_resolves(watched):
    exporter, prometheus, alertmanager = watched

    def alerts() -> list[dict[str, Any]]:
        page = get(f"{alertmanager}/api/v2/alerts?active=true") or []
        return [one for one in page if one["labels"]["alertname"] == "KvguardDrifted"]

    def scraped(state: str) -> bool:
        answer = get(f"{prometheus}/api/v1/query?query=kvguard_state")
        found = (answer or {}).get("data", {}).get("result", [])
        return any(one["metric"]["state"] == state and one["value"][1] == "1" for one in found)

    until(lambda: scraped("serving"), "Prometheus has scraped the exporter")
    assert alerts() == []
    exporter.status = exporter.status.model_copy(update={"state": State.DRIFTED})
    (alert,) = until(alerts, "Alertmanager has the alert")
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
    exporter.status = exporter.status.model_copy(update={"state": State.SERVING})
    until(lambda: not alerts(), "the alert is resolved at Alertmanager")
    recorded = get(f"{prometheus}/api/v1/query?query=namespace_job:kvguard_replicas_serving:sum")
    assert recorded["data"]["result"][0]["value"][1] == "1"
