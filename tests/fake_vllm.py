"""A `vllm` console script without an engine behind it, for faults that a real one cannot be made to show.

It serves on --uds what kvguard asks for, loads the middleware and the worker extension from the command line as vLLM
does, and answers them from a worker in miniature. The environment says what goes wrong: FAKE_VLLM_FAULTS, names of
`FAULTS` separated by commas, and FAKE_VLLM_NOTES, a directory for what a test wants to know. `reference:NAME` is a fault
of the engine that `--shadow-launch` starts, whose notes are called `reference-…`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from worker_fakes import model, scale, state

FAULTS = {
    "exits": "prints an error and exits 1",
    "never_healthy": "/health answers 503",
    "hangs": "/health does not answer",
    "stubborn": "ignores SIGTERM",
    "orphan": "leaves a process of another session behind",
    "loud": "writes overlong lines, binary garbage and its API key",
    "flood": "writes megabytes to its standard output while it serves",
    "repeats": "answers one token again and again",
    "nan": "answers with log probabilities that are not finite",
    "fails": "answers requests with 500",
    "dies_of_a_request": "is killed by its first request",
    "evidence_hangs": "the workers do not answer",
    "rank_missing": "one of two workers does not answer",
    "other_nonce": "the workers answer another question",
    "worker_error": "the worker cannot read its layers",
    "broken_scales": "the workers' scales are NaN",
    "sixteen_bit": "the cache is 16-bit whatever the command says",
    "quantized": "the cache is FP8 whatever the command says",
    "fp8_moves_backend": "a quantized cache runs on another attention backend, unless the command pins one",
    "ignores_backend": "a pinned attention backend is not taken",
    "no_metrics": "/metrics answers 404",
    "wakes_with_other_scales": "/wake_up changes the scales on the device and leaves the host's, as 0.12.0 to 0.28.0 do",
    "raises_after_a_wake": "after /wake_up the call to the workers raises",
    "asleep_after_sleep": "after /sleep the workers end when they are asked",
    "dies_while_serving": "once a request asks for it, /health answers 503 and the process lives on",
}
_IS_REFERENCE = any(word.endswith("reference.sock") for word in sys.argv)
_OF_REFERENCE = "reference:"
_CHOSEN = {
    name.removeprefix(_OF_REFERENCE)
    for name in os.environ.get("FAKE_VLLM_FAULTS", "").split(",")
    if name and name.startswith(_OF_REFERENCE) is _IS_REFERENCE
}
_PIECES = 12
_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="128",cache_dtype="{dtype}",engine="0",kv_cache_memory_bytes="None",\
kv_cache_size_tokens="{tokens}",num_gpu_blocks="{blocks}"}} 1.0
"""


def faulty(name: str) -> bool:
    assert name in FAULTS
    return name in _CHOSEN


class Client:
    """vLLM's engine client: one worker, with the extension that the command names."""

    def __init__(self, extension: type, dtype: str, pinned: str | None = None) -> None:
        if faulty("quantized"):
            dtype = "fp8_e4m3"
        quantized = dtype.startswith("fp8") and not faulty("sixteen_bit")
        self.blocks = 728 if quantized else 364
        more: dict[str, Any] = {"_k_scale": scale(float("nan"))} if faulty("broken_scales") else {}
        moved = "FLASHINFER" if quantized and faulty("fp8_moves_backend") else "CPU_ATTN"
        unit = {"k": 1.0, "v": 1.0, "backend": moved if pinned is None or faulty("ignores_backend") else pinned}
        layers = {} if faulty("worker_error") else model(30, dtype if quantized else "bfloat16", **unit, **more)
        self.sleeping = self.woken = False
        self._layers = layers
        tp = 2 if faulty("rank_missing") else 1
        self._worker = extension()
        self._worker.__dict__.update(
            state(layers, cache_dtype=dtype, blocks=self.blocks, tensor_parallel_size=tp, world_size=tp)
        )
        if faulty("worker_error"):
            del self._worker.model_runner

    def wake(self) -> None:
        self.sleeping, self.woken = False, True
        if faulty("wakes_with_other_scales"):
            for layer in self._layers.values():
                layer._k_scale = scale(0.5)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if faulty("raises_after_a_wake") and self.woken:
            raise RuntimeError("worker 0 died")
        if faulty("asleep_after_sleep") and self.sleeping:
            os.kill(os.getpid(), signal.SIGKILL)
        if faulty("evidence_hangs"):
            await asyncio.sleep(3600)
        if faulty("other_nonce"):
            args = ("another", *args[1:])
        return [getattr(self._worker, method)(*args)]


