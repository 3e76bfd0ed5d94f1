"""The chart as a whole: linted by both Helms, valid for the Kubernetes API, restricted pods, every value documented, used."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from charts import CHART, CI_VALUES, ROOT, Manifest, environment, helm, of, pod_specs, render

KUBERNETES = ("1.33", "1.36")
OPERATORS = {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ScaledObject", "LeaderWorkerSet"}


@pytest.fixture(params=CI_VALUES, ids=lambda path: path.stem.removesuffix("-values"))
def values(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def manifests(values: Any) -> list[Manifest]:
    return render(values)


def test_there_is_a_file_of_values_for_each_mode():
    chosen = [yaml.safe_load(path.read_text("utf-8")) for path in CI_VALUES]
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    assert {one.get("mode", "wrapper") for one in chosen} == set(schema["properties"]["mode"]["enum"])
    for section, key in (
        ("model", "source"),
        ("kvguard", "delivery"),
        ("shadow", "mode"),
        ("autoscaling", "kind"),
        ("monitor", "kind"),
    ):
        default = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))[section][key]
        seen = {one.get(section, {}).get(key, default) for one in chosen}
        assert seen == set(schema["properties"][section]["properties"][key]["enum"]), f"{section}.{key}"


@pytest.mark.parametrize("program", ["helm", "helm3"])
def test_helm_lints_it(values, program):
    done = helm("lint", "--strict", str(CHART), "--values", str(values), program=program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_it_can_be_packaged(tmp_path):
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kvguard-0.1.0.tgz"]


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_api_would_take_it(manifests, version):
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    checked = 0
    for manifest in manifests:
        if manifest["kind"] not in OPERATORS:
            validate.validate(manifest, version, strict=True)
            checked += 1
    assert checked >= 5
    # A group's templates are pods, whoever makes them.
    for where, spec in pod_specs(manifests):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-a-template"}, "spec": spec}
        validate.validate(pod, version, strict=True)
        assert spec["containers"], where


def test_a_field_that_the_api_does_not_know_is_seen(manifests):
    """The validation above can fail."""
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    spec = json.loads(json.dumps(pod_specs(manifests)[0][1]))
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-a-template"}, "spec": spec}
    validate.validate(pod, KUBERNETES[0], strict=True)
    spec["containers"][0]["livenessProb"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(pod, KUBERNETES[0], strict=True)


def test_names_are_unique_and_carry_the_labels(manifests):
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(names) == len(set(names))
    for one in manifests:
        if not one["kind"].startswith("ValidatingAdmission"):
            assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "rel", one["metadata"]["name"]
            assert len(one["metadata"]["name"]) <= 63


def test_every_container_says_what_it_needs_and_runs_no_shell(manifests):
    for where, spec in pod_specs(manifests):
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert "requests" in one["resources"], where
            assert one["command"][0] not in {"sh", "bash", "/bin/sh"}, where
            assert one["imagePullPolicy"] == "IfNotPresent", where
            assert not one["image"].endswith(":latest"), where


def test_every_mount_has_its_volume_and_every_volume_is_used(manifests):
    for where, spec in pod_specs(manifests):
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        mounted = {mount["name"] for one in containers for mount in one.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in spec.get("volumes", [])}, where


def test_what_is_written_to_has_a_volume(manifests):
    """The root file system is read-only: the paths in the environment lie on mounts that are not."""
    for where, spec in pod_specs(manifests):
        for one in spec["containers"]:
            writable = [mount["mountPath"] for mount in one.get("volumeMounts", []) if not mount.get("readOnly")]
            for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "KVGUARD_RUN_DIR"):
                path = environment(one).get(name) if "env" in one else None
                assert path is None or any(path == base or path.startswith(f"{base}/") for base in writable), (where, name)


def test_secrets_are_never_written_out(manifests):
    assert not of(manifests, "Secret")
    assert "token" not in {mount["name"] for _, spec in pod_specs(manifests) for mount in spec.get("volumes", [])}


def leaves(values: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for key, value in values.items():
        here = f"{path}.{key}" if path else key
        found |= leaves(value, here) if isinstance(value, dict) and value else {here}
    return found


def test_every_value_is_used():
    """Each leaf of values.yaml, or a section above it that is taken whole, is read by a template."""
    templates = "\n".join(path.read_text("utf-8") for path in sorted((CHART / "templates").rglob("*.*")))
    used = set(re.findall(r"(?:\$v|\.Values|\$\.Values)((?:\.[A-Za-z]\w*)+)", templates))
    prefixes = {name.removeprefix(".") for name in used}
    # Sections that a template takes with `with`, or hands to a helper as a whole.
    whole = {
        "kvguard.image",
        "engine.image",
        "model.tokenSecret",
        "engine.resources",
        "engine.apiKeySecret",
        "sidecar.resources",
        "helperResources",
        "model.downloadResources",
        "policy",
        "rules.alerts",
        "dashboards.labels",
    }
    assert whole <= prefixes
    short = {
        f"autoscaling.{name}" for name in re.findall(r"\$v\.(\w+)", (CHART / "templates" / "autoscaling.yaml").read_text())
    }
    for leaf in leaves(yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))):
        assert leaf in prefixes | short or any(leaf.startswith(f"{name}.") for name in whole), leaf


def test_every_value_that_is_used_exists():
    known = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    for path in sorted((CHART / "templates").rglob("*.*")):
        for name in re.findall(r"\.Values((?:\.[A-Za-z]\w*)+)", path.read_text("utf-8")):
            section: Any = known
            for key in name.removeprefix(".").split("."):
                assert key in section, f"{path.name}: .Values{name}"
                section = section[key]


def test_every_value_is_documented_and_in_the_readme():
    readme = (CHART / "README.md").read_text("utf-8")
    for row in re.findall(r"^\| `([\w.]+)` \| (.*) \| (.*) \|$", readme, re.MULTILINE):
        assert row[2], f"{row[0]} has no comment in values.yaml"
    known = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    for section in known:
        assert f"| `{section}" in readme


def test_versions_agree():
    import kvguard

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["appVersion"] == kvguard.__version__
    assert f"ARG VERSION={kvguard.__version__}" in (ROOT / "Dockerfile").read_text("utf-8")
