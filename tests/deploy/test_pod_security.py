"""Rendered pods pass the restricted pod security standard, in every mode; and what would not pass is seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from charts import CI_VALUES, pod_specs, render, with_least
from pod_security import violations


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem.removesuffix("-values"))
def test_pods_are_restricted(values: Any) -> None:
    specs = pod_specs(render(values))
    assert len(specs) >= 2, "the engine's and the helm test's"
    for where, spec in specs:
        assert violations(spec) == [], where


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem.removesuffix("-values"))
def test_beyond_the_standard_nothing_is_written_outside_of_volumes_and_nobody_has_a_token(values: Any) -> None:
    for where, spec in pod_specs(render(values)):
        assert spec["automountServiceAccountToken"] is False, where
        assert spec["securityContext"]["runAsUser"] > 0, where
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert one["securityContext"]["readOnlyRootFilesystem"] is True, where


def changed(path: str, value: Any) -> dict[str, Any]:
    """The least pod with one thing other: a path of keys from its spec."""
    spec = copy.deepcopy(next(spec for where, spec in pod_specs(with_least({})) if where.startswith("Deployment")))
    *parents, last = path.split(".")
    place: Any = spec
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return spec


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("hostNetwork", True, "hostNetwork"),
        ("hostPID", True, "hostPID"),
        ("hostIPC", True, "hostIPC"),
        ("volumes", [{"name": "v", "hostPath": {"path": "/"}}], "volume v: hostPath"),
        ("volumes", [{"name": "v", "nfs": {}}], "volume v: nfs"),
        ("securityContext.runAsUser", 0, "runAsUser 0"),
        ("securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}], "sysctl kernel.msgmax"),
        ("securityContext.seccompProfile", {"type": "Unconfined"}, "containers vllm: seccompProfile"),
        ("securityContext.seLinuxOptions", {"type": "spc_t"}, "seLinuxOptions"),
        ("securityContext.appArmorProfile", {"type": "Unconfined"}, "appArmorProfile"),
        ("containers.0.securityContext.privileged", True, "containers vllm: privileged"),
        ("containers.0.securityContext.allowPrivilegeEscalation", None, "containers vllm: allowPrivilegeEscalation"),
        ("containers.0.securityContext.runAsNonRoot", False, "containers vllm: runAsNonRoot"),
        ("containers.0.securityContext.runAsUser", 0, "containers vllm: runAsUser 0"),
        ("containers.0.securityContext.capabilities", {"drop": ["NET_RAW"]}, "containers vllm: capabilities: ALL not dropped"),
        (
            "containers.0.securityContext.capabilities",
            {"drop": ["ALL"], "add": ["SYS_PTRACE"]},
            "containers vllm: capabilities added",
        ),
        ("containers.0.securityContext.procMount", "Unmasked", "containers vllm: procMount"),
        ("containers.0.ports.0.hostPort", 8000, "containers vllm: hostPort"),
        ("containers.0.livenessProbe.httpGet.host", "10.0.0.1", "containers vllm: livenessProbe: another host"),
        ("initContainers.0.securityContext", {}, "initContainers kvguard: capabilities: ALL not dropped"),
    ],
)
def test_what_the_standard_forbids_is_seen(path: str, value: Any, said: str) -> None:
    assert violations(changed("hostNetwork", False)) == []
    assert said in violations(changed(path, value))