class Engine:
    """The HTTP side."""

    def __init__(self, client: Client, dtype: str, name: str) -> None:
        self._client = client
        self._dtype = dtype
        self._name = name
        self._dead = False
        self._running = 0

    async def health(self, _: Request) -> Response:
        if faulty("hangs"):
            await asyncio.sleep(3600)
        return Response(status_code=503 if self._dead or faulty("never_healthy") else 200)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._name, "max_model_len": 2048}]})

    async def metrics(self, _: Request) -> Response:
        if faulty("no_metrics"):
            return Response(status_code=404)
        blocks = self._client.blocks
        page = _METRICS.format(dtype=self._dtype, tokens=blocks * 128, blocks=blocks, running=float(self._running))
        return PlainTextResponse(page)

    async def sleep(self, _: Request) -> Response:
        self._client.sleeping = True
        return Response()

    async def is_sleeping(self, _: Request) -> Response:
        return JSONResponse({"is_sleeping": self._client.sleeping})

    async def wake_up(self, _: Request) -> Response:
        self._client.wake()
        return Response()

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if faulty("dies_of_a_request"):
            os.kill(os.getpid(), signal.SIGKILL)
        if faulty("fails"):
            return JSONResponse({"error": {"message": "EngineCore encountered an issue", "code": 500}}, 500)
        self._dead = self._dead or (faulty("dies_while_serving") and body.get("prompt") == "die")
        if body.get("stream"):
            counted = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(self._pieces(counted), media_type="text/event-stream")
        if body.get("prompt_logprobs"):
            scored = [{str(token): {"logprob": -0.5}} for token in body["prompt"]]
            return JSONResponse({"choices": [{"text": "x", "prompt_logprobs": [None, *scored[1:]]}]})
        tokens = [f"token_id:{0 if faulty('repeats') else index}" for index in range(_PIECES)]
        logprobs = [float("nan") if faulty("nan") and index == 7 else -0.25 for index in range(len(tokens))]
        if "messages" in body:
            pairs = [{"token": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
            logged: dict[str, Any] = {"content": [{**pair, "top_logprobs": [pair]} for pair in pairs]}
        else:
            logged = {"tokens": tokens, "token_logprobs": logprobs}
        ids = [int(token.partition(":")[2]) for token in tokens]
        said = {"text": "x", "message": {"content": f"Answer: {self._dtype}"}, "finish_reason": "stop"}
        answer = {
            "choices": [{"logprobs": logged, "token_ids": ids, **said}],
            "prompt_token_ids": [5, 6, 7],
            "usage": {"prompt_tokens": 3, "completion_tokens": _PIECES},
        }
        return Response(json.dumps(answer), media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        words = (await request.json())["prompt"].split()
        return JSONResponse({"count": len(words), "tokens": list(range(len(words)))})

    async def _pieces(self, counted: bool) -> AsyncIterator[bytes]:
        self._running += 1
        try:
            for index in range(_PIECES):
                yield b'data: {"choices": [{"text": "%d"}]}\n\n' % index
                await asyncio.sleep(0.05)
            if counted:
                yield b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": %d}}\n\n' % _PIECES
            yield b"data: [DONE]\n\n"
        finally:
            self._running -= 1


class Server(uvicorn.Server):
    """uvicorn's server with vLLM's answer to SIGTERM, or none."""

    def install(self) -> None:
        how: Any = signal.SIG_IGN if faulty("stubborn") else lambda *_: setattr(self, "should_exit", True)
        signal.signal(signal.SIGTERM, how)

    async def serve(self, sockets: Any = None) -> None:
        self.install()
        await self._serve(sockets)


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("subcommand", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--uds", required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--attention-backend")
    parser.add_argument("--worker-extension-cls", required=True)
    parser.add_argument("--middleware", action="append", default=[])
    options, _ = parser.parse_known_args()
    assert set(FAULTS) >= _CHOSEN, _CHOSEN
    note("started", f"{os.getpid()} {os.getppid()}")
    if faulty("exits"):
        print("(EngineCore pid=7) ERROR 11-29 15:11:07 [core.py:1] EngineCore failed to start.", file=sys.stderr)
        print("ValueError: No available memory for the cache blocks.", end="", file=sys.stderr, flush=True)
        sys.exit(1)
    if faulty("orphan"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, **quiet)
        note("orphan", str(child.pid))
    if faulty("loud"):
        loud = os.environ.get("VLLM_API_KEY", "").encode() + b"\n" + bytes(range(256)) * 40 + b"\r" + b"x" * (3 << 20)
        for descriptor in (1, 2):
            os.write(descriptor, loud[: 1 << 15])
        sys.stdout.buffer.write(loud)
        sys.stdout.flush()
    if faulty("flood"):
        import threading

        threading.Thread(target=lambda: [os.write(1, b"flood " * 10922) for _ in range(400)], daemon=True).start()
    dtype = "fp8_e4m3" if options.kv_cache_dtype == "fp8" else options.kv_cache_dtype
    client = Client(_named(options.worker_extension_cls), dtype, options.attention_backend)
    engine = Engine(client, options.kv_cache_dtype, options.model)
    app = Starlette(
        routes=[
            Route("/health", engine.health),
            Route("/metrics", engine.metrics),
            Route("/version", engine.version),
            Route("/v1/models", engine.models),
            Route("/tokenize", engine.tokenize, methods=["POST"]),
            Route("/sleep", engine.sleep, methods=["POST"]),
            Route("/is_sleeping", engine.is_sleeping),
            Route("/wake_up", engine.wake_up, methods=["POST"]),
            Route("/v1/completions", engine.generate, methods=["POST"]),
            Route("/v1/chat/completions", engine.generate, methods=["POST"]),
        ]
    )
    app.state.engine_client = client
    for name in options.middleware:
        app.add_middleware(_named(name))
    print("(APIServer pid=1) INFO 11-29 15:11:07 [api_server.py:1] the fake engine starts", flush=True)
    Server(uvicorn.Config(app, uds=options.uds, log_config=None, log_level="critical", timeout_graceful_shutdown=1)).run()


def note(name: str, text: str) -> None:
    """Leave something for the test to read."""
    (Path(os.environ["FAKE_VLLM_NOTES"]) / (f"reference-{name}" if _IS_REFERENCE else name)).write_text(text)


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
