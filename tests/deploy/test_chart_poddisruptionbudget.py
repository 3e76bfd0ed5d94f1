"""templates/poddisruptionbudget.yaml."""

from __future__ import annotations

import pytest
from charts import LEAST, merged, of, one, rejected, with_least


def test_off_by_default_and_never_in_the_way_of_refused_pods():
    assert not of(with_least({}), "PodDisruptionBudget")
    manifests = with_least({"podDisruptionBudget": {"enabled": True, "maxUnavailable": "25%"}})
    spec = one(manifests, "PodDisruptionBudget")["spec"]
    assert spec["maxUnavailable"] == "25%"
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert spec["selector"] == one(manifests, "Deployment")["spec"]["selector"]


def test_a_groups_workers_count():
    values = {"mode": "sidecar", "multiNode": {"enabled": True}, "podDisruptionBudget": {"enabled": True}}
    manifests = with_least(values)
    selector = one(manifests, "PodDisruptionBudget")["spec"]["selector"]
    (chosen,) = selector["matchExpressions"]
    group = one(manifests, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    for which in ("leaderTemplate", "workerTemplate"):
        labels = group[which]["metadata"]["labels"]
        assert selector["matchLabels"].items() <= labels.items()
        assert labels[chosen["key"]] in chosen["values"]


@pytest.mark.parametrize("wrong", [-1, "101%", "one", "25 %"])
def test_what_is_no_number_of_pods_is_named(wrong):
    assert "/podDisruptionBudget/maxUnavailable" in rejected(merged(LEAST, {"podDisruptionBudget": {"maxUnavailable": wrong}}))
