"""`kvguard attach` beside a plain `vllm serve`: by TCP with its log, by its Unix socket, and while the engine is swapped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from guarded import KVGUARD, SMALL, START_LIMIT, engine_environment, free_port
from kvguard.engine.process import children_of
from kvguard.record.store import load_statement

FP8 = "kv_cache: {dtype: fp8_e4m3}\ndrift: {action: unready, min_confidence: corroborated}\n"


class Plain:
    """`vllm serve`, as everybody starts it."""

    def __init__(self, vllm: Path, model: Path, log: Path, *flags: str):
        command = [str(vllm), "serve", str(model), *SMALL, *flags]
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=engine_environment(), process_group=0)

    def kill(self) -> None:
        """End it at once, with its children."""
        family = [self.process.pid]
        for pid in family:
            family += children_of(pid)
        for pid in family:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        self.process.wait(120)


class Beside:
    """`kvguard attach` to an engine."""

    def __init__(self, directory: Path, engine: str, *options: str, policy: str = FP8):
        self.directory, self.records = directory, directory / "records"
        self.port, self.management = free_port(), free_port()
        (directory / "policy.yaml").write_text(policy)
        command = [KVGUARD, "attach", "--engine", engine, "--host", "127.0.0.1", "--port", str(self.port), "--settle", "0"]
        command += ["--management-port", str(self.management), "--record-dir", str(self.records), "--reverify", "5"]
        command += ["--policy", str(directory / "policy.yaml"), *options]
        self._err = (directory / "err").open("wb")
        self.process = subprocess.Popen(command, stderr=self._err, env={**os.environ})

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.management}{path}", trust_env=False, timeout=60)

    def state(self) -> tuple[str, int]:
        try:
            answer = self.get("/readyz")
        except httpx.HTTPError:
            return "", 0
        return answer.json()["state"], answer.status_code

    def wait(self, state: str, ready: int = 200) -> None:
        deadline = time.monotonic() + START_LIMIT
        while self.state() != (state, ready):
            assert self.process.poll() is None, self.err[-3000:]
            assert time.monotonic() < deadline, (self.state(), self.err[-3000:])
            time.sleep(0.2)

    def chat(self, model: Path) -> httpx.Response:
        body = {"model": str(model), "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=body, trust_env=False, timeout=120)

    def newest(self) -> dict[str, Any]:
        predicate: dict[str, Any] = json.loads(max(self.records.glob("*.json")).read_text())["predicate"]
        return predicate

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(120)
        self._err.close()
        return code


@pytest.fixture(scope="module")
def plain(engine_bin: Path, model: Path) -> Iterator[Callable[..., Plain]]:
    started: list[Plain] = []

    def start(log: Path, *flags: str) -> Plain:
        started.append(Plain(engine_bin, model, log, *flags))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def test_an_engine_swapped_behind_it_is_drift_until_it_is_put_back(
    plain: Callable[..., Plain], model: Path, tmp_path: Path
) -> None:
    log, port = tmp_path / "engine.log", free_port()
    address = ("--host", "127.0.0.1", "--port", str(port))
    engine = plain(log, *address, "--kv-cache-dtype", "fp8_e4m3")
    beside = Beside(tmp_path, f"http://127.0.0.1:{port}", "--log", str(log))
    try:
        beside.wait("serving")
        answer = beside.chat(model)
        assert (answer.status_code, answer.headers["x-kvguard-kv-cache-dtype"]) == (200, "fp8_e4m3")
        assert answer.headers["x-kvguard-confidence"] == "corroborated"
        first = answer.headers["x-kvguard-record"]
        effective = load_statement(max(beside.records.glob("*.json"))).effective
        assert (effective.kv_tokens, effective.kv_bytes) == (93184, 1 << 30)

        engine.kill()
        beside.wait("starting", 503)
        assert beside.chat(model).status_code == 503
        engine = plain(log, *address)
        beside.wait("drifted", 503)
        assert "kv_cache_dtype: fp8_e4m3 was established, now bfloat16" in beside.get("/readyz").json()["reason"]
        answer = beside.chat(model)
        assert (answer.status_code, answer.headers["x-kvguard-kv-cache-dtype"]) == (200, "bfloat16")
        metrics = beside.get("/metrics").text
        assert 'kvguard_drift_total{field="kv_cache_dtype"} 1.0' in metrics
        assert 'kvguard_state{state="drifted"} 1.0' in metrics
        changes = {change["field"]: (change["before"], change["after"]) for change in beside.newest()["drift"]}
        assert changes["kv_cache_dtype"] == ("fp8_e4m3", "bfloat16")

        engine.kill()
        engine = plain(log, *address, "--kv-cache-dtype", "fp8_e4m3")
        beside.wait("serving")
        assert beside.chat(model).headers["x-kvguard-record"] == first
        assert "drift is over" in beside.err
    finally:
        code = beside.stop()
    assert code == 0
    assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=60).status_code == 200  # it is not ours to end
    engine.kill()


def test_by_its_socket_the_engine_tells_its_command(plain: Callable[..., Plain], model: Path, tmp_path: Path) -> None:
    """No log: its metrics have the bytes, the process behind the socket its parallel sizes."""
    socket = Path(f"/tmp/kvgt-attach-{os.getpid()}.sock")
    engine = plain(tmp_path / "engine.log", "--uds", str(socket), "--kv-cache-dtype", "fp8_e4m3")
    beside = Beside(tmp_path, str(socket))
    try:
        beside.wait("serving")
        assert beside.chat(model).headers["x-kvguard-kv-cache-dtype"] == "fp8_e4m3"
        predicate = beside.newest()
        requested = next(a for a in predicate["attributes"] if a["attribute"] == "requested")["value"]
        assert any(claim["field"] == "kv_cache_dtype" and claim["value"] == "fp8_e4m3" for claim in requested)
        assert beside.get("/metrics").text.count("kvguard_verification_stale 0.0") == 1
    finally:
        code = beside.stop()
        engine.kill()
        socket.unlink(missing_ok=True)
    assert code == 0
