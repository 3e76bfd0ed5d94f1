"""Renders the chart as Helm does, and reads what came out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from toolbox import REQUIRED, find

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvguard"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
OPERATORS = (
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "keda.sh/v1alpha1/ScaledObject",
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
)
"""Kinds that a cluster with all three operators knows."""

LEAST: dict[str, Any] = {"model": {"name": "Qwen/Qwen3-8B"}}

Manifest = dict[str, Any]


def tool(name: str) -> Path:
    """A program's path; the test skips without it, or fails where all are required."""
    path = find(name)
    if path is None:
        reason = f"{name} is not on this machine: make tools"
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    return path


def helm(*arguments: str, program: str = "helm", stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm. It never asks a cluster here."""
    command = [str(tool(program)), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


@cache
def _render(values: str, apis: tuple[str, ...], notes: bool) -> str:
    flags = [part for api in apis for part in ("--api-versions", api)]
    command = ("install", "--dry-run=client") if notes else ("template",)
    done = helm(*command, "rel", str(CHART), "--namespace", "llm", "--values", "-", *flags, stdin=values)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values: dict[str, Any] | Path, apis: Iterable[str] = OPERATORS) -> list[Manifest]:
    """Every manifest of a release named rel in namespace llm."""
    given = values.read_text("utf-8") if isinstance(values, Path) else json.dumps(values)
    return [document for document in yaml.safe_load_all(_render(given, tuple(apis), False)) if document]


def notes(values: dict[str, Any]) -> str:
    """What the person who installs is told, on a cluster without operators."""
    return _render(json.dumps(values), (), True).partition("\nNOTES:\n")[2]


def rejected(values: dict[str, Any], program: str = "helm") -> str:
    """Helm's message for values that it must refuse."""
    done = helm("template", "rel", str(CHART), "--values", "-", program=program, stdin=json.dumps(values))
    assert done.returncode != 0, "these values were accepted"
    return done.stderr


def of(manifests: list[Manifest], kind: str, name: str | None = None) -> list[Manifest]:
    """The manifests of a kind, and of a name where one is given."""
    return [one for one in manifests if one["kind"] == kind and name in (None, one["metadata"]["name"])]


def one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only such manifest."""
    (found,) = of(manifests, kind, name)
    return found


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Values on values, deeply."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            before = result.get(key)
            result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def with_least(values: dict[str, Any]) -> list[Manifest]:
    """What these values render, with a model named."""
    return render(merged(LEAST, values))


def pod_specs(manifests: list[Manifest]) -> list[tuple[str, Manifest]]:
    """Every pod spec with where it stands."""
    specs = []
    for manifest in manifests:
        where = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            specs.append((where, manifest["spec"]))
        elif manifest["kind"] == "LeaderWorkerSet":
            group = manifest["spec"]["leaderWorkerTemplate"]
            specs += [(f"{where} {which}", group[f"{which}Template"]["spec"]) for which in ("leader", "worker")]
        elif "template" in manifest.get("spec", {}):
            specs.append((where, manifest["spec"]["template"]["spec"]))
    return specs


def container(spec: Manifest, name: str = "vllm") -> Manifest:
    """A container of a pod spec, init containers among them."""
    (found,) = [item for item in [*spec["containers"], *spec.get("initContainers", [])] if item["name"] == name]
    return found


def environment(of_container: Manifest) -> dict[str, Any]:
    """Names to values, or to where a value comes from."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in of_container["env"]}
