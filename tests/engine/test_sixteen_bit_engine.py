"""A plain checkpoint under a 16-bit policy: made explicit, proven, served; then vLLM's API server is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from guarded import Guarded, Reader
from kvguard.vocabulary import ExitCode


@pytest.fixture(scope="module")
def served(guarded: Callable[..., Guarded]) -> Guarded:
    return guarded("plain", policy="kv_cache: {dtype: bfloat16, min_confidence: proven}").wait_ready()


def test_sixteen_bit_is_explicit_and_proven(served: Guarded) -> None:
    assert "change   --kv-cache-dtype bfloat16" in served.err
    effective = served.effective()
    assert (effective.dtype, effective.confidence, effective.scales) == ("bfloat16", "proven", "not_quantized")
    metrics = served.management("/metrics").text
    assert "kvguard_kv_cache_capacity_tokens 46592.0" in metrics
    assert "kvguard_kv_cache_bytes_per_token 23040.0" in metrics
    assert served.chat().headers["x-kvguard-kv-cache-dtype"] == "bfloat16"


def test_only_the_socket_is_open_and_only_to_us(served: Guarded) -> None:
    (run_directory,) = served.run_base.iterdir()
    assert run_directory.stat().st_mode & 0o777 == 0o700
    assert (run_directory / "engine.sock").is_socket()
    assert (run_directory / "secret").stat().st_mode & 0o777 == 0o600
    secret = (run_directory / "secret").read_text()
    assert secret not in served.err + served.out + json.dumps(served.record())
    command = Path(f"/proc/{served.engine_group()}/cmdline").read_bytes()
    assert secret.encode() not in command


def test_the_api_server_killed_while_streaming(served: Guarded) -> None:
    """The client gets an error event and no [DONE]; kvguard exits 5; EngineCore and workers are gone."""
    reader = Reader(served)
    assert reader.began.wait(120)
    group = served.engine_group()
    assert group is not None
    assert len(served.engine_processes()) >= 2
    os.kill(group, signal.SIGKILL)
    reader.join(120)
    assert served.wait_exit(60) == ExitCode.ENGINE_DIED
    assert reader.error is None
    assert "[DONE]" not in reader.events()
    error = json.loads(reader.events()[-1])["error"]
    assert error["message"]
    assert "SIGKILL" in served.termination_log.read_text()
    served.assert_nothing_left()
