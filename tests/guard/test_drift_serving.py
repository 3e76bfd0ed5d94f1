"""`kvguard serve` on an engine that changes while it serves: what passes through is noticed, nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_engine import Faulty

NOW = ("--settle", "0", "--reverify", "0")
PROVEN = "kv_cache: {dtype: fp8_e4m3, min_confidence: proven}\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Faulty]]:
    started: list[Faulty] = []

    def one(*flags: str, policy: str = PROVEN, options: tuple[str, ...] = NOW, **more: Any) -> Faulty:
        started.append(Faulty(tmp_path, "--enable-sleep-mode", *flags, policy=policy, options=options, **more))
        return started[-1]

    yield one
    for each in started:
        each.close()


def post(run: Faulty, path: str) -> int:
    return httpx.post(run.base_url + path, trust_env=False, timeout=60).status_code


def until(run: Faulty, reached: Callable[[], bool], what: str) -> None:
    run._wait(reached, what)


def metric(run: Faulty, line: str) -> bool:
    return line in run.management("/metrics").text


def test_waking_with_other_scales_on_the_device_is_drift_at_once(start: Callable[..., Faulty]) -> None:
    """Nothing but the request that woke it tells; no timer runs."""
    run = start(policy=PROVEN + "drift: {action: unready}\n", faults=["wakes_with_other_scales"]).wait_ready()
    assert "sleep_mode" in run.err
    assert run.effective().scales == "unit_default"
    assert post(run, "/sleep") == 200
    until(run, lambda: metric(run, "kvguard_verification_stale 1.0"), "stale")
    assert "the engine sleeps" in run.err
    assert run.management("/readyz").status_code == 200  # failing to read changes no verdict
    assert post(run, "/wake_up") == 200
    until(run, lambda: run._state() == "drifted", "drifted")
    assert run.effective().scales == "invalid"
    assert "on the device and" in run.effective().scales_detail
    assert run.chat().headers["x-kvguard-kv-scales"] == "invalid"
    assert metric(run, 'kvguard_drift_total{field="kv_scales"} 1.0')
    drift = run.record()["predicate"]["drift"]
    assert next(change["after"] for change in drift if change["field"] == "kv_scales") == "invalid"
    until(run, lambda: run.management("/readyz").status_code == 503, "unready")
    assert run.stop() == 0
    run.assert_nothing_left()


def test_workers_of_a_sleeping_engine_are_left_alone(start: Callable[..., Faulty]) -> None:
    run = start(faults=["asleep_after_sleep"], options=("--settle", "0", "--reverify", "0.1")).wait_ready()
    for _ in range(3):
        assert post(run, "/sleep") == 200
        until(run, lambda: metric(run, "kvguard_verification_stale 1.0"), "stale")
        assert post(run, "/wake_up") == 200
        until(run, lambda: metric(run, "kvguard_verification_stale 0.0"), "confirmed again")
    assert run.stop() == 0


def test_a_rank_that_raises_closes_the_channel_and_the_verdict_stands(start: Callable[..., Faulty]) -> None:
    run = start(faults=["raises_after_a_wake"]).wait_ready()
    before = run.management("/record").json()
    assert post(run, "/wake_up") == 200
    until(run, lambda: metric(run, "kvguard_verification_stale 1.0"), "stale")
    assert "worker 0 died" in run.err
    assert "stays closed until the engine is restarted" in run.err
    assert run._state() == "serving"
    assert run.chat().headers["x-kvguard-confidence"] == "proven"
    assert run.management("/record").json() == before
    assert metric(run, 'kvguard_drift_total{field="kv_scales"} 0.0')
    assert run.stop() == 0


def test_connectors_are_in_the_record(start: Callable[..., Faulty]) -> None:
    run = start(
        "--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_port": 14579}'
    ).wait_ready()
    [connector] = run.record()["predicate"]["connectors"]
    assert connector == {"flag": "--kv-transfer-config", "kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert run.record()["predicate"]["scales_digest"].startswith("sha256:")
    assert run.stop() == 0
