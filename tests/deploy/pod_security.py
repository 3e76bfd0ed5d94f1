"""Kubernetes' pod security standard `restricted` (baseline included), rule by rule, over a pod spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret", "image"}
)
"""Kinds of volumes that it lists; `image` only in newer clusters, which the docs say."""

SAFE_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.ping_group_range",
    }
)
_SECCOMP = ("RuntimeDefault", "Localhost")
_SELINUX = (None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_APPARMOR = (None, "RuntimeDefault", "Localhost")


def violations(spec: dict[str, Any]) -> list[str]:
    """What the standard forbids in this pod, in words; [] when it is admitted."""
    return list(_pod(spec)) + [
        f"{kind} {one['name']}: {why}"
        for kind in ("containers", "initContainers", "ephemeralContainers")
        for one in spec.get(kind, [])
        for why in _container(one, spec.get("securityContext", {}))
    ]


def _pod(spec: dict[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", []):
        for kind in volume.keys() - {"name"} - VOLUMES:
            yield f"volume {volume['name']}: {kind}"
    security = spec.get("securityContext", {})
    yield from _both(security)
    for sysctl in security.get("sysctls", []):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']}"


def _both(security: dict[str, Any]) -> Iterator[str]:
    """What may stand on a pod or on a container."""
    if security.get("runAsUser") == 0:
        yield "runAsUser 0"
    if security.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"
    selinux = security.get("seLinuxOptions", {})
    if selinux.get("type") not in _SELINUX or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"
    if security.get("appArmorProfile", {}).get("type") not in _APPARMOR:
        yield "appArmorProfile"


def _container(one: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    security = one.get("securityContext", {})
    yield from _both(security)
    if security.get("privileged"):
        yield "privileged"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if security.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot"
    if security.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in _SECCOMP:
        yield "seccompProfile"
    if security.get("procMount", "Default") != "Default":
        yield "procMount"
    capabilities = security.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities: ALL not dropped"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities added"
    if any(port.get("hostPort") for port in one.get("ports", [])):
        yield "hostPort"
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if any(one.get(probe, {}).get(way, {}).get("host") for way in ("httpGet", "tcpSocket")):
            yield f"{probe}: another host"
