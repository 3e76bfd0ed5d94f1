"""What the chart reads of the cluster: the live number of replicas, from an API server that knows two objects."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from charts import CHART, LEAST, helm, merged, one

KINDS = {
    "v1": ("ServiceAccount", "ConfigMap", "Service", "Pod"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
}
"""What the chart makes here, by version."""

OWNED = (
    {"app.kubernetes.io/managed-by": "Helm"},
    {"meta.helm.sh/release-name": "rel", "meta.helm.sh/release-namespace": "llm"},
)
"""Labels and annotations of what this release made."""


def answers(replicas: int | None) -> dict[str, dict[str, Any]]:
    """Paths to what is there; `replicas` None: nothing was installed yet."""
    groups = [
        {"name": version.partition("/")[0], "versions": [known], "preferredVersion": known}
        for version in KINDS
        if "/" in version
        for known in [{"groupVersion": version, "version": version.partition("/")[2]}]
    ]
    found: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for version, kinds in KINDS.items():
        resources = [
            {"name": f"{kind.lower()}s", "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
            for kind in kinds
        ]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        found[base] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    live = (("apps/v1", "Deployment", "rel-kvguard"), ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "rel-kvguard-group"))
    for version, kind, name in live if replicas is not None else ():
        metadata = {"name": name, "labels": OWNED[0], "annotations": OWNED[1]}
        item = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": {"replicas": replicas}}
        found[f"/apis/{version}/namespaces/llm/{kind.lower()}s/{name}"] = item
    return found


class Api(BaseHTTPRequestHandler):
    """Reads only; whatever is not there is a Status of 404, as the API server says it."""

    found: dict[str, dict[str, Any]]

    def do_GET(self) -> None:
        answer = self.found.get(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(answer or missing).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A function that renders values against a cluster whose engines have so many replicas."""
    servers = []

    def render(replicas: int | None, values: dict[str, Any]) -> list[dict[str, Any]]:
        handler = type("Of", (Api,), {"found": answers(replicas)})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = tmp_path / f"{len(servers)}.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "users": [{"name": "u", "user": {}}],
                    "current-context": "c",
                }
            )
        )
        flags = ("--dry-run=server", "--kubeconfig", str(config), "--namespace", "llm", "--disable-openapi-validation")
        given = json.dumps(merged(LEAST, values))
        known = ("--api-versions", "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet")
        done = helm("template", "rel", str(CHART), *flags, *known, "--values", "-", stdin=given)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    yield render
    for server in servers:
        server.shutdown()
        server.server_close()


SCALED: dict[str, Any] = {"replicas": 2, "autoscaling": {"kind": "hpa", "minReplicas": 2, "maxReplicas": 9}}
GROUP: dict[str, Any] = {"mode": "sidecar", "multiNode": {"enabled": True}}


@pytest.mark.parametrize("live", [5, 0])
def test_an_upgrade_leaves_what_the_autoscaler_chose(cluster, live):
    """Also the upgrade that turns autoscaling on: a field that is left out after it was there would be reset to 1."""
    assert one(cluster(live, SCALED), "Deployment")["spec"]["replicas"] == live
    assert one(cluster(live, merged(SCALED, GROUP)), "LeaderWorkerSet")["spec"]["replicas"] == live


def test_an_install_leaves_it_to_the_autoscaler(cluster):
    assert "replicas" not in one(cluster(None, SCALED), "Deployment")["spec"]


def test_without_an_autoscaler_the_value_holds(cluster):
    assert one(cluster(5, {"replicas": 3}), "Deployment")["spec"]["replicas"] == 3
