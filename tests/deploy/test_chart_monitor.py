"""templates/monitor.yaml: how the Prometheus operator finds both metrics pages."""

from __future__ import annotations

import pytest
from charts import LEAST, merged, of, one, render, with_least


def test_none_by_default():
    assert not of(with_least({}), "PodMonitor") + of(with_least({}), "ServiceMonitor")


@pytest.mark.parametrize(("kind", "endpoints"), [("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")])
def test_both_ports_are_scraped(kind, endpoints):
    manifests = with_least({"monitor": {"kind": kind, "interval": "30s", "labels": {"release": "prom"}}})
    monitor = one(manifests, kind)
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert [(item["port"], item["path"], item["interval"]) for item in monitor["spec"][endpoints]] == [
        ("management", "/metrics", "30s"),
        ("api", "/metrics", "30s"),
    ]


def test_a_service_monitor_selects_the_service_that_keeps_unready_pods():
    manifests = with_least({"monitor": {"kind": "ServiceMonitor"}, "shadow": {"mode": "reference"}})
    selector = one(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    selected = [
        item["metadata"]["name"] for item in of(manifests, "Service") if selector.items() <= item["metadata"]["labels"].items()
    ]
    assert selected == ["rel-kvguard-management"]


def test_a_pod_monitor_selects_the_engines():
    manifests = with_least({"monitor": {"kind": "PodMonitor"}})
    labels = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert one(manifests, "PodMonitor")["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_cluster_without_the_operator_gets_none():
    values = merged(LEAST, {"monitor": {"kind": "PodMonitor"}, "rules": {"enabled": True}})
    assert not of(render(values, apis=()), "PodMonitor") + of(render(values, apis=()), "PrometheusRule")
