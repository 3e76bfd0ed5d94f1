"""The trap: a checkpoint whose compressed-tensors KV scheme makes vLLM run FP8 while log and metrics say `auto`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from guarded import KVGUARD, SMALL, START_LIMIT, Guarded, Reader, engine_environment, free_port
from kvguard.engine.process import children_of
from kvguard.vocabulary import ExitCode

SIXTEEN_BIT = "kv_cache: {dtype: bfloat16}"


@pytest.fixture(scope="module")
def outside(
    engine_bin: Path, variant: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """Plain `vllm serve` on the trap, started as everybody starts it: its URL and its log file."""
    directory = tmp_path_factory.mktemp("outside")
    port = free_port()
    log = directory / "engine.log"
    command = [str(engine_bin), "serve", str(variant("kv_scheme_scales")), "--host", "127.0.0.1", "--port", str(port), *SMALL]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=engine_environment(), process_group=0)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_LIMIT
    try:
        while True:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url, log
    finally:
        left = [child for pid in children_of(process.pid) for child in (*children_of(pid), pid)]
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in left:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def _verify(url: str, log: Path, policy: str, directory: Path) -> subprocess.CompletedProcess[str]:
    policy_file = directory / "policy.yaml"
    policy_file.write_text(policy)
    command = [KVGUARD, "verify", url, "--policy", str(policy_file), "--engine-log", str(log), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_verify_finds_fp8_by_capacity_and_refuses(outside: tuple[str, Path], tmp_path: Path) -> None:
    done = _verify(*outside, SIXTEEN_BIT, tmp_path)
    assert done.returncode == ExitCode.POLICY_VIOLATION, done.stderr
    answer = json.loads(done.stdout)
    assert answer["effective"]["dtype"] == "fp8_e4m3"
    assert answer["effective"]["confidence"] == "corroborated"
    claims = answer["claims"]
    for source in ("log", "metrics"):
        (echo,) = [c for c in claims if c["source"] == source and c["field"] == "kv_cache_dtype"]
        assert echo["value"] is None
        assert "auto: no information" in echo["note"]
    assert answer["effective"]["kv_tokens"] == 93184


def test_verify_prints_a_table_for_people(outside: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(SIXTEEN_BIT)
    command = [KVGUARD, "verify", outside[0], "--policy", str(tmp_path / "p.yaml"), "--engine-log", str(outside[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == ExitCode.POLICY_VIOLATION
    assert "auto: no information" in done.stdout
    assert "fp8_e4m3" in done.stdout


def test_verify_accepts_the_same_engine_under_an_fp8_policy(outside: tuple[str, Path], tmp_path: Path) -> None:
    done = _verify(*outside, "kv_cache: {dtype: fp8_e4m3, min_confidence: corroborated}", tmp_path)
    assert done.returncode == ExitCode.CLEAN, done.stdout + done.stderr
    proven = _verify(*outside, "kv_cache: {dtype: fp8_e4m3, min_confidence: proven}", tmp_path)
    assert proven.returncode == ExitCode.POLICY_VIOLATION


@pytest.fixture(scope="module")
def served(guarded: Callable[..., Guarded]) -> Guarded:
    return guarded("kv_scheme_scales", policy=SIXTEEN_BIT).wait_ready()


def test_behind_kvguard_the_same_command_runs_sixteen_bit(served: Guarded) -> None:
    effective = served.effective()
    assert (effective.dtype, effective.confidence, effective.scales) == ("bfloat16", "proven", "not_quantized")
    assert effective.kv_tokens == 46592
    assert {layer["tensor_dtype"] for layer in served.record()["predicate"]["layers"]} == {"torch.bfloat16"}
    assert "Paris" in served.chat().json()["choices"][0]["message"]["content"]


def test_sigterm_while_four_requests_stream(served: Guarded) -> None:
    """All four finish within the grace period, new ones are still taken while settling; exit 0, nothing left."""
    readers = [Reader(served, max_tokens=150) for _ in range(4)]
    assert all(reader.began.wait(120) for reader in readers)
    served.process.send_signal(signal.SIGTERM)
    served.wait_state("draining")
    assert served.management("/readyz").status_code == 503
    assert served.management("/livez").status_code == 200
    assert served.chat(max_tokens=2).status_code == 200
    for reader in readers:
        reader.join(120)
    assert served.wait_exit(60) == ExitCode.CLEAN
    for reader in readers:
        assert reader.error is None
        assert reader.events()[-1] == "[DONE]"
        assert json.loads(reader.events()[-2])["choices"][0]["finish_reason"] == "length"
    served.assert_nothing_left()
