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
    assert container(spec, "answering")["command"][-2] == "http://rel-kvguard:80/health"
    assert float(container(spec, "answering")["command"][-1]) < 300, "Helm waits five minutes"
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
        done = subprocess.run([sys.executable, "-c", script, url, "0"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_nobody_there():
    script = (CHART / "files" / "answering.py").read_text("utf-8")
    url = "http://127.0.0.1:9/health"
    done = subprocess.run([sys.executable, "-c", script, url, "0.2"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "refused" in done.stderr
    assert "no pod is ready" in done.stderr


def test_it_waits_for_an_engine_that_loads():
    script = (CHART / "files" / "answering.py").read_text("utf-8")
    asked = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if asked.is_set() else 503)
            self.send_header("x-kvguard-confidence", "proven")
            self.send_header("content-length", "0")
            self.end_headers()
            asked.set()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        command = [sys.executable, "-c", script, f"http://127.0.0.1:{server.server_port}/health", "120"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        server.shutdown()
        thread.join()
    assert (done.returncode, done.stderr) == (0, "")


def test_its_pod_can_run_where_the_engines_can():
    given = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"a": "b"},
        "imagePullSecrets": [{"name": "p"}],
    }
    spec = one(with_least(given), "Pod")["spec"]
    assert {name: spec[name] for name in given} == given
    assert spec["serviceAccountName"] == "rel-kvguard"
    assert spec["automountServiceAccountToken"] is False
