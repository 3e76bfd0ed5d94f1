"""The launched reference between its lives: pauses, what a hung engine is, and ends that no cancellation cuts short."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from kvguard.engine.client import Answer, EngineClient
from kvguard.engine.run_directory import RunDirectory
from kvguard.guard import launched as module
from kvguard.guard.launched import LaunchedReference, Refused, launched, surely
from kvguard.guard.reference_start import ReferenceStart
from kvguard.reference.models import EXACT, Decode
from kvguard.vocabulary import EngineFailed

CANARY = "quixotic-bandicoot-58213"
DECODE = Decode((1,), (2,), (-1.0,), (((2, -1.0),),))


class Place:
    path = Path("/nowhere")
    secret = "s3cret"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before each restart; none is waited for."""
    seen: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        seen.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module.asyncio, "sleep", noted)
    return seen


def reference(
    monkeypatch: pytest.MonkeyPatch, *lives: Callable[[], str], clock: Callable[[], float] = lambda: 0.0
) -> LaunchedReference:
    """One whose lives go as told."""
    told = iter(lives)

    async def live(_: LaunchedReference) -> str:
        return next(told)()

    monkeypatch.setattr(LaunchedReference, "_live", live)
    return LaunchedReference(cast(ReferenceStart, None), cast(RunDirectory, Place()), {}, pause=5.0, clock=clock)


def fails() -> str:
    raise EngineFailed("engine vllm: could not be started: No such file or directory")


def ends() -> str:
    return "ended with signal SIGKILL"


def refuses() -> str:
    raise Refused("the reference engine is not proven 16-bit")


def breaks() -> str:
    raise ValueError(CANARY)


def test_pauses_double_up_to_a_bound(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    made = reference(monkeypatch, *[ends, fails] * 5, refuses)
    asyncio.run(made.keep())
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300]


def test_after_a_good_life_the_pauses_begin_anew(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    lives = [ends, ends, ends, refuses]
    clock = iter([0.0, 1.0, 10.0, 11.0, 20.0, 5000.0, 6000.0])
    asyncio.run(reference(monkeypatch, *lives, clock=lambda: next(clock)).keep())
    assert pauses == [5, 10, 5]


def test_what_is_no_reference_is_not_started_again(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    made = reference(monkeypatch, refuses)
    asyncio.run(made.keep())
    assert asyncio.run(made.unavailable()) == "the reference engine is not proven 16-bit"
    assert (made.standing.absent, pauses) == (False, [])


def test_a_bug_is_reported_and_shows_nothing(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    made = reference(monkeypatch, breaks)
    with capture_logs() as logs:
        asyncio.run(made.keep())
    assert "ended unexpectedly (ValueError)" in asyncio.run(made.unavailable())
    assert "in breaks" in logs[0]["traceback"]
    assert CANARY not in str(logs)


def test_without_an_engine_a_pass_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reference(monkeypatch)
    assert asyncio.run(made.run(DECODE, [EXACT])).problem == "the reference engine is starting"
    assert made.standing.absent


@pytest.mark.parametrize(
    ("answers", "says", "looks"),
    [
        ([200, 503, 503, 200, 503, 503, 503], "answered /health with an error 3 times", 7),
        ([200, *[None] * 11, 200, *[None] * 12], "did not answer /health 12 times", 25),
    ],
)
def test_how_an_engine_is_seen_to_be_dead(pauses: list[float], answers: list[int | None], says: str, looks: int) -> None:
    told = iter(answers)

    class Client:
        async def health(self) -> Answer:
            return Answer(next(told))

    assert asyncio.run(module._watch(cast(EngineClient, Client()))) == says
    assert len(pauses) == looks


def test_the_engine_is_ended_however_often_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def stop() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        done.append("stopped")

    async def keep(_: LaunchedReference) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await surely(stop())

    made = reference(monkeypatch)
    monkeypatch.setattr(LaunchedReference, "keep", keep)

    async def serve() -> None:
        async with launched(made):
            await asyncio.Event().wait()

    async def scenario() -> None:
        task = asyncio.create_task(serve())
        await asyncio.sleep(0.01)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert done == ["stopped"]


def test_what_ends_badly_is_raised() -> None:
    async def bad() -> Any:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        asyncio.run(surely(bad()))
