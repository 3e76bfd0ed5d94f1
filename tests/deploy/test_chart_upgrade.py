"""A release's life by Helm's own commands: install, upgrade, test, roll back, uninstall.

The server is `api_server`, a stand-in on loopback. It has no controllers, no kubelet and no nodes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import Object, Refused, Store, api_server, read, strategic
from charts import CHART, CI_VALUES, merged, tool

LEAST: Object = {"model": {"name": "Qwen/Qwen3-8B"}, "policy": {"kv_cache": {"dtype": "fp8_e4m3", "scales": "unit"}}}
SCALED: Object = {"replicas": 2, "autoscaling": {"kind": "hpa", "minReplicas": 2, "maxReplicas": 9}}
GROUP: Object = {"mode": "sidecar", "multiNode": {"enabled": True}}
KEPT = ("Secret",)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Helm, one major version of it, and what it talks to."""

    program: str
    store: Store
    kubeconfig: Path

    def __call__(self, *arguments: str, values: Object | None = None, release: str = "rel") -> subprocess.CompletedProcess[str]:
        command, *rest = arguments
        flags = ["--kubeconfig", str(self.kubeconfig), "--namespace", "llm"]
        given = ["--values", "-"] if values is not None else []
        return subprocess.run(
            [str(tool(self.program)), command, release, *rest, *given, *flags],
            input=json.dumps(values) if values is not None else None,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def done(self, *arguments: str, values: Object | None = None, release: str = "rel") -> str:
        """The same, and it must succeed."""
        result = self(*arguments, values=values, release=release)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def live(self) -> dict[tuple[str, str], Object]:
        """Specs and data by kind and name, Helm's own records left out."""
        return {
            (item["kind"], item["metadata"]["name"]): {
                **{name: value for name, value in item.items() if name != "metadata"},
                "labels": item["metadata"].get("labels", {}),
            }
            for item in self.store.objects.values()
            if item["kind"] not in KEPT
        }

    def engines(self) -> Object:
        """The Deployment's spec."""
        return self.store.kept("Deployment")["rel-kvguard"]["spec"]


Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    opened = []

    def cluster(program: str = "helm", *, operators: bool = False) -> Cluster:
        server = api_server(tmp_path, operators=operators)
        store, kubeconfig = server.__enter__()
        opened.append(server)
        return Cluster(program, store, kubeconfig)

    yield cluster
    for server in opened:
        server.__exit__(None, None, None)


HELMS = pytest.mark.parametrize("program", ["helm", "helm3"])


LIVES = [
    pytest.param(program, path, id=f"{path.stem.removesuffix('-values')}-{program}")
    for program, chosen in (
        ("helm", CI_VALUES),
        ("helm3", [one for one in CI_VALUES if one.stem.startswith(("pvc", "mul", "wra"))]),
    )
    for path in chosen
]


@pytest.mark.parametrize(("program", "path"), LIVES)
def test_a_release_comes_changes_goes_back_and_goes(make, program, path):
    values = yaml.safe_load(path.read_text("utf-8"))
    cluster = make(program, operators=True)
    cluster.done("install", str(CHART), values=values)
    installed = cluster.live()
    assert len(installed) >= 4
    other: Object = {
        "policy": {"kv_cache": {"min_confidence": "echoed"}},
        "rollout": {"strategy": "Recreate" if "rollout" not in values else "RollingUpdate"},
        "engine": {"args": [*values.get("engine", {}).get("args", []), "--enforce-eager"]},
        "nodeSelector": {"pool": "gpu"},
        "service": {"type": "NodePort"},
        "env": [{"name": "A", "value": "b"}],
    }
    cluster.done("upgrade", str(CHART), values=merged(values, other))
    changed = cluster.live()
    assert changed != installed
    assert {kind for kind, _ in changed} == {kind for kind, _ in installed}
    cluster.done("test")
    assert not cluster.store.kept("Pod"), "a test that succeeded leaves nothing"
    cluster.done("rollback", "1")
    assert cluster.live() == installed
    cluster.done("uninstall")
    assert not cluster.store.objects


@HELMS
def test_a_model_and_a_policy_are_enough(make, program):
    cluster = make(program)
    said = cluster.done("install", str(CHART), values=LEAST)
    assert "helm test rel --namespace llm" in said
    assert {kind for kind, _ in cluster.live()} == {"ServiceAccount", "ConfigMap", "Service", "Deployment"}


@HELMS
def test_kinds_of_operators_come_with_them_and_go_back(make, program):
    wanted = merged(LEAST, {"monitor": {"kind": "PodMonitor"}, "rules": {"enabled": True}, "dashboards": {"enabled": True}})
    bare = make(program)
    assert "this cluster does not know monitoring.coreos.com/v1 PodMonitor" in bare.done("install", str(CHART), values=wanted)
    assert "PodMonitor" not in {kind for kind, _ in bare.live()}
    full = make(program, operators=True)
    full.done("install", str(CHART), values=LEAST)
    full.done("upgrade", str(CHART), values=wanted)
    assert {"PodMonitor", "PrometheusRule"} <= {kind for kind, _ in full.live()}
    full.done("rollback", "1")
    assert {kind for kind, _ in full.live()} == {"ServiceAccount", "ConfigMap", "Service", "Deployment"}


@HELMS
def test_a_rollback_brings_the_policy_and_rolls_the_pods(make, program):
    cluster = make(program)
    cluster.done("install", str(CHART), values=LEAST)

    def policy() -> tuple[str, str]:
        stamp = cluster.engines()["template"]["metadata"]["annotations"]["kvguard.dev/policy-checksum"]
        return stamp, cluster.store.kept("ConfigMap")["rel-kvguard-policy"]["data"]["policy.yaml"]

    first = policy()
    cluster.done("upgrade", str(CHART), values=merged(LEAST, {"policy": {"kv_cache": {"dtype": "16bit", "scales": "any"}}}))
    second = policy()
    assert all(before != after for before, after in zip(first, second, strict=True))
    cluster.done("rollback", "1")
    assert policy() == first


@HELMS
def test_a_new_chart_alone_rolls_no_engine(make, program, tmp_path):
    """Its version is on objects and not on pods: loading weights again for a new alert would be dear."""
    cluster = make(program)
    cluster.done("install", str(CHART), values=merged(LEAST, {"kvguard": {"image": {"tag": "0.1.0"}}}))
    before = cluster.engines()["template"]
    packaged = ["package", "--version", "0.2.0+g1a2b3c", "--app-version", "0.2.0+g1a2b3c", "--destination", str(tmp_path)]
    subprocess.run([str(tool("helm")), *packaged, str(CHART)], check=True, capture_output=True, timeout=120)
    (newer,) = tmp_path.glob("*.tgz")
    cluster.done("upgrade", str(newer), values=merged(LEAST, {"kvguard": {"image": {"tag": "0.1.0"}}}))
    labels = cluster.store.kept("Deployment")["rel-kvguard"]["metadata"]["labels"]
    assert labels["helm.sh/chart"] == "kvguard-0.2.0_g1a2b3c"
    assert labels["app.kubernetes.io/version"] == "0.2.0_g1a2b3c"
    assert cluster.engines()["template"] == before


@HELMS
@pytest.mark.parametrize(("release", "name"), [("qwen2.5", "qwen2-5-kvguard"), ("kvguard", "kvguard"), ("r" * 53, "r" * 40)])
def test_releases_may_be_called_like_models(make, program, release, name):
    cluster = make(program)
    everything = {"calibration": {"enabled": True, "claim": "scales"}, "model": {"cache": {"claim": "hub"}}}
    runtime = {"policy": {"kv_cache": {"scales": "runtime"}}}
    cluster.done("install", str(CHART), values=merged(LEAST, everything, runtime), release=release)
    assert name in cluster.store.kept("Deployment")
    cluster.done("uninstall", release=release)
    assert not cluster.store.objects


@pytest.mark.parametrize("word", ["on", "null"])
def test_a_name_that_yaml_reads_as_something_else_is_refused_by_name(make, word):
    done = make()("install", str(CHART), values=merged(LEAST, {"fullnameOverride": word}))
    assert done.returncode != 0
    assert "fullnameOverride" in done.stderr


def test_a_release_that_yaml_reads_as_a_number_is_a_string(make):
    cluster = make()
    cluster.done("install", str(CHART), values=merged(LEAST, {"fullnameOverride": "llm"}), release="1e5")
    assert cluster.store.kept("Deployment")["llm"]["metadata"]["labels"]["app.kubernetes.io/instance"] == "1e5"


@HELMS
def test_large_numbers_are_written_as_digits(make, program):
    """OpenShift's users are ten digits long, and values come as floating point."""
    cluster = make(program)
    large = {"runAsUser": 1000680000, "shadow": {"mode": "in-engine", "settings": {"max_tokens": 2000000, "rate": 0.01}}}
    cluster.done("install", str(CHART), values=merged(LEAST, large))
    spec = cluster.engines()["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1000680000
    assert {"max-tokens=2000000", "rate=0.01"} <= set(spec["containers"][0]["args"])


@HELMS
def test_values_of_an_older_chart_get_a_message_and_a_way(make, program, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(CHART, older)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    for key in ("multiNode", "listenHost", "helperResources"):
        del defaults[key]
    (older / "values.yaml").write_text(yaml.safe_dump(defaults), "utf-8")
    (older / "files" / "keys.txt").write_text("", "utf-8")
    for name in ("leaderworkerset.yaml",):
        (older / "templates" / name).unlink()
    # What such a chart rendered does not matter here, its values do.
    for path in (older / "templates").rglob("*.*"):
        if path.suffix == ".yaml" and path.name != "policy.yaml":
            path.unlink()
    (older / "templates" / "NOTES.txt").unlink()
    cluster = make(program)
    cluster.done("install", str(older), values=LEAST)
    refused = cluster("upgrade", str(CHART), "--reuse-values")
    assert refused.returncode != 0
    assert "missing among the values" in refused.stderr
    assert "--reset-then-reuse-values" in refused.stderr
    cluster.done("upgrade", str(CHART), "--reset-then-reuse-values")
    assert "rel-kvguard" in cluster.store.kept("Deployment")


@HELMS
def test_selectors_cannot_be_changed_and_the_message_says_what_to_do(make, program):
    cluster = make(program)
    fixed = merged(LEAST, {"fullnameOverride": "rel-kvguard"})
    cluster.done("install", str(CHART), values=fixed)
    done = cluster("upgrade", str(CHART), values=merged(fixed, {"nameOverride": "other"}))
    assert done.returncode != 0
    assert "nameOverride: the Deployment rel-kvguard selects pods by" in done.stderr
    assert "immutable" not in done.stderr


@HELMS
def test_a_calibration_job_is_replaced_and_never_changed(make, program):
    measured = merged(
        LEAST,
        {"model": {"cache": {"claim": "hub"}}, "calibration": {"enabled": True, "claim": "scales"}},
        {"policy": {"kv_cache": {"scales": "runtime"}}},
    )
    cluster = make(program)
    cluster.done("install", str(CHART), values=measured)
    (first,) = cluster.store.kept("Job")
    cluster.done("upgrade", str(CHART), values=merged(measured, {"tolerations": [{"operator": "Exists"}]}))
    (second,) = cluster.store.kept("Job")
    assert first != second
    cluster.done("rollback", "1")
    assert list(cluster.store.kept("Job")) == [first]
    cluster.done("upgrade", str(CHART), values=merged(measured, {"calibration": {"by": "replica"}}))
    assert not cluster.store.kept("Job")


@pytest.mark.parametrize("live", [5, 0])
def test_helm_4_leaves_the_number_to_who_scaled(make, live):
    """It applies on the server: a number that is said again would be a conflict after a rollback, whatever it is by then."""
    cluster = make("helm")
    cluster.done("install", str(CHART), values=SCALED | LEAST)
    assert cluster.engines()["replicas"] == 1
    cluster.store.scale("rel-kvguard", live)
    cluster.done("upgrade", str(CHART), values=merged(SCALED, LEAST, {"nodeSelector": {"pool": "a"}}))
    assert cluster.engines()["replicas"] == live
    cluster.store.scale("rel-kvguard", 7)
    cluster.done("rollback", "1")
    assert cluster.engines()["replicas"] == 7


def test_helm_4_turns_autoscaling_on_without_a_reset(make):
    cluster = make("helm")
    cluster.done("install", str(CHART), values=merged(LEAST, {"replicas": 3}))
    cluster.done("upgrade", str(CHART), values=merged(LEAST, SCALED))
    assert cluster.engines()["replicas"] == 3
    cluster.store.scale("rel-kvguard", 6)
    cluster.done("upgrade", str(CHART), values=merged(LEAST, SCALED, {"nodeSelector": {"pool": "a"}}))
    assert cluster.engines()["replicas"] == 6
    # Back to a number that was said, against who scales: refused, until it is asked for.
    refused = cluster("rollback", "1")
    assert refused.returncode != 0
    assert "conflict" in refused.stderr
    cluster.done("rollback", "1", "--force-conflicts")
    assert cluster.engines()["replicas"] == 3


@pytest.mark.parametrize("live", [5, 0])
def test_helm_3_says_the_live_number_again(make, live):
    """Also in the upgrade that turns autoscaling on: a field that is left out after it was there would be reset to 1."""
    cluster = make("helm3")
    cluster.done("install", str(CHART), values=merged(LEAST, {"replicas": 2}))
    cluster.store.scale("rel-kvguard", live)
    for _ in range(2):
        cluster.done("upgrade", str(CHART), values=merged(LEAST, SCALED))
        assert cluster.engines()["replicas"] == live


def test_a_group_is_scaled_likewise(make):
    cluster = make("helm", operators=True)
    cluster.done("install", str(CHART), values=merged(LEAST, SCALED, GROUP))
    (group,) = cluster.store.kept("LeaderWorkerSet").values()
    assert group["spec"]["replicas"] == 1
    cluster.store.scale("rel-kvguard-group", 5)
    cluster.done("upgrade", str(CHART), values=merged(LEAST, SCALED, GROUP, {"nodeSelector": {"pool": "a"}}))
    assert cluster.store.kept("LeaderWorkerSet")["rel-kvguard-group"]["spec"]["replicas"] == 5


def test_without_an_autoscaler_the_value_holds(make):
    cluster = make("helm")
    cluster.done("install", str(CHART), values=merged(LEAST, {"replicas": 3}))
    cluster.done("upgrade", str(CHART), values=merged(LEAST, {"replicas": 4}))
    assert cluster.engines()["replicas"] == 4


@HELMS
def test_a_mode_is_changed_in_place(make, program):
    """Selectors are the same in all modes; a group of nodes takes the Deployment's place, and its Service stays."""
    cluster = make(program, operators=True)
    cluster.done("install", str(CHART), values=LEAST)
    sidecar = merged(LEAST, {"mode": "sidecar", "engine": {"args": ["--kv-cache-dtype", "fp8_e4m3"]}})
    cluster.done("upgrade", str(CHART), values=sidecar)
    assert [one["name"] for one in cluster.engines()["template"]["spec"]["containers"]] == ["kvguard"]
    cluster.done("upgrade", str(CHART), values=merged(sidecar, GROUP))
    assert not cluster.store.kept("Deployment")
    cluster.done("rollback", "1")
    assert [one["name"] for one in cluster.engines()["template"]["spec"]["containers"]] == ["vllm"]
    assert not cluster.store.kept("LeaderWorkerSet")


# What the stand-in refuses: without these, the tests above could pass against anything.

KEY = ("apps/v1", "deployments", "llm", "d")


def deployment() -> Object:
    security = {"allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "c",
        "image": "i",
        "resources": {"requests": {"cpu": "1"}},
        "securityContext": security | {"seccompProfile": {"type": "RuntimeDefault"}},
    }
    return {
        **{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d", "labels": {"a": "b"}}},
        "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}},
        },
    }


def changed(path: tuple[Any, ...], value: Any) -> Object:
    item = deployment()
    at: Any = item
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return item


CONTAINER = ("spec", "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("metadata", "name"), "a_b", "metadata.name"),
        (("metadata", "labels"), {"a": "0.1.0+g1"}, "metadata.labels"),
        (("metadata", "labels"), {"a": 1}, "unmarshal"),
        (("metadata", "annotations"), {"a": "x" * 300_000}, "256 KiB"),
        (("spec", "replica"), 2, "strict decoding error"),
        (("spec", "template", "metadata", "labels"), {"a": "c"}, "does not match"),
        (("spec", "strategy"), {"type": "Recreate", "rollingUpdate": {"maxSurge": 0}}, "may not be specified"),
        ((*CONTAINER, "volumeMounts"), [{"name": "v", "mountPath": "/v"}], "not found"),
        ((*CONTAINER, "resources"), {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}, "above the limit"),
        ((*CONTAINER, "securityContext"), {}, "PodSecurity"),
        (("spec", "template", "spec", "volumes"), [{"name": "v", "emptyDir": {}}] * 2, "duplicate"),
    ],
)
def test_the_stand_in_refuses(path, value, said):
    store = Store(operators=False)
    store.apply(KEY, deployment(), "helm", force=False)
    with pytest.raises(Refused, match=said):
        store.apply(KEY, changed(path, value), "helm", force=False)


def test_the_stand_in_keeps_what_cannot_be_changed():
    store = Store(operators=False)
    store.apply(KEY, deployment(), "helm", force=False)
    other = deployment()
    for at in (other["spec"]["selector"]["matchLabels"], other["spec"]["template"]["metadata"]["labels"]):
        at["more"] = "c"
    with pytest.raises(Refused, match="immutable"):
        store.apply(KEY, other, "helm", force=False)


def test_the_stand_in_knows_owners():
    store = Store(operators=False)
    store.apply(KEY, changed(("spec", "replicas"), 2), "helm", force=False)
    store.scale("d", 5)
    with pytest.raises(Refused, match="conflict"):
        store.apply(KEY, changed(("spec", "replicas"), 3), "helm", force=False)
    store.apply(KEY, deployment(), "helm", force=False)
    assert store.objects[KEY]["spec"]["replicas"] == 5, "who scaled owns it still"
    store.apply(KEY, changed(("spec", "minReadySeconds"), 9), "helm", force=False)
    store.apply(KEY, deployment(), "helm", force=False)
    assert "minReadySeconds" not in store.objects[KEY]["spec"], "nobody else owned it"
    assert read(store.objects[KEY], ("spec", "template", "spec", "containers", ("name", "c"), "image")) == "i"


def test_the_stand_in_merges_as_helm_3_asks():
    live = {
        "a": 1,
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "strategy": {"type": "x", "rollingUpdate": {}},
    }
    patch = {
        "a": None,
        "env": [{"name": "B", "$patch": "delete"}, {"name": "A", "value": "3"}, {"name": "C", "value": "4"}],
        "strategy": {"$retainKeys": ["type"], "type": "Recreate"},
    }
    assert strategic(live, patch) == {
        "env": [{"name": "A", "value": "3"}, {"name": "C", "value": "4"}],
        "strategy": {"type": "Recreate"},
    }
