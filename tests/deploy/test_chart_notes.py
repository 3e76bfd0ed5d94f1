"""templates/NOTES.txt: how to see the verdict, and what was left out."""

from __future__ import annotations

from charts import LEAST, merged, notes


def test_it_says_how_to_see_the_verdict():
    text = notes(merged(LEAST, {"management": {"port": 9999}}))
    assert "port-forward deployment/rel-kvguard 9999" in text
    assert "helm test rel --namespace llm" in text
    assert "terminated.message" in text


def test_it_says_what_is_not_pinned():
    assert "model.revision is empty" in notes(LEAST)
    pinned = {"model": {"revision": "a" * 40, "cache": {"claim": "hub"}}}
    text = notes(merged(LEAST, pinned))
    assert "model.revision" not in text
    assert "model.cache.claim" not in text


def test_it_says_which_kinds_the_cluster_lacks():
    values = merged(
        LEAST,
        {
            "monitor": {"kind": "PodMonitor"},
            "rules": {"enabled": True},
            "autoscaling": {"kind": "keda", "prometheus": "http://p"},
        },
    )
    assert "this cluster does not know" not in notes(LEAST)
    text = notes(values)
    assert "monitor.kind: this cluster does not know" in text
    assert "rules.enabled: this cluster does not know" in text
    assert "autoscaling.kind: this cluster does not know" in text
