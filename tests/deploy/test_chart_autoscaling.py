"""templates/autoscaling.yaml: by requests, never by CPU or KV memory."""

from __future__ import annotations

import json

from charts import LEAST, merged, of, one, render, with_least

from kvguard.telemetry.metrics import FAMILIES

NAMES = {family.name for family in FAMILIES}


def test_none_by_default():
    assert not of(with_least({}), "HorizontalPodAutoscaler") + of(with_least({}), "ScaledObject")


def test_hpa_reads_waiting_and_running():
    manifests = with_least({"autoscaling": {"kind": "hpa", "minReplicas": 2, "maxReplicas": 8, "waiting": 3}})
    spec = one(manifests, "HorizontalPodAutoscaler")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    assert spec["scaleTargetRef"]["name"] == one(manifests, "Deployment")["metadata"]["name"]
    metrics = {item["pods"]["metric"]["name"]: item["pods"]["target"]["averageValue"] for item in spec["metrics"]}
    assert metrics == {"kvguard_batch_waiting_requests": "3", "kvguard_batch_running_requests": "64"}
    assert metrics.keys() <= NAMES
    assert "cpu" not in json.dumps(spec).lower()


KEDA = {"autoscaling": {"kind": "keda", "prometheus": "http://p:9090", "waiting": 2.5}, "monitor": {"kind": "PodMonitor"}}


def test_keda_asks_prometheus_for_this_release_only():
    spec = one(with_least(KEDA), "ScaledObject")["spec"]
    for trigger in spec["triggers"]:
        query = trigger["metadata"]["query"]
        assert query.startswith("sum(kvguard_batch_")
        assert 'namespace="llm",pod=~"rel-kvguard-[0-9a-z]+-[0-9a-z]+"' in query
        assert trigger["metadata"]["serverAddress"] == "http://p:9090"
    assert {trigger["metadata"]["threshold"] for trigger in spec["triggers"]} == {"2.5", "64"}


def test_both_take_replicas_away_slowly():
    hpa = one(with_least({"autoscaling": {"kind": "hpa"}}), "HorizontalPodAutoscaler")["spec"]["behavior"]
    keda = one(with_least(KEDA), "ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert keda == hpa
    assert hpa["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert hpa["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 300}]


def test_keda_is_left_out_where_the_cluster_has_none():
    assert not of(render(merged(LEAST, KEDA), apis=()), "ScaledObject")
