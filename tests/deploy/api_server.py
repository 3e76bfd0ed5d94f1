"""An API server that keeps objects, for Helm's own commands: no cluster, and no substitute for one.

It speaks what Helm sends (discovery, create, get, list with selectors, watch, the three kinds of patch, delete) and refuses
what a real one refuses of the kinds that the chart makes, as far as it is written here: unknown fields, names and labels that
are none, limits of size, fields that cannot be changed, requests above limits, mounts without volumes, pods outside the
restricted standard, and another manager's field in a server-side apply. It has no controllers: a pod succeeds at once.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from pod_security import violations

VERSION = "1.36"
KINDS = {
    "v1": ("ServiceAccount", "ConfigMap", "Service", "Pod", "Secret"),
    "apps/v1": ("Deployment", "ReplicaSet"),
    "batch/v1": ("Job",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "admissionregistration.k8s.io/v1": ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
}
OPERATORS = {
    "monitoring.coreos.com/v1": ("PodMonitor", "ServiceMonitor", "PrometheusRule"),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "keda.sh/v1alpha1": ("ScaledObject",),
}
"""Kinds that only a cluster with their operators knows."""

Object = dict[str, Any]
Path_ = tuple[Any, ...]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# By what items of a list are told apart, as the API's types say it.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "name",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
}
_FIXED = {
    "Deployment": ("selector",),
    "Job": ("selector", "template", "completions", "completionMode"),
    "Service": ("clusterIP",),
}
"""Fields of a spec that cannot be changed."""
_NOT_OWNED = {"metadata", "status", "apiVersion", "kind"}


class Refused(Exception):
    """What the API server says no to, as a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def status(self) -> Object:
        return {
            **{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"},
            **{"message": self.message, "reason": self.reason, "code": self.code},
        }


def _invalid(item: Object, where: str, why: str) -> Refused:
    kind, name = item.get("kind"), item.get("metadata", {}).get("name")
    return Refused(422, "Invalid", f"{kind} {name!r} is invalid: {where}: {why}")


def quantity(text: Any) -> float:
    """A quantity as a number."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if found is None:
        raise ValueError(text)
    return float(found[1]) * _UNITS[found[2]]


def check(item: Object) -> None:
    """What validation says of one object on its own. Raises Refused."""
    import kubernetes_validate

    kind, meta = item["kind"], item["metadata"]
    pattern, longest = (_SERVICE, 63) if kind == "Service" else (_NAME, 63 if kind == "Job" else 253)
    if not pattern.fullmatch(meta["name"]) or len(meta["name"]) > longest:
        raise _invalid(item, "metadata.name", f"{meta['name']!r} is no name of a {kind}")
    _check_labels(item, meta.get("labels", {}), "metadata.labels")
    if len(json.dumps(meta.get("annotations", {}))) > 256 * 1024:
        raise _invalid(item, "metadata.annotations", "more than 256 KiB")
    if kind in {"ConfigMap", "Secret"} and len(json.dumps(item.get("data", {}))) > 1024 * 1024:
        raise _invalid(item, "data", "more than 1 MiB")
    if item["apiVersion"] not in OPERATORS:
        try:
            kubernetes_validate.validate(item, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refused(400, "BadRequest", f"{kind} {meta['name']}: strict decoding error: {error.message}") from error
    spec = item.get("spec", {})
    if kind == "Deployment":
        labels = spec["template"]["metadata"].get("labels", {})
        if not spec["selector"]["matchLabels"].items() <= labels.items():
            raise _invalid(item, "spec.template.metadata.labels", "`selector` does not match template `labels`")
        rolling = (spec.get("strategy") or {}).get("rollingUpdate")
        if (spec.get("strategy") or {}).get("type") == "Recreate" and rolling:
            raise _invalid(item, "spec.strategy.rollingUpdate", "may not be specified when strategy `type` is 'Recreate'")
    if kind in {"Deployment", "Job"}:
        _check_labels(item, spec["template"]["metadata"].get("labels", {}), "spec.template.metadata.labels")
        _check_pod(item, spec["template"]["spec"])
    elif kind == "Pod":
        _check_pod(item, spec)


def _check_labels(item: Object, labels: Object, where: str) -> None:
    for name, value in labels.items():
        if not isinstance(value, str):
            raise Refused(400, "BadRequest", f"{where}.{name}: cannot unmarshal {value!r} into a string")
        if len(value) > 63 or not _LABEL.fullmatch(value):
            raise _invalid(item, where, f"{value!r}: a valid label must be an empty string or consist of …")


def _check_pod(item: Object, spec: Object) -> None:
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    every = [*spec["containers"], *spec.get("initContainers", [])]
    for kind, names in (("volumes", volumes), ("containers", [one["name"] for one in every])):
        if len(names) != len(set(names)):
            raise _invalid(item, f"spec.{kind}", f"a duplicate among {names}")
    for one in every:
        mounts = one.get("volumeMounts", [])
        paths = [mount["mountPath"] for mount in mounts]
        if len(paths) != len(set(paths)):
            raise _invalid(item, "volumeMounts.mountPath", f"must be unique: {paths}")
        if missing := {mount["name"] for mount in mounts} - set(volumes):
            raise _invalid(item, "volumeMounts.name", f"not found: {missing}")
        ports = [port["name"] for port in one.get("ports", [])]
        if len(ports) != len(set(ports)) or any(len(port) > 15 for port in ports):
            raise _invalid(item, "ports.name", str(ports))
        requests, limits = one["resources"].get("requests", {}), one["resources"].get("limits", {})
        for name, asked in requests.items():
            if name in limits and quantity(asked) > quantity(limits[name]):
                raise _invalid(item, f"resources.requests.{name}", f"{asked} is above the limit, {limits[name]}")
    grace = spec.get("terminationGracePeriodSeconds", 30)
    for one in spec["containers"]:
        sleep = one.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if sleep > grace:
            raise _invalid(item, "lifecycle.preStop.sleep", f"{sleep} is above terminationGracePeriodSeconds, {grace}")
    if why := violations(spec):
        raise Refused(403, "Forbidden", f'{item["metadata"]["name"]}: violates PodSecurity "restricted:latest": {why}')


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every field that can have an owner, with its value: lists whose items have keys go item by item."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and (key := _key(path, value)):
        if len({item[key] for item in value}) < len(value):
            raise Refused(500, "InternalError", f".{'.'.join(map(str, path))}: duplicate entries for key {key}")
        for item in value:
            yield from leaves(item, (*path, (key, item[key])))
    else:
        yield path, value


def _key(path: Path_, value: list[Any]) -> str | None:
    key = _KEYS.get(path[-1]) if path and isinstance(path[-1], str) else None
    return key if key and value and all(isinstance(item, dict) and key in item for item in value) else None


def _find(value: Any, step: Any, make: bool = False) -> Any:
    if isinstance(step, tuple):
        for item in value if isinstance(value, list) else []:
            if item.get(step[0]) == step[1]:
                return item
        if make:
            value.append({step[0]: step[1]})
            return value[-1]
        return None
    if make and step not in value:
        value[step] = {}
    return value.get(step) if isinstance(value, dict) else None


def read(item: Object, path: Path_) -> Any:
    """The value at a path, None where there is none."""
    found: Any = item
    for step in path:
        found = _find(found, step)
        if found is None:
            return None
    return found


def _write(item: Object, path: Path_, new: Any) -> None:
    at: Any = item
    for index, step in enumerate(path[:-1]):
        if isinstance(path[index + 1], tuple) and not isinstance(at.get(step), list):
            at[step] = []
        at = _find(at, step, make=True)
    at[path[-1]] = copy.deepcopy(new)


def _remove(item: Any, path: Path_) -> None:
    """Take a field away, and what is empty without it."""
    inside = _find(item, path[0])
    if inside is None:
        return
    if len(path) > 1:
        _remove(inside, path[1:])
        if [name for name in inside if not (isinstance(path[0], tuple) and name == path[0][0])]:
            return
    if isinstance(path[0], tuple):
        item.remove(inside)
    else:
        del item[path[0]]


def strategic(live: Any, patch: Any, name: str = "") -> Any:
    """A strategic merge patch, as far as Helm 3 sends it."""
    if isinstance(patch, dict):
        if patch.get("$patch") == "replace":
            return {key: value for key, value in patch.items() if key != "$patch"}
        result = dict(live) if isinstance(live, dict) else {}
        if kept := patch.get("$retainKeys"):
            result = {key: value for key, value in result.items() if key in kept}
        for key, value in patch.items():
            if key.startswith("$"):
                continue
            if value is None:
                result.pop(key, None)
            else:
                result[key] = strategic(result.get(key), value, key)
        return result
    if isinstance(patch, list) and (key := _key((name,), patch)):
        result = list(live or [])
        for item in patch:
            at = next((index for index, one in enumerate(result) if one.get(key) == item[key]), None)
            if item.get("$patch") == "delete":
                result = [one for one in result if one.get(key) != item[key]]
            elif at is None:
                result.append(strategic({}, item))
            else:
                result[at] = strategic(result[at], item)
        return result
    return copy.deepcopy(patch)


def merge_patch(live: Any, patch: Any) -> Any:
    """A JSON merge patch, which Helm 3 sends for kinds that it does not know."""
    if not isinstance(patch, dict):
        return patch
    result = dict(live) if isinstance(live, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


class Store:
    """Objects by (version, resource, namespace, name), their managers, and what happened."""

    def __init__(self, *, operators: bool) -> None:
        self.kinds = KINDS | (OPERATORS if operators else {})
        self.objects: dict[tuple[str, str, str, str], Object] = {}
        self.owned: dict[tuple[str, str, str, str], dict[tuple[str, str], set[Path_]]] = {}
        self.lock = threading.RLock()
        self.version = 0
        self.requests: list[tuple[str, str]] = []

    def kept(self, kind: str) -> dict[str, Object]:
        """Objects of a kind by name."""
        return {item["metadata"]["name"]: item for item in self.objects.values() if item["kind"] == kind}

    def keep(self, key: tuple[str, str, str, str], item: Object) -> Object:
        """Check an object against itself and against what it was, and keep it."""
        before = self.objects.get(key)
        if before is not None:
            for field in _FIXED.get(item["kind"], ()):
                old, new = (one.get("spec", {}).get(field) for one in (before, item))
                if old != new and not (field == "clusterIP" and new is None):
                    raise _invalid(item, f"spec.{field}", "field is immutable")
        meta = item["metadata"]
        for name in ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation"):
            meta.pop(name, None)
        check({name: value for name, value in item.items() if name != "status"})
        self.version += 1
        old = before["metadata"] if before else {}
        meta["uid"] = old.get("uid") or str(uuid.uuid4())
        meta["creationTimestamp"] = old.get("creationTimestamp") or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta["resourceVersion"] = str(self.version)
        spec = item.get("spec")
        if item["kind"] in {"Deployment", "LeaderWorkerSet"} and isinstance(spec, dict):
            spec.setdefault("replicas", 1)
        if item["kind"] == "Pod":
            item["status"] = {"phase": "Succeeded"}
        self.objects[key] = item
        managers = self.owned.setdefault(key, {})
        meta["managedFields"] = [
            {
                **{"manager": manager.partition("/")[0], "operation": operation, "apiVersion": key[0]},
                **{"fieldsType": "FieldsV1", "fieldsV1": fields_v1(paths)},
                **({"subresource": manager.partition("/")[2]} if "/" in manager else {}),
            }
            for (manager, operation), paths in managers.items()
            if paths
        ]
        return item

    def update(self, key: tuple[str, str, str, str], item: Object, manager: str) -> Object:
        """Keep an object that a manager wrote; fields that it changed are its own now."""
        before = self.objects.get(key, {})
        changed = {path for path, value in leaves(_own(item)) if read(before, path) != value}
        managers = self.owned.setdefault(key, {})
        for paths in managers.values():
            paths.difference_update(changed)
        managers.setdefault((manager, "Update"), set()).update(changed)
        return self.keep(key, item)

    def apply(self, key: tuple[str, str, str, str], wanted: Object, manager: str, *, force: bool) -> Object:
        """A server-side apply: another manager's field is a conflict, and a field let go of by all is taken away."""
        live = copy.deepcopy(self.objects.get(key, {}))
        managers = self.owned.setdefault(key, {})
        mine = (manager, "Apply")
        fields = dict(leaves(_own(wanted)))
        others = {other: paths for other, paths in managers.items() if other != mine}
        differing = {path for path, value in fields.items() if live and read(live, path) != value}
        conflicts = [(other[0], path) for other, paths in others.items() for path in paths & differing]
        if conflicts and not force:
            said = "; ".join(f'conflict with "{name}": .{".".join(map(str, path))}' for name, path in conflicts)
            raise Refused(409, "Conflict", f"Apply failed with {len(conflicts)} conflict(s): {said}")
        for paths in others.values():
            paths.difference_update(differing)
        # What tells an item from the others goes last, and only with the item.
        for path in sorted(managers.get(mine, set()) - fields.keys(), key=_is_key):
            if not any(path in paths for paths in others.values()) and (
                not _is_key(path) or len(read(live, path[:-1]) or {}) == 1
            ):
                _remove(live, path)
        for path, value in fields.items():
            _write(live, path, value)
        managers[mine] = set(fields)
        same = {"apiVersion": wanted["apiVersion"], "kind": wanted["kind"]}
        place = {"name": wanted["metadata"]["name"]} | ({"namespace": key[2]} if key[2] else {})
        return self.keep(key, {**live, **same, "metadata": {**live.get("metadata", {}), **place}})

    def scale(self, name: str, replicas: int) -> None:
        """What an autoscaler does, through the subresource `scale`."""
        (key,) = [key for key, item in self.objects.items() if "replicas" in item.get("spec", {}) and key[3] == name]
        item = copy.deepcopy(self.objects[key])
        item["spec"]["replicas"] = replicas
        self.update(key, item, "kube-controller-manager/scale")


def fields_v1(paths: set[Path_]) -> Object:
    """Paths as managedFields writes them."""
    tree: Object = {}
    for path in sorted(paths, key=str):
        at = tree
        for step in path:
            name = f"f:{step}" if isinstance(step, str) else "k:" + json.dumps({step[0]: step[1]}, separators=(",", ":"))
            at = at.setdefault(name, {})
    return tree


def _is_key(path: Path_) -> bool:
    return len(path) > 1 and isinstance(path[-2], tuple) and path[-2][0] == path[-1]


def _own(item: Object) -> Object:
    """What managers can own."""
    meta = {name: value for name, value in item["metadata"].items() if name in {"labels", "annotations"}}
    return {**{name: value for name, value in item.items() if name not in _NOT_OWNED}, "metadata": meta}


class _Handler(BaseHTTPRequestHandler):
    store: Store
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, body: Object, code: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _any(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            with self.store.lock:
                self.store.requests.append((self.command, parts.path))
                answer = self._discovery(parts.path) if self.command == "GET" else None
                if answer is None:
                    answer = self._resource(parts.path, query, _body(body))
            if answer is not None:
                self._answer(answer, 201 if self.command == "POST" else 200)
            else:
                self._watch(parts.path, query)
        except Refused as refused:
            self._answer(refused.status(), refused.code)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _discovery(self, path: str) -> Object | None:
        if path == "/version":
            major, _, minor = VERSION.partition(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = [
                {"name": version.partition("/")[0], "versions": [known], "preferredVersion": known}
                for version in self.store.kinds
                if "/" in version
                for known in [{"groupVersion": version, "version": version.partition("/")[2]}]
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        documents = {f"api{'s' if '/' in version else ''}/{version}": version for version in self.store.kinds}
        if path == "/openapi/v3":
            return {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}"} for name in documents}}
        if (version := documents.get(path.removeprefix("/openapi/v3/"))) is not None:
            return self._openapi(version)
        for version, kinds in self.store.kinds.items():
            if path == (f"/apis/{version}" if "/" in version else f"/api/{version}"):
                verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
                resources = [
                    {"name": plural(kind), "singularName": kind.lower(), "kind": kind, "verbs": verbs}
                    | {"namespaced": not kind.startswith("ValidatingAdmission")}
                    for kind in kinds
                ]
                return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        return None

    def _openapi(self, version: str) -> Object:
        """That fields are validated here, which is what Helm looks for."""
        group, _, number = version.rpartition("/")
        parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        paths = {
            f"/{'apis' if group else 'api'}/{version}/namespaces/{{namespace}}/{plural(kind)}/{{name}}": {
                "patch": {
                    "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                    "parameters": [parameter],
                    "responses": {},
                }
            }
            for kind in self.store.kinds[version]
        }
        return {"openapi": "3.0.0", "info": {"title": "kept", "version": VERSION}, "paths": paths}

    def _place(self, path: str) -> tuple[str, str, str, str, str]:
        """Version, namespace, resource, kind and name of a path."""
        found = re.fullmatch(r"/(?:api|apis)/(v1|[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+))?", path)
        kind = next((kind for kind in self.store.kinds.get(found[1], ()) if plural(kind) == found[3]), None) if found else None
        if found is None or kind is None:
            raise Refused(404, "NotFound", f"the server could not find the requested resource: {path}")
        return found[1], found[2] or "", found[3], kind, found[4] or ""

    def _resource(self, path: str, query: dict[str, str], body: Object) -> Object | None:
        version, namespace, resource, kind, name = self._place(path)
        store = self.store
        key = (version, resource, namespace, name or body.get("metadata", {}).get("name", ""))
        if self.command == "GET" and not name:
            if query.get("watch"):
                return None
            items = [item for _, item in self._selected(path, query)]
            return {
                "kind": f"{kind}List",
                "apiVersion": version,
                "metadata": {"resourceVersion": str(store.version)},
                "items": items,
            }
        manager = query.get("fieldManager", "helm")
        if self.command == "POST":
            if key in store.objects:
                raise Refused(409, "AlreadyExists", f'{resource} "{key[3]}" already exists')
            body["metadata"] |= {"namespace": namespace} if namespace else {}
            return store.update(key, body, manager)
        if self.command == "PATCH" and self.headers["Content-Type"].startswith("application/apply-patch"):
            return store.apply(key, body, manager, force=query.get("force") == "true")
        live = store.objects.get(key)
        if live is None:
            raise Refused(404, "NotFound", f'{resource} "{name}" not found')
        if self.command == "GET":
            return live
        if self.command == "DELETE":
            del store.objects[key]
            store.owned.pop(key, None)
            store.version += 1
            return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        if self.command == "PUT":
            return store.update(key, body, manager)
        for kind, merge in (("strategic-merge", strategic), ("merge", merge_patch)):
            if self.headers["Content-Type"].startswith(f"application/{kind}-patch"):
                return store.update(key, merge(copy.deepcopy(live), body), manager)
        raise Refused(415, "UnsupportedMediaType", self.headers["Content-Type"])

    def _selected(self, path: str, query: dict[str, str]) -> list[tuple[tuple[str, str, str, str], Object]]:
        version, namespace, resource, _, _ = self._place(path)
        wanted = [
            term.partition("=")[::2] for term in re.split(r",(?![^()]*\))", query.get("labelSelector", "")) if "=" in term
        ]
        field = query.get("fieldSelector", "").partition("metadata.name=")[2]
        return [
            (key, item)
            for key, item in self.store.objects.items()
            if key[:3] == (version, resource, namespace)
            and all(item["metadata"].get("labels", {}).get(name) == value.lstrip("=") for name, value in wanted)
            and field in ("", key[3])
        ]

    def _watch(self, path: str, query: dict[str, str]) -> None:
        """What is there, then what changes, until the client goes."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        _, _, _, kind, _ = self._place(path)
        seen: dict[Any, Object] = {}
        marked = query.get("sendInitialEvents") != "true"
        since = 0 if not marked else int(query.get("resourceVersion") or 0)
        deadline = time.monotonic() + 120
        try:
            while time.monotonic() < deadline:
                events: list[Object] = []
                with self.store.lock:
                    now, latest = dict(self._selected(path, query)), self.store.version
                    for key, item in now.items():
                        if key not in seen and int(item["metadata"]["resourceVersion"]) > since:
                            events.append({"type": "ADDED", "object": item})
                        elif key in seen and seen[key]["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                            events.append({"type": "MODIFIED", "object": item})
                    events += [{"type": "DELETED", "object": item} for key, item in seen.items() if key not in now]
                    seen = now
                if not marked:
                    mark = {"annotations": {"k8s.io/initial-events-end": "true"}, "resourceVersion": str(latest)}
                    version = self._place(path)[0]
                    events.append({"type": "BOOKMARK", "object": {"kind": kind, "apiVersion": version, "metadata": mark}})
                    marked = True
                for event in events:
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass
        self.close_connection = True


def _body(raw: bytes) -> Object:
    """What a client sent: JSON, YAML, or, from Helm's own client of Secrets, protobuf."""
    if not raw.startswith(b"k8s\0"):
        return dict(yaml.safe_load(raw)) if raw else {}
    unknown = _fields(raw[4:])
    kind = _fields(unknown[1][0])[2][0].decode()
    if kind != "Secret":
        return {}  # options of a deletion
    secret = _fields(unknown[2][0])
    meta = _fields(secret[1][0])
    return {
        **{"apiVersion": "v1", "kind": kind, "type": secret[3][0].decode()},
        "metadata": {"name": meta[1][0].decode(), "labels": {k: v.decode() for k, v in _pairs(meta.get(11, []))}},
        "data": {name: base64.b64encode(value).decode() for name, value in _pairs(secret.get(2, []))},
    }


def _fields(raw: bytes) -> dict[int, list[bytes]]:
    """A protobuf message's fields of bytes by number; numbers are passed over."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        size, at = _varint(raw, at)
        if tag & 7 == 2:
            found.setdefault(tag >> 3, []).append(raw[at : at + size])
            at += size
    return found


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (raw[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not raw[at - 1] & 0x80:
            return value, at


def _pairs(entries: list[bytes]) -> Iterator[tuple[str, bytes]]:
    for entry in map(_fields, entries):
        yield entry[1][0].decode(), entry.get(2, [b""])[0]


def plural(kind: str) -> str:
    """A kind as paths name it."""
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


@contextmanager
def api_server(folder: Path, *, operators: bool = False) -> Iterator[tuple[Store, Path]]:
    """A server on loopback: what it keeps, and the kubeconfig that names it."""
    store = Store(operators=operators)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    config = folder / "kubeconfig.yaml"
    cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
    config.write_text(
        yaml.safe_dump(
            {
                **{"apiVersion": "v1", "kind": "Config", "current-context": "c"},
                "clusters": [{"name": "c", "cluster": cluster}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": {}}],
            }
        )
    )
    try:
        yield store, config
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
