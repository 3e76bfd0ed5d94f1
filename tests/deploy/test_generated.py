"""`python deploy/generate --check`: what is generated is current, and asks for no metric that nobody defines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from charts import ROOT

GENERATE = ROOT / "deploy" / "generate"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GENERATE))


def run(*arguments: str, folder: Path = GENERATE) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(folder), *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_everything_is_as_generated():
    done = run("--check")
    assert done.returncode == 0, done.stderr


def test_a_changed_file_is_named(tmp_path):
    for name in ("deploy", "helm"):
        subprocess.run(["cp", "-R", str(ROOT / name), str(tmp_path / name)], check=True)
    target = tmp_path / "deploy" / "grafana" / "kvguard-fleet.json"
    target.write_text(target.read_text("utf-8").replace("Fleet", "Fleets"), "utf-8")
    done = run("--check", folder=tmp_path / "deploy" / "generate")
    assert done.returncode == 1
    assert done.stderr == "deploy/grafana/kvguard-fleet.json: not as generated; run python deploy/generate\n"
    assert run(folder=tmp_path / "deploy" / "generate").stdout == "deploy/grafana/kvguard-fleet.json\n"
    assert run("--check", folder=tmp_path / "deploy" / "generate").returncode == 0


def test_wrong_usage():
    assert run("--chek").returncode == 2


def test_a_panel_that_asks_for_an_unknown_metric_fails(generator):
    from dashboards import Dashboard, Panel, Query, UnknownMetric, render
    from metric_names import defined

    panel = Panel("P", "About.", (Query("rate(kvguard_proxy_request_total{HERE}[5m])"),))
    with pytest.raises(UnknownMetric, match="panel 'P': no metric kvguard_proxy_request_total"):
        render(Dashboard("u", "t", (panel,)), defined())


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ('sum by (pod) (rate(a_total{x="b", y=~"c|d"}[$__rate_interval])) > 0.5', {"a_total"}),
        ('a:b:c{x="sum(d)"} / on (namespace, pod) group_left (e) f == 1e3', {"a:b:c", "f"}),
        ("histogram_quantile(0.95, sum by (le) (rate(h_bucket[5m])))", {"h_bucket"}),
        ("vllm:x_total offset 5m unless on (pod) y and z or time() - w", {"vllm:x_total", "y", "z", "w"}),
        ('label_replace(a == 1, "figure", "kvguard_b", "", "")', {"a"}),
        ("count by (a, b) (last_over_time(m[5m]) == bool 1)", {"m"}),
    ],
)
def test_names_are_found_in_queries(generator, query, names):
    from metric_names import used

    assert used(query) == names


def test_names_are_those_that_really_are_exported(generator):
    """A page of kvguard's own: every sample on it is a name that queries may use."""
    from metric_names import defined
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    from kvguard.guard.gate import Status
    from kvguard.shadow.report import ShadowReport
    from kvguard.telemetry.metrics import GuardCollector, ProxyMetrics
    from kvguard.telemetry.shadow_metrics import ShadowCollector

    registry = CollectorRegistry()
    registry.register(GuardCollector(Status))
    registry.register(ShadowCollector(ShadowReport))
    proxy = ProxyMetrics(registry)
    proxy.request_started("/v1/models")
    proxy.finished("/v1/models", "GET", 200, 0.1, "ok")
    families = text_string_to_metric_families(generate_latest(registry).decode())
    names = {sample.name for family in families for sample in family.samples}
    assert len(names) > 10
    assert names <= defined()
