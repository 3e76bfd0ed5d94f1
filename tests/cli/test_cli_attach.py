"""`kvguard attach` as a process, in front of an engine in miniature."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from checkpoint_fakes import SMOLLM2, write
from guarded import KVGUARD, free_port
from plain_engine import PlainEngine

FP8 = "kv_cache: {dtype: fp8_e4m3}\n"


class Attach:
    """One `kvguard attach`."""

    def __init__(self, directory: Path, *options: str, policy: str = FP8):
        self.directory = directory
        self.port, self.management = free_port(), free_port()
        (directory / "policy.yaml").write_text(policy)
        command = [
            KVGUARD,
            "attach",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--policy",
            str(directory / "policy.yaml"),
        ]
        command += [
            "--management-port",
            str(self.management),
            "--record-dir",
            str(directory / "records"),
            "--settle",
            "0",
            *options,
        ]
        env = {**os.environ, "HOME": str(directory), "KVGUARD_TERMINATION_LOG": str(directory / "last")}
        with (directory / "err").open("wb") as err:
            self.process = subprocess.Popen(command, stderr=err, env=env)

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text()

    def wait_ready(self) -> None:
        self.until(lambda: self.management_get("/readyz") == 200)

    def management_get(self, path: str) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.management}{path}", trust_env=False, timeout=60).status_code
        except httpx.HTTPError:
            return 0

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not reached():
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.05)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PlainEngine]:
    one = PlainEngine(str(write(tmp_path / "model", SMOLLM2, {})), "fp8_e4m3")
    one.root = str(tmp_path / "model")
    yield one
    one.end()


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Callable[..., Attach]]:
    started: list[Attach] = []

    def start(*options: str, policy: str = FP8) -> Attach:
        started.append(Attach(tmp_path, *options, policy=policy))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(120)


def test_requests_pass_with_the_four_headers_and_sigterm_leaves_the_engine(
    engine: PlainEngine, attach: Callable[..., Attach]
) -> None:
    """The prediction names the width that capacity shows: files and command ask for nothing, so it is only a width here."""
    run = attach("--engine", engine.url, "--kv-bytes", "1GiB", "--reverify", "0", policy="{}")
    run.wait_ready()
    answer = httpx.post(f"http://127.0.0.1:{run.port}/v1/completions", json={"prompt": "x"}, trust_env=False, timeout=60)
    assert answer.status_code == 200
    headers = {name: value for name, value in answer.headers.items() if name.startswith("x-kvguard-")}
    assert headers["x-kvguard-kv-cache-dtype"] == "8-bit"
    assert headers["x-kvguard-confidence"] == "corroborated"
    assert headers["x-kvguard-record"].startswith("sha256:")
    asked = engine.asked.count("/version"), engine.asked.count("/is_sleeping")
    assert httpx.post(f"http://127.0.0.1:{run.port}/wake_up", trust_env=False, timeout=60).status_code == 200
    run.until(lambda: engine.asked.count("/is_sleeping") > asked[1])
    run.until(lambda: "/wake_up was answered" in run.err)
    assert engine.asked.count("/version") == asked[0]  # the same run of it
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(120) == 0
    assert httpx.get(f"{engine.url}/health", trust_env=False, timeout=60).status_code == 200


def test_the_access_log_has_a_line_for_each_request(engine: PlainEngine, attach: Callable[..., Attach]) -> None:
    run = attach("--engine", engine.url, "--kv-bytes", "1GiB", "--reverify", "0", "--access-log", policy="{}")
    run.wait_ready()
    url, names = f"http://127.0.0.1:{run.port}/v1/completions", {"x-request-id": "r1"}
    assert httpx.post(url, json={"prompt": "canary"}, headers=names, trust_env=False, timeout=60).status_code == 200
    run.until(lambda: "request_id=r1" in run.err)
    [line] = [line for line in run.err.splitlines() if " request  " in line]
    assert "method=POST path=/v1/completions status=200 outcome=ok" in line
    assert "canary" not in run.err


def test_a_refusal_is_exit_3_and_one_line_to_the_orchestrator(engine: PlainEngine, attach: Callable[..., Attach]) -> None:
    run = attach("--engine", engine.url, "--kv-bytes", "1GiB", policy="kv_cache: {dtype: 16bit}\n")
    assert run.process.wait(120) == 3
    assert (run.directory / "last").read_text().startswith("refused by policy: kv_cache_dtype fail")
    assert "Traceback" not in run.err
    assert httpx.get(f"{engine.url}/health", trust_env=False, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--engine", "http://["), "not a URL"),
        (("--engine", "http://"), "not a URL (no host)"),
        (("--engine", "http://127.0.0.1:1", "--log", "/none/engine.log"), "engine log /none/engine.log: cannot be read"),
        (("--engine", "http://127.0.0.1:1", "--kv-bytes", "lots"), "--kv-bytes 'lots': not a size"),
        (("--engine", "http://127.0.0.1:1", "--ssl-keyfile", "k.pem"), "TLS needs --ssl-certfile as well"),
        (("--engine", "http://127.0.0.1:1", "--otlp-endpoint", "collector:4318"), "required is an http or https URL"),
        (("--engine", "http://127.0.0.1:1", "--management-host", "no.such.host.invalid"), "the host has no address"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(attach: Callable[..., Attach], options: tuple[str, ...], says: str) -> None:
    run = attach(*options)
    assert run.process.wait(120) == 2
    assert says in run.err
    assert "Traceback" not in run.err


def test_a_checkpoint_that_cannot_be_read_is_exit_2(engine: PlainEngine, attach: Callable[..., Attach], tmp_path: Path) -> None:
    run = attach("--engine", engine.url, "--checkpoint", str(tmp_path / "nothing"))
    assert run.process.wait(120) == 2
    assert "not a readable model directory" in run.err


NOTHING = (404, b"404 page not found")
MODELS = b'{"data": [{"id": "m", "owned_by": "%s"}]}'


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"/health": NOTHING}, "whose /health says 200 or 503: HTTP 404: 404 page not found"),
        ({"/health": (302, b"")}, "whose /health says 200 or 503: HTTP 302"),
        (
            {"/version": NOTHING, "/v1/models": (200, b"<html>"), "/metrics": NOTHING},
            "/version: HTTP 404: 404 page not found; /v1/models: HTTP 200 with a body that is not JSON: an HTML page; ",
        ),
        (
            {"/v1/models": (200, MODELS % b"tensorrt_llm"), "/metrics": (200, b"trtllm_requests 1\n")},
            "/version: '0.32.0'; /v1/models: models of tensorrt_llm; /metrics: no series of vLLM",
        ),
    ],
)
def test_what_is_not_vllm_is_one_line_that_says_what_answered(
    engine: PlainEngine, attach: Callable[..., Attach], answers: dict[str, tuple[int, bytes]], says: str
) -> None:
    engine.says = answers
    run = attach("--engine", engine.url, policy="{}")
    assert run.process.wait(120) == 2
    [line] = [line for line in run.err.splitlines() if "what answers there is not vLLM" in line]
    assert says in line
    assert engine.url in line
    assert "required is a running vLLM server" in line
    assert "Traceback" not in run.err


@pytest.mark.parametrize(
    "answers",
    [
        {"/v1/models": (401, b"{}"), "/metrics": (404, b"")},
        {"/version": NOTHING, "/metrics": NOTHING, "/v1/models": (200, MODELS % b"vllm")},
        {"/version": NOTHING, "/v1/models": NOTHING},
    ],
)
def test_what_may_be_vllm_behind_something_is_looked_at(
    engine: PlainEngine, attach: Callable[..., Attach], answers: dict[str, tuple[int, bytes]]
) -> None:
    engine.says = answers
    run = attach("--engine", engine.url)
    assert run.process.wait(120) in (3, 4), run.err
    assert "what answers there is not vLLM" not in run.err


def test_who_waits_says_for_what(attach: Callable[..., Attach]) -> None:
    port = free_port()
    run = attach("--engine", f"http://127.0.0.1:{port}", "--start-timeout", "1")
    assert run.process.wait(120) == 4
    assert f'because="nobody listens at http://127.0.0.1:{port}"' in run.err


def test_an_engine_that_does_not_come_is_exit_4(attach: Callable[..., Attach]) -> None:
    run = attach("--engine", f"http://127.0.0.1:{free_port()}", "--start-timeout", "1")
    assert run.process.wait(120) == 4
    assert (run.directory / "last").read_text().startswith("engine failed to start: no healthy engine at")
