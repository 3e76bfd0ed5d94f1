"""A model hub on loopback that answers what huggingface-hub asks, and a store beside it, as hubs keep large files.

Small files are sent by the hub itself; weights are redirected to the store, by a signed address. Both count what they send.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIGNATURE = "X-Signature=do-not-show"


@dataclass
class Repository:
    """One model at one commit. `token`: who may read it; `short` files lose their last bytes on the way."""

    files: Mapping[str, bytes]
    commit: str = COMMIT
    revisions: tuple[str, ...] = ("main",)
    token: str = ""
    gated: bool = False
    short: frozenset[str] = frozenset()


@dataclass
class Hub:
    """What is published, and what was asked and sent. `store` are the (method, path, authorization) asked of the store.

    `says`: a status and a body in place of every answer, as of something else that listens there.
    """

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    sent: int = 0
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    store: list[tuple[str, str, str]] = field(default_factory=list)
    ignore_ranges: bool = False
    says: tuple[int, bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, size: int) -> None:
        """So many bytes of files were sent."""
        with self.lock:
            self.sent += size


@contextmanager
def running_hub(repositories: Mapping[str, Repository]) -> Iterator[Hub]:
    """A hub and its store, on ports of their own."""
    hub = Hub(repositories=dict(repositories))
    store = _serve(_store(hub))
    front = _serve(_front(hub, f"http://127.0.0.1:{store.server_address[1]}"))
    hub.endpoint = f"http://127.0.0.1:{front.server_address[1]}"
    try:
        yield hub
    finally:
        for server in (front, store):
            server.shutdown()
            server.server_close()


def _serve(handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A reader that heard enough hangs up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def file(self, hub: Hub, content: bytes, short: bool, **headers: str) -> None:
        """A file, or the range of it that was asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or hub.ignore_ranges:
            status, body = 200, content
        else:
            start, end = int(asked[1]), min(int(asked[2]), len(content) - 1)
            status, body = 206, content[start : end + 1]
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        if self.command == "HEAD":
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            return
        hub.count(len(body))
        if not short:
            self.answer(status, body, **headers)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.close_connection = True


def _store(hub: Hub) -> type[_Handler]:
    class Store(_Handler):
        def do_GET(self) -> None:
            hub.store.append((self.command, self.path, self.headers.get("Authorization", "")))
            parts = urlsplit(self.path)
            name, _, file = unquote(parts.path.removeprefix("/")).partition("//")
            repository = hub.repositories[name]
            if parts.query != SIGNATURE:
                self.answer(403)
            else:
                self.file(hub, repository.files[file], file in repository.short)

    return Store


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it; weights are large files, named by their sha256."""
    lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    told: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
    return {**told, "lfs": lfs} if name.endswith(".safetensors") else told


def _front(hub: Hub, store: str) -> type[_Handler]:
    class Front(_Handler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
            path = unquote(urlsplit(self.path).path)
            if hub.says is not None:
                self.answer(hub.says[0], hub.says[1])
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self._info(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._resolve(match[1], match[2], match[3])
            else:
                self.answer(404)

        def _found(self, name: str, revision: str, *, content: bool) -> Repository | None:
            repository = hub.repositories.get(name)
            allowed = repository is not None and self.headers.get("Authorization") == f"Bearer {repository.token}"
            if repository is None or (repository.token and not allowed and not repository.gated):
                self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            elif content and repository.gated and not allowed:
                self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="Access to this model is restricted")
            elif revision not in (repository.commit, *repository.revisions):
                self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
            else:
                return repository
            return None

        def _info(self, name: str, revision: str) -> None:
            if repository := self._found(name, revision, content=False):
                siblings = [_sibling(name, content) for name, content in repository.files.items()]
                siblings.append({"rfilename": "original/consolidated.00.pth"})
                info = {"id": name, "modelId": name, "sha": repository.commit, "siblings": siblings, "tags": []}
                self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

        def _resolve(self, name: str, revision: str, file: str) -> None:
            repository = self._found(name, revision, content=True)
            if repository is None:
                return
            if file not in repository.files:
                self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
                return
            content = repository.files[file]
            told = {"X_Repo_Commit": repository.commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            if file.endswith(".safetensors"):
                address = f"{store}/{name}//{file}?{SIGNATURE}"
                self.answer(302, Location=address, X_Linked_Size=str(len(content)), X_Linked_ETag=told["ETag"], **told)
            else:
                self.file(hub, content, file in repository.short, **told)

    return Front
