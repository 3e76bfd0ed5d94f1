"""A reference engine beside the real one: what it measures, and its death, which no client notices."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guarded import Guarded
from kvguard.engine.run_directory import process_group_members

BUSY = ("rate=1", "engine-share=1", "gap-share=1", "probes-per-minute=600", "greedy=true", "max-tokens=32", "max-age-s=3600")
OPTIONS = ("--shadow-launch", *(word for setting in BUSY for word in ("--shadow-set", setting)))
QUESTIONS = [f"Write a sentence about the number {number}." for number in range(8)]


@pytest.fixture(scope="module")
def served(guarded: Callable[..., Guarded]) -> Guarded:
    return guarded("plain", "--kv-cache-dtype", "fp8_e4m3", options=OPTIONS).wait_ready()


def _until(served: Guarded, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The shadow report once it is as wanted."""
    deadline = time.monotonic() + 300
    while True:
        report: dict[str, Any] = {"state": None, **served.management("/shadow").json()}
        if reached(report):
            return report
        assert time.monotonic() < deadline, report
        time.sleep(0.5)


def _settled(report: dict[str, Any]) -> bool:
    return all(row["offered"] == row["done"] + sum(row["dropped"].values()) for row in report["coverage"])


def _answers(served: Guarded) -> list[str]:
    """What the engine answers, one question at a time and with no probe beside: a fuller batch rounds differently."""
    found = []
    for question in QUESTIONS:
        answer = served.chat(question, max_tokens=32)
        assert answer.status_code == 200
        found.append(answer.json()["choices"][0]["message"]["content"])
        _until(served, _settled)
    return found


def _same(answers: list[str], before: list[str]) -> None:
    """Every request is answered, and as before: a near tie may round the other way, since the engine is never quite alone."""
    assert all(answers)
    assert sum(ours == theirs for ours, theirs in zip(answers, before, strict=True)) >= len(before) // 2


def _group(served: Guarded) -> int:
    group = served.engine_group("reference")
    assert group is not None
    return group


def test_its_estimate_is_that_of_the_pass_inside_the_engine(served: Guarded) -> None:
    report = _until(served, lambda report: report["state"] == "blind")
    assert report["equality"].endswith("nothing but the KV cache, sizes and addresses differs")
    # The pass inside the engine says 0.099 on these prompts, and the noise floor is 0.027.
    assert report["fidelity"]["residuals"]["16bit"] == pytest.approx(0.099, abs=0.027)
    assert served.effective().dtype == "fp8_e4m3"


def test_killed_it_comes_back_and_clients_notice_nothing(served: Guarded) -> None:
    _until(served, lambda report: report["state"] == "blind")
    before = _answers(served)
    probed = _until(served, lambda report: report["probes"] >= len(QUESTIONS))["probes"]
    first = _group(served)
    for pid in process_group_members(first):
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    _same(_answers(served), before)
    away = _until(served, lambda report: report["lost"] == 1)
    assert away["probes"] == probed
    assert served.management("/readyz").status_code == 200
    _until(served, lambda report: report["state"] == "blind")
    assert _group(served) != first
    assert process_group_members(first) == []
    _same(_answers(served), before)
    report = _until(served, lambda report: report["probes"] >= probed + len(QUESTIONS))
    estimate = report["estimates"]["cost"]["abs_delta"]
    assert estimate["low"] < 0.13
    assert estimate["high"] > 0.06


def test_it_ends_with_kvguard(served: Guarded) -> None:
    group = _group(served)
    assert served.stop() == 0
    assert process_group_members(group) == []
    served.assert_nothing_left()
