"""templates/dashboards.yaml: the dashboards of deploy/grafana for Grafana's sidecar."""

from __future__ import annotations

import json

from charts import ROOT, of, one, with_least


def test_off_by_default():
    assert "rel-kvguard-dashboards" not in {item["metadata"]["name"] for item in of(with_least({}), "ConfigMap")}


def test_they_arrive_whole():
    values = {"dashboards": {"enabled": True, "annotations": {"grafana_folder": "LLM"}}}
    found = one(with_least(values), "ConfigMap", "rel-kvguard-dashboards")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    files = {path.name: path for path in (ROOT / "deploy" / "grafana").glob("*.json")}
    assert found["data"].keys() == files.keys()
    for name, text in found["data"].items():
        assert json.loads(text) == json.loads(files[name].read_text("utf-8"))
    assert sum(len(text) for text in found["data"].values()) < 900_000  # a ConfigMap holds 1 MiB
