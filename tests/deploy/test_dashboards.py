"""The dashboards against the rules of Grafana's dashboard linter, and every query against Prometheus' own parser."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import ROOT, tool
from panels import MAY_BE_EMPTY, all_find, queries
from prometheus_client import CollectorRegistry, start_http_server
from watching import watched

from fake_engine import Faulty
from kvguard.shadow.models import Stratum
from kvguard.telemetry.shadow_metrics import ShadowCollector
from shadow_reports import full_report

FILES = sorted((ROOT / "deploy" / "grafana").glob("*.json"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text("utf-8"))


def targets(dashboard: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(panel["title"], target) for panel in dashboard["panels"] for target in panel["targets"]]


def test_there_are_four():
    assert [path.stem for path in FILES] == ["kvguard-fleet", "kvguard-memory", "kvguard-proxy", "kvguard-quality"]


def test_data_source_job_and_instance_are_variables(dashboard):
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["datasource"]["label"] == "Data source"
    for name in ("job", "instance"):
        one = variables[name]
        assert one["type"] == "query"
        assert one["label"] == name.capitalize()
        assert (one["multi"], one["allValue"], one["refresh"]) == (True, ".+", 2)
        assert one["datasource"]["uid"] == "$datasource"
        assert re.fullmatch(r"label_values\([a-z_]+(\{.*\})?, \w+\)", one["query"])


def test_it_cannot_be_edited_in_place(dashboard):
    assert dashboard["editable"] is False


def test_each_panel_is_titled_described_and_in_a_unit(dashboard):
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(titles) == len(set(titles))
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert re.search(r"\. Metrics: [a-z][a-z0-9_:]+(, [a-z][a-z0-9_:]+)*\.$", panel["description"]), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "$datasource"
        assert panel["targets"]


def test_panels_fill_the_grid_without_overlap(dashboard):
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_selector_has_job_and_instance(dashboard):
    """Recorded series have no instance: they are sums over replicas."""
    for title, target in targets(dashboard):
        selectors = re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", target["expr"])
        assert selectors, title
        for name, matchers in selectors:
            assert 'job=~"$job"' in matchers, f"{title}: {name}"
            assert 'instance=~"$instance"' in matchers or name.startswith("namespace_job"), f"{title}: {name}"


def test_rates_follow_the_scrape_interval_and_counters_are_rated(dashboard):
    for title, target in targets(dashboard):
        expr = target["expr"]
        for window in re.findall(r"\[([^\]]*)\]", expr):
            assert window == "$__rate_interval", title
        for counter in re.finditer(r"[a-z_:]+_(?:total|bucket)\{", expr):
            assert expr[: counter.start()].endswith(("rate(", "increase(")), f"{title}: {counter[0]}"


def test_prometheus_reads_every_query(tmp_path):
    """Each one as a recording rule, which promtool parses."""
    rules = []
    for path in FILES:
        for title, target in targets(json.loads(path.read_text("utf-8"))):
            expr = target["expr"].replace("$__rate_interval", "5m")
            rules.append({"record": f"panel:{len(rules)}:{re.sub(r'[^a-z]', '_', title.lower())}", "expr": expr})
    assert len(rules) > 45
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), "utf-8")
    done = subprocess.run(
        [str(tool("promtool")), "check", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


RECORDED = Path(__file__).with_name("vllm-0.32.0.metrics").read_bytes()
"""Of /metrics of vLLM 0.32.0 on a CPU, as it answered: figures that the engine in miniature does not have."""
NOT_COUNTED = "Preemptions"
"""The panel of kvguard's copy of a figure that the engine in miniature does not count."""


class _Recorded(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.send_header("content-length", str(len(RECORDED)))
        self.end_headers()
        self.wfile.write(RECORDED)

    def log_message(self, *_: object) -> None: ...


def test_every_query_finds_what_kvguard_exports(tmp_path):
    """A real Prometheus over a `kvguard serve` of an engine in miniature, a real engine's page, and the probes' collector."""
    probes = CollectorRegistry()
    report = full_report([Stratum("0-256", "1", "")])
    probes.register(ShadowCollector(lambda: report))
    server, thread = start_http_server(0, "127.0.0.1", probes)
    recorded = ThreadingHTTPServer(("127.0.0.1", 0), _Recorded)
    recording = threading.Thread(target=recorded.serve_forever, daemon=True)
    recording.start()
    served = Faulty(tmp_path)
    try:
        served.wait_ready()
        ports = (served.management_port, served.port, server.server_port, recorded.server_port)
        with watched(tmp_path, *(f"127.0.0.1:{port}" for port in ports)) as watch:
            asked = [one for one in queries() if one.panel != NOT_COUNTED]
            assert len(asked) > 55
            all_find(watch, asked, lambda: served.chat("a"), 300)
    finally:
        served.close()
        for one, its in ((server, thread), (recorded, recording)):
            one.shutdown()
            one.server_close()
            its.join()


def test_a_panel_that_may_be_empty_says_when():
    for title, words in MAY_BE_EMPTY.items():
        assert any(one.panel == title and words in one.about for one in queries()), title
