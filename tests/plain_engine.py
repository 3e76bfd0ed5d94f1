"""An engine that somebody else started, as seen over HTTP: it can be ended and another one started on its port."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = {"auto": 46592, "bfloat16": 46592, "fp8_e4m3": 93184}


class PlainEngine:
    """A process in miniature. `says` replaces an answer: path -> (status, body)."""

    def __init__(self, root: str, dtype: str = "fp8_e4m3", *, port: int = 0, started: float = 1000.0, kv_bytes: bool = True):
        self.root, self.dtype, self.started, self.kv_bytes = root, dtype, started, kv_bytes
        self.says: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.generated = 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*engine.answer(self.path))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self._answer(*engine.answer(self.path))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        if path in self.says:
            return self.says[path]
        if path == "/health":
            return 200, b""
        if path == "/version":
            return 200, b'{"version": "0.32.0"}'
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m", "root": self.root, "max_model_len": 2048}]}).encode()
        if path == "/metrics":
            return 200, self.metrics().encode()
        if path in ("/v1/completions", "/v1/chat/completions", "/wake_up"):
            self.generated += 3
            logged = {"tokens": ["token_id:1", "token_id:2", "token_id:3"], "token_logprobs": [-0.2, -0.2, -0.2]}
            return 200, json.dumps({"choices": [{"text": "x", "logprobs": logged, "token_ids": [1, 2, 3]}]}).encode()
        return 404, b"{}"

    def metrics(self) -> str:
        size = 1 << 30 if self.kv_bytes else None
        tokens = TOKENS[self.dtype]
        return (
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{block_size="128",cache_dtype="auto",engine="0",kv_cache_memory_bytes="{size}",'
            f'kv_cache_size_tokens="{tokens}",num_gpu_blocks="{tokens // 128}"}} 1.0\n'
            "# TYPE vllm:generation_tokens counter\n"
            f'vllm:generation_tokens_total{{engine="0"}} {float(self.generated)}\n'
            "# TYPE process_start_time_seconds gauge\n"
            f"process_start_time_seconds {self.started}\n"
        )

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    def swap(self, dtype: str, **more: Any) -> PlainEngine:
        """End this one and start another on its port."""
        self.end()
        return PlainEngine(self.root, dtype, port=self.port, started=self.started + 100, **more)
