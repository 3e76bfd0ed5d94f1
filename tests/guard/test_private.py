"""An engine that serves nobody, in miniature: what a signal does, early and late."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvguard.engine.run_directory import RunDirectory
from kvguard.guard import private
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.settings import Settings


class Stub:
    """A guard whose life is the test's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.asked = False

    def request_stop(self) -> None:
        self.asked = True


class Plan:
    files: dict[str, bytes] = {}  # noqa: RUF012 (nothing is written to it)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Each signal interrupts, as in the commands that use this; put back afterwards."""
    before = {number: signal.getsignal(number) for number in private._SIGNALS}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, guard: type) -> int:
    monkeypatch.setattr(private, "Guard", guard)
    monkeypatch.setattr(private, "plan_for", lambda *_, **__: Plan())
    anything: Any = None
    settings = Settings(record_directory=tmp_path)
    base = Path(f"/tmp/kvgt-{secrets.token_hex(4)}")  # sockets need a short one
    try:
        env = {"KVGUARD_RUN_DIR": str(base)}
        return private.run_privately(anything, None, (), env, settings, Board(Gate()), anything, (1, 2))
    finally:
        assert not base.exists()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", private._SIGNALS)
def test_a_signal_asks_the_guard_to_stop_and_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    class Stopped(Stub):
        async def run(self) -> int:
            os.kill(os.getpid(), number)
            while not self.asked:
                await private.asyncio.sleep(0)
            ended.append(self)
            return 0

    ended: list[Stopped] = []
    with pytest.raises(KeyboardInterrupt):  # what would come next is stopped as well
        run(monkeypatch, tmp_path, Stopped)
    assert len(ended) == 1
    assert signal.getsignal(number) is signal.default_int_handler


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", private._SIGNALS)
def test_a_signal_while_the_rest_is_cleared_away_is_not_lost_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    """It would have ended the process with the run directory half removed, and without an exit code of ours."""

    class Ended(Stub):
        async def run(self) -> int:
            return 0

    class Slow(RunDirectory):
        def __exit__(self, *details: Any) -> None:
            os.kill(os.getpid(), number)
            super().__exit__(*details)

    monkeypatch.setattr(private, "RunDirectory", Slow)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path, Ended)
    assert signal.getsignal(number) is signal.default_int_handler
