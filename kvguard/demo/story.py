"""The main job, shown on a real vLLM: first as everybody starts it, then the same command behind kvguard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

import httpx
from rich.console import Console

from kvguard.demo.cache import SetupFailed
from kvguard.engine.process import EngineProcess, become_subreaper
from kvguard.engine.run_directory import process_group_members
from kvguard.vocabulary import ExitCode

FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager")
"""Keeps the start short on a small machine; nothing about the KV cache."""

_START_LIMIT = 300.0
_QUESTION = "What is the capital of France? Answer in one sentence."


def demo_environment(env: Mapping[str, str]) -> dict[str, str]:
    """1 GiB of KV cache, no downloads, no usage statistics, loopback only."""
    return {
        **env,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }


def policy_path() -> Path:
    """The packaged 16-bit policy."""
    return Path(str(resources.files("kvguard.policy") / "examples/sixteen-bit.yaml"))


def serve_command(vllm: Path, checkpoint: Path, port: int, *options: str) -> list[str]:
    """`kvguard serve … -- vllm serve …` for the trap checkpoint on loopback."""
    kvguard = [sys.executable, "-m", "kvguard.cli.main", "serve", "--policy", str(policy_path()), *options]
    return [*kvguard, "--", str(vllm), "serve", str(checkpoint), "--host", "127.0.0.1", "--port", str(port), *FLAGS]


class Story:
    """Prints what it does; every step is real. Logs go to files in `directory`."""

    def __init__(self, vllm: Path, checkpoint: Path, directory: Path) -> None:
        self._vllm = vllm
        self._checkpoint = checkpoint
        self._directory = directory
        self._console = Console(highlight=False, soft_wrap=True)
        self._env = demo_environment(os.environ)
        self._outcomes: list[tuple[str, str]] = []

    def tell(self) -> None:
        """Both acts and the summary. Raises SetupFailed when the engine does not come up."""
        begun = time.monotonic()
        self._heading("The checkpoint")
        config = json.loads((self._checkpoint / "config.json").read_text("utf-8"))
        self._say(f"TRAP = {self._checkpoint}")
        self._say("its config.json carries a compressed-tensors KV scheme, as quantization tools write it:")
        self._say("  kv_cache_scheme: " + json.dumps(config["quantization_config"]["kv_cache_scheme"]))
        self._say("The policy asks for a KV cache in the model's own 16 bit:")
        for line in policy_path().read_text("utf-8").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                self._say("  " + line)
        self._first_act()
        self._second_act()
        self._heading("Summary")
        width = max(len(what) for what, _ in self._outcomes)
        for what, outcome in self._outcomes:
            self._console.print(f"  {what:{width}}  {outcome}", markup=False)
        self._say(f"{time.monotonic() - begun:.0f} s. `make serve` leaves the guarded engine running on port 8000.")

    def _first_act(self) -> None:
        self._heading("1. As everybody starts it")
        self._shell(f"vllm serve TRAP {' '.join(FLAGS)}")
        asyncio.run(self._plain_engine())

    async def _plain_engine(self) -> None:
        become_subreaper()
        port = _free_port()
        log = self._directory / "engine.log"
        command = [str(self._vllm), "serve", str(self._checkpoint), "--host", "127.0.0.1", "--port", str(port), *FLAGS]
        with log.open("wb") as file:
            descriptors = (file.fileno(), file.fileno())
            engine = EngineProcess(command, self._env, on_bytes=lambda *_: None, secrets=(), outputs=descriptors)
            try:
                url = f"http://127.0.0.1:{port}"
                with self._console.status("vLLM is starting (about half a minute) …"):
                    await _until(lambda: _answers(f"{url}/health"), lambda: engine.exit_code is not None, log)
                self._show_echoes(url, log)
                self._verify(url, log)
            finally:
                await engine.stop(10)

    def _show_echoes(self, url: str, log: Path) -> None:
        text = log.read_text("utf-8", "replace")
        initializing = next((line for line in text.splitlines() if "Initializing a V1 LLM engine" in line), "")
        said = next((word for word in initializing.split() if word.startswith("kv_cache_dtype=")), "nothing")
        self._say(f"its log says      {said.rstrip(',')}")
        page = httpx.get(f"{url}/metrics", trust_env=False).text
        info = next((line for line in page.splitlines() if line.startswith("vllm:cache_config_info")), "")
        labels = [label for label in info.split(",") if label.split("=")[0] in ("cache_dtype", "kv_cache_size_tokens")]
        self._say(f"its metrics say   {', '.join(labels)}")
        self._outcomes.append(("plain vllm serve: log and metrics", f"{said.rstrip(',')}, {labels[0] if labels else '?'}"))

    def _verify(self, url: str, log: Path) -> None:
        self._say("What does it really run?")
        arguments = ["verify", url, "--policy", str(policy_path()), "--engine-log", str(log)]
        self._shell("kvguard verify http://127.0.0.1:PORT --policy sixteen-bit.yaml --engine-log engine.log")
        code = self._kvguard(*arguments)
        self._say(f"exit code {code}: {'refused' if code == ExitCode.POLICY_VIOLATION else 'not refused'}")
        effective = json.loads(_run_kvguard([*arguments, "--json"], self._console.width).stdout)["effective"]
        found = f"{effective['dtype']}, {effective['confidence']}, {effective['kv_tokens']:,} tokens"
        self._outcomes.append(("plain vllm serve: kvguard verify", f"{found}: exit {code}"))

    def _second_act(self) -> None:
        self._heading("2. The same command behind kvguard")
        self._shell(f"kvguard serve --policy sixteen-bit.yaml -- vllm serve TRAP {' '.join(FLAGS)}")
        port, management = _free_port(), _free_port()
        records = self._directory / "records"
        options = ("--management-port", str(management), "--record-dir", str(records), "--settle", "0")
        command = serve_command(self._vllm, self._checkpoint, port, *options)
        run_base = Path(tempfile.gettempdir()) / f"kvguard-demo-{os.getpid()}"
        out, err = self._directory / "serve.out", self._directory / "serve.err"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            env = {**self._env, "KVGUARD_RUN_DIR": str(run_base)}
            process = subprocess.Popen(command, stdout=out_file, stderr=err_file, env=env)
        try:
            with self._console.status("kvguard starts vLLM and proves its KV cache …"):
                asyncio.run(
                    _until(
                        lambda: _answers(f"http://127.0.0.1:{management}/readyz"),
                        lambda: process.poll() is not None,
                        err,
                    )
                )
            self._own_lines(err)
            group = int(next(run_base.glob("*/engine.pid")).read_text("ascii").split()[0])
            self._chat(f"http://127.0.0.1:{port}")
            self._shell("kvguard record show")
            self._kvguard("record", "show", str(next(records.glob("*.json"))))
            self._show_metrics(management)
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
        left = len(process_group_members(group)) + run_base.exists()
        remains = "nothing left behind" if not left else f"{left} processes or directories LEFT BEHIND"
        self._say(f"SIGTERM: drained, exit code {process.returncode}, {remains}")
        self._outcomes.append(("kvguard serve: drained on SIGTERM", f"exit {process.returncode}, {remains}"))

    def _own_lines(self, err: Path) -> None:
        """kvguard's own lines, without the engine's log."""
        for line in err.read_text("utf-8", "replace").splitlines():
            if line.startswith("kvguard"):
                self._say(line.replace(str(self._checkpoint), "TRAP"))

    def _chat(self, url: str) -> None:
        self._shell(f"curl {url}/v1/chat/completions -d '{{… \"{_QUESTION}\" …}}'")
        body = {
            "model": str(self._checkpoint),
            "messages": [{"role": "user", "content": _QUESTION}],
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=120)
        for name, value in answer.headers.items():
            if name.startswith("x-kvguard"):
                self._say(f"  {name}: {value}")
        said = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.text
        self._say(f"  {said}")
        proven = f"{answer.headers['x-kvguard-confidence']} {answer.headers['x-kvguard-kv-cache-dtype']}"
        self._outcomes.append(("kvguard serve: the same command", f"{proven}, served: {said}"))

    def _show_metrics(self, management: int) -> None:
        self._shell("curl http://127.0.0.1:9464/metrics")
        wanted = ("kvguard_effective_info", "kvguard_kv_cache_", "kvguard_batch_", "kvguard_proxy_requests_total")
        for line in httpx.get(f"http://127.0.0.1:{management}/metrics", trust_env=False).text.splitlines():
            if line.startswith(wanted):
                self._say(f"  {line}")

    def _kvguard(self, *arguments: str) -> int:
        """Run a kvguard command and show what it prints."""
        done = _run_kvguard(arguments, self._console.width)
        for line in (done.stdout + done.stderr).splitlines():
            self._say("  " + line.replace(str(self._checkpoint), "TRAP"))
        return done.returncode

    def _heading(self, text: str) -> None:
        self._console.print(f"\n[bold]{text}[/bold]")

    def _shell(self, text: str) -> None:
        self._console.print(f"\n$ {text}", markup=False, style="cyan")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


def _run_kvguard(arguments: Sequence[str], width: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvguard.cli.main", *arguments]
    env = {**os.environ, "COLUMNS": str(max(width, 120))}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@contextlib.contextmanager
def story(vllm: Path, checkpoint: Path) -> Iterator[Story]:
    """A story with a directory for its logs and records, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvguard-demo-") as directory:
        yield Story(vllm, checkpoint, Path(directory))


async def _until(reached: Callable[[], bool], ended: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT
    while not await asyncio.to_thread(reached):
        if ended() or time.monotonic() > deadline:
            raise SetupFailed(f"the engine did not come up; the end of its log:\n{_end_of(log)}")
        await asyncio.sleep(0.3)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def replace_by_serve(vllm: Path, checkpoint: Path, arguments: Sequence[str] = ()) -> None:
    """Become `kvguard serve` on the trap checkpoint, on port 8000 of loopback."""
    command = serve_command(vllm, checkpoint, 8000, *arguments)
    os.execve(command[0], command, demo_environment(os.environ))  # noqa: S606 (our own interpreter)
