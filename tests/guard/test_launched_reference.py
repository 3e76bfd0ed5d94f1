"""`kvguard serve --shadow-launch` on fake engines: the second one in every state, and clients who notice nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_engine import Faulty
from kvguard.engine.run_directory import process_group_members

LAUNCH = (
    *("--settle", "0", "--shadow-launch"),
    *(word for setting in ("rate=1", "engine-share=1", "probes-per-minute=6000") for word in ("--shadow-set", setting)),
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Faulty]]:
    """Starts kvguard with a reference of its own; everything started is ended with the test."""
    started: list[Faulty] = []

    def one(*flags: str, options: tuple[str, ...] = (), **more: Any) -> Faulty:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        flags = flags or ("--kv-cache-dtype", "fp8_e4m3")
        started.append(Faulty(directory, *flags, options=(*LAUNCH, *options), **more))
        return started[-1].wait_ready()

    yield one
    for each in started:
        each.close()


def until(what: Callable[[], Any], reached: Callable[[Any], bool], limit: float = 60.0) -> Any:
    deadline = time.monotonic() + limit
    while not reached(seen := what()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
    return seen


def report(run: Faulty) -> dict[str, Any]:
    found: dict[str, Any] = run.management("/shadow").json()
    return {"state": None, "reason": "", "probes": 0, **found}  # before probing begins, the answer is an explanation


def probing(run: Faulty) -> dict[str, Any]:
    return until(lambda: report(run), lambda seen: seen["state"] == "blind")  # type: ignore[no-any-return]


def asks(run: Faulty, times: int = 1) -> None:
    for _ in range(times):
        assert run.chat().status_code == 200


def test_it_is_started_once_the_primary_serves_and_ends_with_it(start: Callable[..., Faulty]) -> None:
    run = start(options=("--shadow-launch-flag=--gpu-memory-utilization=0.4",))
    seen = probing(run)
    assert seen["reference"] == "launched"
    assert seen["equality"].endswith("nothing but the KV cache, sizes and addresses differs")
    group, parent = run.note("reference-started")
    assert parent == run.process.pid
    assert group != run.engine_group()
    served = run.err.index("info  serving ")
    assert served < run.err.index("reference engine started")
    assert "reference | (APIServer pid=1) INFO" in run.err
    assert run.out.count("the fake engine starts") == 1, "the primary's own log, unchanged"
    asks(run, 2)
    assert until(lambda: report(run), lambda now: now["probes"] >= 2)["estimates"]["cost"]["abs_delta"]["value"] == 0.25
    metrics = run.management("/metrics").text
    assert "kvguard_shadow_reference_up 1.0" in metrics
    assert len(list(run.records.glob("*.json"))) == 1, "the newest record is the primary's"
    assert run.stop() == 0
    assert process_group_members(group) == []
    run.assert_nothing_left()


def test_killed_it_is_started_again_and_clients_see_nothing(start: Callable[..., Faulty]) -> None:
    run = start(faults=["reference:orphan"])
    probing(run)
    group, _ = run.note("reference-started")
    os.kill(group, signal.SIGKILL)
    asks(run, 3)
    away = until(lambda: report(run), lambda seen: seen["state"] == "waiting")
    assert "ended with signal SIGKILL" in away["reason"]
    assert away["lost"] == 1
    metrics = run.management("/metrics").text
    assert "kvguard_shadow_reference_up 0.0" in metrics
    assert "kvguard_shadow_reference_lost_total 1.0" in metrics
    assert 'kvguard_shadow_state{state="waiting"} 1.0' in metrics
    asks(run, 2)
    probing(run)
    assert run.note("reference-started")[0] != group
    before = report(run)["probes"]
    asks(run, 2)
    until(lambda: report(run), lambda seen: seen["probes"] >= before + 2)
    assert run.stop() == 0
    run.assert_nothing_left()
    assert process_group_members(run.note("reference-orphan")[0]) == [], "what it left elsewhere goes with the last engine"


@pytest.mark.parametrize(
    ("faults", "options", "state", "says"),
    [
        (["reference:exits"], (), "waiting", "ended with exit code 1; it said: ValueError: No available memory"),
        (["reference:never_healthy"], (), "waiting", "the reference engine is starting"),
        (["reference:quantized"], (), "refused", "is not proven 16-bit"),
        (["reference:rank_missing"], (), "refused", "is not proven 16-bit"),
        (["reference:nan"], (), "refused", "canaries"),
        ([], ("--shadow-launch-flag=--seed=7",), "refused", "argv.--seed (nothing, there 7)"),
    ],
)
def test_one_that_cannot_be_had_is_said_and_never_a_clients_concern(
    start: Callable[..., Faulty], faults: list[str], options: tuple[str, ...], state: str, says: str
) -> None:
    run = start(faults=faults, options=options)
    seen = until(lambda: report(run), lambda seen: seen["state"] == state and says in seen["reason"])
    assert seen["probes"] == 0
    asks(run)
    assert run.management("/readyz").status_code == 200
    group, _ = run.wait_note("reference-started")
    if state == "refused":
        until(lambda: process_group_members(group), lambda left: left == [])
    assert run.stop() == 0
    assert process_group_members(group) == []
    run.assert_nothing_left()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stubborn_one_does_not_outlive_the_stop(start: Callable[..., Faulty], signals: int) -> None:
    run = start(faults=["reference:stubborn"])
    probing(run)
    group, _ = run.note("reference-started")
    for _ in range(signals - 1):
        run.process.send_signal(signal.SIGTERM)
    assert run.stop() == 0
    assert process_group_members(group) == []
    run.assert_nothing_left()


def test_it_is_ended_when_the_primary_dies(start: Callable[..., Faulty]) -> None:
    run = start()
    probing(run)
    primary = run.engine_group()
    assert primary is not None
    os.kill(primary, signal.SIGKILL)
    assert run.wait_exit(60) == 5
    assert process_group_members(run.note("reference-started")[0]) == []
    run.assert_nothing_left()


def test_it_is_ended_when_kvguard_is_killed(start: Callable[..., Faulty]) -> None:
    run = start()
    probing(run)
    group, _ = run.note("reference-started")
    run.process.kill()
    run.process.wait(120)
    until(lambda: process_group_members(group), lambda left: left == [])
