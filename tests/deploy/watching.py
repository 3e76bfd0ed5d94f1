"""A real Prometheus and a real Alertmanager over the rules and settings that are shipped, hurried, and a receiver of alerts.

Hurried: scrapes and rules every second instead of every 15 and 30; `for` of every alert `held` seconds instead of minutes;
notifications after a second instead of ten, and again when a group changes. Nothing else of rules.yaml, prometheus.yaml and
alertmanager.yaml is other than shipped, but addresses and the webhook.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from charts import ROOT, tool

LIMIT = 120.0
EVERY = "1s"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> Any:
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310
        return json.load(answer)
    return None


def until(found: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {limit:g} s: {what}")


class Receiver:
    """A webhook: what Alertmanager notified, in order."""

    def __init__(self) -> None:
        self.notified: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                receiver.notified.append({"path": self.path.strip("/"), **json.loads(body)})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def alerts(self, name: str, status: str) -> list[tuple[str, dict[str, Any]]]:
        """Receiver and alert of each notification of this alert in this status, firing or resolved."""
        return [
            (page["path"], alert)
            for page in list(self.notified)
            for alert in page["alerts"]
            if alert["labels"]["alertname"] == name and alert["status"] == status
        ]


class Watch:
    """The three, while they run."""

    def __init__(self, prometheus: str, alertmanager: str, receiver: Receiver) -> None:
        self.prometheus, self.alertmanager, self.receiver = prometheus, alertmanager, receiver

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's result."""
        answer = get(f"{self.prometheus}/api/v1/query?query={quote(expression)}") or {}
        found: list[dict[str, Any]] = answer.get("data", {}).get("result", [])
        return found

    def firing(self, name: str) -> list[dict[str, Any]]:
        """Labels of an alert that fires in Prometheus."""
        return [one["metric"] for one in self.query(f'ALERTS{{alertname="{name}",alertstate="firing"}}')]

    def active(self, name: str) -> list[dict[str, Any]]:
        """An alert as Alertmanager has it now."""
        page = get(f"{self.alertmanager}/api/v2/alerts?active=true") or []
        return [one for one in page if one["labels"]["alertname"] == name]


def hurried_rules(held: str = "0s") -> str:
    """The shipped rules, evaluated often, with every `for` set to `held`. What `for` itself does is promtool's test."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text("utf-8"))
    for group in rules["groups"]:
        group["interval"] = EVERY
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = held
    return yaml.safe_dump(rules)


def _prometheus(targets: Sequence[str], alertmanager: int) -> str:
    config = yaml.safe_load((ROOT / "deploy" / "compose" / "prometheus.yaml").read_text("utf-8"))
    config["global"] = {"scrape_interval": EVERY, "evaluation_interval": EVERY}
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = list(targets)
    return yaml.safe_dump(config)


def _alertmanager(webhook: str) -> str:
    config = yaml.safe_load((ROOT / "deploy" / "compose" / "alertmanager.yaml").read_text("utf-8"))
    hurry = {"group_wait": "1s", "group_interval": "1s"}
    config["route"] |= hurry
    for route in config["route"]["routes"]:
        route.update(hurry)
    for receiver in config["receivers"]:
        receiver["webhook_configs"] = [{"url": f"{webhook}/{receiver['name']}", "send_resolved": True}]
    return yaml.safe_dump(config)


@contextlib.contextmanager
def watched(directory: Path, *targets: str, held: str = "0s") -> Iterator[Watch]:
    """Watch these targets, "host:port" each, as the compose file watches kvguard's two ports."""
    programs = {name: str(tool(name)) for name in ("prometheus", "alertmanager")}
    prometheus, alertmanager = free_port(), free_port()
    receiver = Receiver()
    (directory / "rules.yaml").write_text(hurried_rules(held), "utf-8")
    (directory / "prometheus.yaml").write_text(_prometheus(targets, alertmanager), "utf-8")
    (directory / "alertmanager.yaml").write_text(_alertmanager(receiver.url), "utf-8")
    commands = (
        [
            programs["prometheus"],
            f"--config.file={directory}/prometheus.yaml",
            f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        ],
        [
            programs["alertmanager"],
            f"--config.file={directory}/alertmanager.yaml",
            f"--storage.path={directory}/alertmanager",
            f"--web.listen-address=127.0.0.1:{alertmanager}",
            "--cluster.listen-address=",
        ],
    )
    log = (directory / "watching.log").open("wb")
    # Alertmanager finds its templates beside itself.
    started = [subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(command[0]).parent) for command in commands]
    try:
        until(lambda: get(f"http://127.0.0.1:{alertmanager}/api/v2/status"), "Alertmanager answers")
        yield Watch(f"http://127.0.0.1:{prometheus}", f"http://127.0.0.1:{alertmanager}", receiver)
    finally:
        for process in started:
            process.kill()
            process.wait()
        log.close()
        receiver.server.shutdown()
        receiver.server.server_close()
