"""templates/poddisruptionbudget.yaml."""

from __future__ import annotations

from charts import of, one, with_least


def test_off_by_default_and_never_in_the_way_of_refused_pods():
    assert not of(with_least({}), "PodDisruptionBudget")
    manifests = with_least({"podDisruptionBudget": {"enabled": True, "maxUnavailable": "25%"}})
    spec = one(manifests, "PodDisruptionBudget")["spec"]
    assert spec["maxUnavailable"] == "25%"
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert spec["selector"] == one(manifests, "Deployment")["spec"]["selector"]
