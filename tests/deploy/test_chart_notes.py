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


def test_it_says_how_much_is_shown():
    assert "what the policy says, corroborated at least" in notes(LEAST)
    assert "proven at least" in notes(merged(LEAST, {"policy": {"kv_cache": {"min_confidence": "proven"}}}))
    outside = notes(merged(LEAST, {"mode": "sidecar"}))
    assert "corroborated at most" in outside
    assert "proven" not in outside


def test_it_warns_of_an_image_that_nodes_do_not_find():
    assert "kvguard.image.repository: kvguard names no registry" in notes(LEAST)
    for values in ({"kvguard": {"image": {"repository": "r.example/kvguard"}}}, {"kvguard": {"delivery": "builtin"}}):
        assert "names no registry" not in notes(merged(LEAST, values))


def test_it_warns_of_what_the_cluster_may_lack():
    image = {"model": {"source": "image", "image": {"reference": "models/a:1"}}}
    assert "image volumes need Kubernetes 1.35, or 1.33 with" in notes(merged(LEAST, image))
    calibrated = {"engine": {"gpus": 2}, "model": {"cache": {"claim": "c"}}, "calibration": {"enabled": True, "claim": "c"}}
    assert "the Job needs 2 GPU(s) of its own" in notes(merged(LEAST, calibrated))
    itself = merged(calibrated, {"calibration": {"by": "replica"}})
    assert "the first pod that finds no scales measures them" in notes(merged(LEAST, itself))
    assert "of its own" not in notes(merged(LEAST, itself))
    for word in ("image volumes", "of its own", "networkPolicy.monitoring"):
        assert word not in notes(LEAST)
    closed = {"networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]}}
    assert "networkPolicy.monitoring is empty" in notes(merged(LEAST, closed))


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
