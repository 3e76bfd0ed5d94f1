"""`vllm serve` as everybody starts it, and `kvguard attach` beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from guarded import KVGUARD, SMALL, START_LIMIT, engine_environment, free_port
from kvguard.engine.process import children_of

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
