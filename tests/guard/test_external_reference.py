"""A reference behind a kvguard of its own, on fake engines: absent, there, stopped, killed, and back as something else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_engine import Faulty
from guarded import free_port

BUSY = ("rate=1", "engine-share=1", "probes-per-minute=6000", "retry-after-s=1")
PROBES = ("--settle", "0", *(word for setting in BUSY for word in ("--shadow-set", setting)))


class Fleet:
    """A primary that probes, and the places where its reference may be."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port, self.management = free_port(), free_port()
        self.started: list[Faulty] = []

    def _start(self, *flags: str, options: tuple[str, ...], **more: Any) -> Faulty:
        directory = self._directory / str(len(self.started))
        directory.mkdir()
        self.started.append(Faulty(directory, *flags, options=options, **more))
        return self.started[-1]

    def primary(self, *options: str) -> Faulty:
        run = self._start(
            "--kv-cache-dtype", "fp8_e4m3", options=(*PROBES, "--shadow", f"http://127.0.0.1:{self.port}", *options)
        )
        return run.wait_ready()

    def reference(self, *flags: str, dtype: str = "bfloat16") -> Faulty:
        """A guarded engine at the address that the primary was given."""
        options = ("--settle", "0", "--management-port", str(self.management))
        run = self._start("--kv-cache-dtype", dtype, *flags, "--port", str(self.port), options=options)
        run.management_port = self.management
        return run.wait_ready()

    def with_record(self) -> tuple[str, str]:
        return ("--shadow-record", f"http://127.0.0.1:{self.management}")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    for run in made.started:
        run.close()


def until(run: Faulty, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        report: dict[str, Any] = {"state": None, "reason": "", "probes": 0, **run.management("/shadow").json()}
        if reached(report):
            return report
        assert time.monotonic() < deadline, report
        time.sleep(0.1)


def probed(run: Faulty, more: int = 2) -> dict[str, Any]:
    before = until(run, lambda report: report["state"] == "blind")["probes"]
    for _ in range(more):
        assert run.chat().status_code == 200
    return until(run, lambda report: report["probes"] >= before + more)


def test_absent_then_there_then_killed_then_back(fleet: Fleet) -> None:
    primary = fleet.primary(*fleet.with_record())
    away = until(primary, lambda report: report["state"] == "waiting")
    assert "no model is served there" in away["reason"]
    assert primary.chat().status_code == 200
    reference = fleet.reference()
    report = probed(primary)
    assert report["equality"].startswith("by its run record sha256:")
    assert report["lost"] == 0
    for pid in (reference.process.pid, *reference.engine_processes()):
        os.kill(pid, signal.SIGKILL)
    reference.process.wait(120)
    for _ in range(3):
        assert primary.chat().status_code == 200
    away = until(primary, lambda report: report["state"] == "waiting")
    assert "no model is served there" in away["reason"]
    assert away["lost"] == 1
    fleet.reference()
    assert probed(primary)["lost"] == 1
    assert primary.management("/readyz").status_code == 200


def test_one_that_came_back_as_something_else_is_refused_by_name(fleet: Fleet) -> None:
    primary = fleet.primary(*fleet.with_record())
    for flags, dtype, says in (
        ((), "fp8_e4m3", "a reference must be proven 16-bit behind kvguard; found fp8_e4m3, proven"),
        (("--seed", "7"), "bfloat16", "by their records: argv.--seed (nothing, there 7)"),
    ):
        reference = fleet.reference(*flags, dtype=dtype)
        seen = until(primary, lambda report: says in report["reason"])  # noqa: B023 -- called in this turn
        assert (seen["state"], seen["probes"]) == ("refused", 0)
        assert reference.stop() == 0
    reference = fleet.reference()
    before = probed(primary)
    assert reference.stop() == 0
    fleet.reference("--seed", "7")  # within the time in which nobody asks: the next pass finds another record
    assert primary.chat().status_code == 200
    seen = until(primary, lambda report: report["state"] == "refused")
    assert "argv.--seed (nothing, there 7)" in seen["reason"]
    assert seen["probes"] == before["probes"]


def test_without_its_record_the_report_says_what_was_checked(fleet: Fleet) -> None:
    fleet.reference("--seed", "7")
    report = probed(fleet.primary())
    assert report["equality"] == (
        "equality not shown by record; checked: the vLLM version, a proven 16-bit cache, the model's name"
    )


def test_one_that_hangs_holds_up_no_client(fleet: Fleet) -> None:
    reference = fleet.reference()
    primary = fleet.primary()
    before = probed(primary)
    reference.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(5):
            assert primary.chat().status_code == 200
        assert primary.management("/shadow").json()["probes"] == before["probes"]
    finally:
        reference.process.send_signal(signal.SIGCONT)
    until(primary, lambda report: report["probes"] == before["probes"] + 5)
