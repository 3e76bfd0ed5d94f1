"""The guard in this process, where its clockwork can be quickened. What users see of it is in test_faults.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from checkpoint_fakes import SMOLLM2, write
from fake_engine import install
from kvguard.engine.client import EngineClient
from kvguard.engine.run_directory import RunDirectory
from kvguard.guard import lifecycle
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.lifecycle import Guard
from kvguard.guard.prepare import plan_for, prepare
from kvguard.guard.settings import Settings
from kvguard.guard.state import State


class Surface:
    """A data plane with or without a request in flight."""

    def __init__(self) -> None:
        self.idle = True
        self.accepting = True
        self.alive = True
        self.in_flight = 0

    def stop_accepting(self) -> None:
        self.accepting = False

    def wait_idle(self, timeout_s: float) -> bool:
        time.sleep(0 if self.idle else timeout_s)
        return self.idle

    def set_tap(self, tap: Any) -> None:
        """Nothing passes here."""


class Life:
    """One guard of the fake engine."""

    def __init__(self, directory: Path, run: RunDirectory, faults: str, config: dict[str, Any], **settings: float) -> None:
        vllm = install(directory / "engine")
        model = write(directory / "model", {**SMOLLM2, **config}, {})
        env = {
            **os.environ,
            "PYTHONPATH": str(directory / "engine/site"),
            "FAKE_VLLM_FAULTS": faults,
            "FAKE_VLLM_NOTES": str(directory),
        }
        prepared = prepare((str(vllm), "serve", str(model)), None, env)
        self.board = Board(Gate())
        self.surface = Surface()
        self.run = run
        self.guard = Guard(
            prepared,
            plan_for(prepared, run, env, colour=False),
            None,
            Settings(**{"record_directory": directory, "refresh": 0.02, "settle": 0.0, **settings}),
            self.board,
            self.surface,
            run,
            argv=("vllm", "serve", "m"),
            started=time.monotonic(),
        )

    def live(self, once_serving: Callable[[], Awaitable[None]]) -> int:
        """Run the guard, and `once_serving` when it serves."""

        async def both() -> int:
            running = asyncio.create_task(self.guard.run())
            while self.board.status.state is not State.SERVING and not running.done():
                await asyncio.sleep(0.02)
            await once_serving()
            return await asyncio.wait_for(running, 120)

        return asyncio.run(both())

    async def until(self, reached: Callable[[], bool]) -> None:
        for _ in range(500):
            if reached():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("not reached")


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Life]]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "engine/site"))
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(RunDirectory({"KVGUARD_RUN_DIR": f"/tmp/kvgl-{os.getpid()}"}))
        yield lambda faults="", config=None, **settings: Life(tmp_path, run, faults, config or {}, **settings)


def test_an_engine_that_says_it_is_dead(life: Callable[..., Life]) -> None:
    one = life("dies_while_serving")

    async def end_it() -> None:
        async with EngineClient(str(one.run.socket)) as client:
            await client.post("/v1/completions", {"prompt": "die"})

    assert one.live(end_it) == 5
    assert one.board.status.reason == "the engine answered /health with an error three times while serving"
    assert one.board.status.state is State.STOPPED


def test_figures_are_refreshed_and_a_bug_in_reading_them_is_survived(
    life: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = life()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def look() -> None:
        await one.until(lambda: one.board.status.gauges.limit == 8)
        monkeypatch.setattr(lifecycle.metrics_evidence, "gauges", broken)
        await one.until(lambda: any("figures" in entry["event"] for entry in logs))
        assert one.board.status.state is State.SERVING
        one.guard.request_stop()

    with capture_logs() as logs:
        assert one.live(look) == 0
    assert any(entry.get("error") == "ZeroDivisionError('a bug')" for entry in logs)
    assert not one.surface.accepting


@pytest.mark.parametrize(("signals", "because"), [(1, "the grace period is over"), (2, "a second signal")])
def test_requests_that_do_not_end_are_cut_off_and_said_so(life: Callable[..., Life], signals: int, because: str) -> None:
    one = life(grace=1.0, settle=0.2)
    one.surface.idle = False

    async def stop() -> None:
        for _ in range(signals):
            one.guard.request_stop()

    with capture_logs() as logs:
        assert one.live(stop) == 0
    assert [entry["because"] for entry in logs if "cut off" in entry["event"]] == [because]


def test_the_record_tells_where_the_time_went(life: Callable[..., Life]) -> None:
    one = life()

    async def stop() -> None:
        one.guard.request_stop()

    assert one.live(stop) == 0
    record = one.board.record
    assert record is not None
    timings = record["predicate"]["undigested"]["timings"]
    assert set(timings) == {"before_start_s", "engine_start_s", "canaries_s", "evidence_s", "added_s"}
    assert timings["added_s"] >= timings["before_start_s"]
    assert {claim.source.value for claim in one.board.claims} >= {"command_line", "facts", "tensors", "metrics", "capacity"}


def test_how_long_a_prompt_may_be_is_what_the_engine_says(life: Callable[..., Life]) -> None:
    """The command may say `8k` or nothing, the checkpoint 8192; the engine serves 2048."""
    one = life(config={"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 2040})

    async def stop() -> None:
        one.guard.request_stop()

    assert one.live(stop) == 0
    [canaries] = [check for check in one.board.status.checks if check.name == "canaries"]
    assert canaries.found == "completion (ok), beyond_window (no prompt is longer than the window of 2040)"


def test_an_api_port_that_fails_is_noticed(life: Callable[..., Life]) -> None:
    one = life()

    async def fail() -> None:
        one.surface.alive = False

    assert one.live(fail) == 5
    assert one.board.status.reason == "the engine goes on, but kvguard's own API port failed while serving"


def test_a_termination_log_that_nobody_reads_holds_nothing_up(life: Callable[..., Life], tmp_path: Path) -> None:
    fifo = tmp_path / "termination-log"
    os.mkfifo(fifo)
    one = life("exits", termination_log=fifo)

    async def nothing() -> None:
        """It ends by itself."""

    with capture_logs() as logs:
        assert one.live(nothing) == 4
    assert [entry["path"] for entry in logs if "termination log cannot be written" in entry["event"]] == [str(fifo)]
