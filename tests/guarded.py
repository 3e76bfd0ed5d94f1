"""Runs `kvguard serve` (or plain vLLM) on the real engine, the way a user would, and looks at it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from kvguard.record.statement import Statement
from kvguard.record.store import load_statement
from kvguard.vocabulary import Check, Effective

KVGUARD = str(Path(sys.executable).with_name("kvguard"))
SMALL = ("--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager")
START_LIMIT = 240.0


def engine_environment(**more: str) -> dict[str, str]:
    """1 GiB of KV cache, nothing fetched, everything on loopback."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        **more,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def probing(*settings: str) -> tuple[str, ...]:
    """Options of `kvguard serve` for probes of every request, bounded by nothing but their own time; `settings` besides."""
    unbounded = ("rate=1", "engine-share=1", "gap-share=1", "max-stall-ms=60000", "max-age-s=3600", "probes-per-minute=600")
    return ("--shadow", "in-engine", *(word for setting in (*unbounded, *settings) for word in ("--shadow-set", setting)))


class Guarded:
    """One `kvguard serve`. Its output is kept in files, its run directory is its own, so leftovers can be seen."""

    start_limit, look_every = START_LIMIT, 0.2

    def __init__(
        self,
        directory: Path,
        model: Path,
        *flags: str,
        vllm: str,
        policy: str = "",
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        out: Path | None = None,
        err: Path | None = None,
    ):
        self.directory = directory
        self.model = str(model)
        self.port, self.management_port = free_port(), free_port()
        self.run_base = Path(f"/tmp/kvgt-{secrets.token_hex(4)}")
        self.records = directory / "records"
        self.termination_log = directory / "termination-log"
        self._groups: dict[str, int] = {}
        policy_file = directory / "policy.yaml"
        policy_file.write_text(policy)
        command = [KVGUARD, "serve", "--management-port", str(self.management_port), "--record-dir", str(self.records)]
        command += ["--policy", str(policy_file)] if policy else []
        command += [*options, "--", vllm, "serve", self.model, "--host", "127.0.0.1", "--port", str(self.port), *SMALL, *flags]
        self._out = (out or directory / "out").open("wb")
        self._err = (err or directory / "err").open("wb")
        ours = {"KVGUARD_RUN_DIR": str(self.run_base), "KVGUARD_TERMINATION_LOG": str(self.termination_log)}
        self.process = subprocess.Popen(
            command,
            stdout=self._out,
            stderr=self._err,
            env=engine_environment(**{**ours, **(env or {})}),
            start_new_session=True,
        )

    # What it says

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text(errors="replace")

    def record(self) -> dict[str, Any]:
        newest = max(self.records.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        statement: dict[str, Any] = json.loads(newest.read_text())
        return statement

    def statement(self) -> Statement:
        return load_statement(max(self.records.glob("*.json"), key=lambda path: path.stat().st_mtime_ns))

    def effective(self) -> Effective:
        return self.statement().effective

    def check(self, name: str) -> Check:
        return next(check for check in self.statement().checks if check.name == name)

    def management(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.management_port}{path}", trust_env=False, timeout=60)

    def api(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", trust_env=False, timeout=60)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def chat(
        self, question: str = "What is the capital of France?", headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 16,
            "temperature": 0,
            **more,
        }
        url = f"{self.base_url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, trust_env=False, timeout=120)

    def gauge(self, name: str) -> float | None:
        """A gauge of the engine's own /metrics, through kvguard."""
        for line in self.api("/metrics").text.splitlines():
            if line.startswith(name):
                return float(line.rpartition(" ")[2])
        return None

    # What it does

    def wait_ready(self) -> Guarded:
        self._wait(lambda: self._status("/readyz") == 200, "ready")
        return self

    def wait_state(self, state: str) -> Guarded:
        self._wait(lambda: self._state() == state, f"in state {state}")
        return self

    def _status(self, path: str) -> int | None:
        try:
            return self.management(path).status_code
        except httpx.HTTPError:
            return None

    def _state(self) -> str | None:
        try:
            return str(self.management("/readyz").json()["state"])
        except httpx.HTTPError:
            return None

    def _wait(self, reached: Any, what: str) -> None:
        deadline = time.monotonic() + self.start_limit
        while not reached():
            if self.process.poll() is not None:
                raise AssertionError(f"kvguard exited with {self.process.returncode} before it was {what}:\n{self.err[-3000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"kvguard was not {what} within {self.start_limit} s:\n{self.err[-3000:]}")
            self.engine_group()
            time.sleep(self.look_every)
        self.engine_group()

    def wait_exit(self, limit: float = START_LIMIT) -> int:
        deadline = time.monotonic() + limit
        while self.process.poll() is None and time.monotonic() < deadline:
            self.engine_group()
            time.sleep(0.1)
        return self.process.wait(1)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(120)

    def close(self) -> None:
        """End it whatever its state; what it leaves then is the test's own doing."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._out.close()
        self._err.close()
        for pid in self.engine_processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.run_base, ignore_errors=True)

    # What is left of it

    def engine_group(self, name: str = "engine") -> int | None:
        """The process group of the engine (or the "reference"), remembered from the run directory while that exists."""
        with contextlib.suppress(OSError):  # it may be taken away at any moment
            for note in self.run_base.glob(f"*/{name}.pid"):
                self._groups[name] = int(note.read_text().split()[0])
        return self._groups.get(name)

    def engine_processes(self) -> list[int]:
        """Processes of this start's engine, zombies included."""
        group = self.engine_group()
        if group is None:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                except OSError:
                    continue
                if str(group) in (fields[2], fields[3]):
                    found.append(int(entry.name))
        return found

    def engine_process(self, title: str) -> int:
        """The one engine process whose command line contains `title` ("EngineCore", "Worker", "vllm serve")."""
        titles = {}
        for pid in self.engine_processes():
            titles[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if title in titles[pid]:
                return pid
        raise AssertionError(f"no engine process called {title}: {titles}")

    def assert_nothing_left(self) -> None:
        assert "engine" in self._groups, "look at engine_processes() while the engine runs, or nothing is proven"
        assert self.engine_processes() == []
        assert not self.run_base.exists()


@contextlib.contextmanager
def stream(served: Guarded, body: dict[str, Any]) -> Iterator[httpx.Response]:
    """A streaming completion through kvguard."""
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream(
            "POST", f"{served.base_url}/v1/completions", json={"model": served.model, "stream": True, **body}
        ) as answer,
    ):
        yield answer


class Reader(threading.Thread):
    """Reads a stream to its end on a thread. `began` is set at the first byte; `error` is how reading failed."""

    def __init__(self, served: Guarded, **body: Any) -> None:
        super().__init__()
        self._served = served
        self._body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, **body}
        self.received = bytearray()
        self.began = threading.Event()
        self._left = threading.Event()
        self.error: httpx.HTTPError | None = None
        self.start()

    def run(self) -> None:
        try:
            with stream(self._served, self._body) as answer:
                for piece in answer.iter_bytes():
                    self.received.extend(piece)
                    self.began.set()
                    if self._left.is_set():
                        return
        except httpx.HTTPError as error:
            self.error = error

    def leave(self) -> None:
        """Hang up, at the next piece."""
        self._left.set()
        self.join(120)

    def tokens(self) -> int:
        """How many tokens have come, where the request asks for `continuous_usage_stats`."""
        _, found, usage = bytes(self.received).rpartition(b'"completion_tokens":')
        return int(usage.split(b",")[0].split(b"}")[0]) if found else 0

    def events(self) -> list[str]:
        """The data of the events received."""
        return [line.removeprefix("data: ") for line in self.received.decode().splitlines() if line.startswith("data: ")]
