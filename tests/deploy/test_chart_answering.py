"""templates/tests/answering.yaml: `helm test` asks the Service, and believes kvguard's headers only."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from charts import CHART, container, one, with_least


def test_it_asks_the_service_with_kvguards_image():
    spec = one(with_least({"service": {"port": 80}}), "Pod", "rel-kvguard-test")["spec"]
    assert container(spec, "answering")["command"][-1] == "http://rel-kvguard:80/health"
    assert container(spec, "answering")["image"] == "kvguard:0.1.0"
    built = one(with_least({"kvguard": {"delivery": "builtin"}}), "Pod")["spec"]
    assert container(built, "answering")["image"] == "vllm/vllm-openai:v0.32.0"


@contextmanager
def answering(status: int, headers: dict[str, str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"the engine is starting")

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/health"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "headers", "code", "said"),
    [
        (200, {"x-kvguard-confidence": "proven", "x-kvguard-kv-cache-dtype": "fp8_e4m3"}, 0, "KV cache fp8_e4m3, proven"),
        (200, {}, 1, "without kvguard in front"),
        (200, {"x-kvguard-confidence": "unknown"}, 1, "nothing is known"),
        (503, {"x-kvguard-confidence": "unknown"}, 1, "503: the engine is starting"),
    ],
)
def test_what_it_says(status, headers, code, said):
    script = (CHART / "files" / "answering.py").read_text("utf-8")
    with answering(status, headers) as url:
        done = subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_nobody_there():
    script = (CHART / "files" / "answering.py").read_text("utf-8")
    url = "http://127.0.0.1:9/health"
    done = subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "refused" in done.stderr
