"""Where the run record of an external reference is read, and why it cannot be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvguard.record.build import build_record
from kvguard.record.store import write_record
from kvguard.reference.their_record import read_their_record
from record_samples import sample

RECORD = build_record(sample())


def read(source: object) -> tuple[Any, str]:
    return asyncio.run(read_their_record(str(source)))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    class Management(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/record": json.dumps(RECORD), "/other": "{}", "/broken": "{"}.get(self.path)
            self.send_response(200 if body else 503)
            self.end_headers()
            self.wfile.write((body or '{"detail": "not yet"}').encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Management)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_or_the_newest_in_a_directory(tmp_path: Path) -> None:
    write_record(build_record(sample(version="0.31.0")), tmp_path, "2026-01-01T00:00:00Z")
    path = write_record(RECORD, tmp_path, "2026-01-02T00:00:00Z")
    assert read(path) == read(tmp_path) == (RECORD, "")


def test_the_management_port(port: int) -> None:
    base = f"http://127.0.0.1:{port}"
    assert read(base) == read(f"{base}/") == read(f"{base}/record") == (RECORD, "")


def test_what_cannot_be_read_is_said(port: int, tmp_path: Path) -> None:
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps({**RECORD, "predicate": {**RECORD["predicate"], "verdict": "warn"}}))
    base = f"http://127.0.0.1:{port}"
    for source, words in (
        (tmp_path / "none.json", "none.json"),
        (changed, "was changed after it was written"),
        (f"{base}/other", "not a run record"),
        (f"{base}/broken", "not JSON"),
        (f"{base}/later", "HTTP 503: not yet"),
        ("http://127.0.0.1:1", "cannot be read"),
        ("http://[::1", "not a URL"),
    ):
        record, problem = read(source)
        assert record is None, source
        assert words in problem
        assert "\n" not in problem
