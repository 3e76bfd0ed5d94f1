"""Monitors, rules, the scaled object and the Kyverno policy, against the schemas of the operators that read them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from charts import CI_VALUES, ROOT, Manifest, render
from toolbox import REQUIRED, node_modules

SCRIPT = Path(__file__).with_name("operator_kinds.mjs")
OPERATORS = ("monitoring.coreos.com/", "keda.sh/")


def judged(manifests: list[Manifest]) -> list[str]:
    packages = node_modules()
    if packages is None:
        reason = "no Node, or no schemas of operators' kinds: make tools"
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    command = ["node", "--input-type=module", "--eval", SCRIPT.read_text("utf-8")]
    given = json.dumps(manifests)
    done = subprocess.run(command, input=given, cwd=packages.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_operators_would_take_what_the_chart_and_the_folder_hold():
    manifests = [one for path in CI_VALUES for one in render(path) if one["apiVersion"].startswith(OPERATORS)]
    manifests.append(yaml.safe_load((ROOT / "deploy" / "admission" / "kyverno-cluster-policy.yaml").read_text("utf-8")))
    kinds = {one["kind"] for one in manifests}
    assert kinds == {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ScaledObject", "ClusterPolicy"}
    lines = judged(manifests)
    assert len(lines) == len(manifests)
    assert [line for line in lines if not line.startswith("ok ")] == []


def test_a_wrong_field_is_seen():
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "x"},
        "spec": {"selector": {}, "podMetricsEndpoints": [{"port": 5}]},
    }
    (line,) = judged([monitor])
    assert line.startswith("bad PodMonitor x: ")
    assert "port" in line
