"""The two ports and the two loops behind them, as `serve` and `attach` open them."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from guarded import free_port
from kvguard.cli.standing import stand
from kvguard.engine.plan import Listen
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.state import Event
from kvguard.proxy.server import DataPlane
from kvguard.proxy.upstream import Upstream

WAIT_S = 60.0
PATHS = ("/livez", "/readyz", "/metrics", "/evidence")


class Life:
    """A life that does what the test wants while both ports are open."""

    def __init__(self, plane: DataPlane, during: Callable[[DataPlane], Awaitable[None]]) -> None:
        self._plane = plane
        self._during = during

    def request_stop(self) -> None:
        """Nothing is running."""

    def request_changed(self, path: str, *, answered: bool) -> None:
        """Nothing changes."""

    async def run(self) -> int:
        await self._during(self._plane)
        return 0


class Stand:
    """`stand` in this process."""

    def __init__(self, directory: Path) -> None:
        self.board = Board(Gate())
        self.port, self.management_port = free_port(), free_port()
        self.upstream = Upstream(uds=str(directory / "engine.sock"))

    def live(self, during: Callable[[DataPlane], Awaitable[None]]) -> int:
        return stand(
            lambda plane: Life(plane, during),
            self.board,
            None,
            Listen(host="127.0.0.1", port=self.port),
            self.upstream,
            management_host=None,
            management_port=self.management_port,
        )

    async def look(self) -> dict[str, int]:
        """What the management port answers; a timeout where it does not."""
        base = f"http://127.0.0.1:{self.management_port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=WAIT_S) as client:
            return {path: (await client.get(path)).status_code for path in PATHS}


@pytest.fixture
def standing() -> Iterator[Stand]:
    with TemporaryDirectory(prefix="kg") as directory:
        yield Stand(Path(directory))
    gc.unfreeze()


def test_the_management_port_answers_while_the_request_loop_stands_still(standing: Stand) -> None:
    found: dict[str, int] = {}

    async def during(plane: DataPlane) -> None:
        stuck, let_go = threading.Event(), threading.Event()

        def stand_still() -> None:
            stuck.set()
            let_go.wait(2 * WAIT_S)

        loop = plane._server.loop
        assert loop is not None
        loop.call_soon_threadsafe(stand_still)
        try:
            assert await asyncio.to_thread(stuck.wait, WAIT_S)
            found.update(await standing.look())
        finally:
            let_go.set()

    assert standing.live(during) == 0
    assert found == {"/livez": 200, "/readyz": 503, "/metrics": 200, "/evidence": 200}


def test_it_is_alive_until_its_life_ends_and_not_ready_while_it_drains(standing: Stand) -> None:
    found: list[dict[str, int]] = []

    async def during(plane: DataPlane) -> None:
        for event in (Event.ENGINE_HEALTHY, Event.VERDICT_ALLOWS):
            standing.board.move(event, "as in a start")
        found.append(await standing.look())
        standing.board.move(Event.STOP_REQUESTED, "as in a drain")
        found.append(await standing.look())
        await asyncio.to_thread(plane.stop_accepting)
        assert await asyncio.to_thread(plane.wait_idle, WAIT_S)
        found.append(await standing.look())

    assert standing.live(during) == 0
    assert [one["/livez"] for one in found] == [200, 200, 200]
    assert [one["/readyz"] for one in found] == [200, 503, 503]


def test_the_ports_are_free_afterwards(standing: Stand) -> None:
    async def during(_: DataPlane) -> None:
        return

    for _ in range(2):
        assert standing.live(during) == 0
    assert not any(name.startswith("kvguard-") for name in (thread.name for thread in threading.enumerate()))
    assert os.listdir(Path(str(standing.upstream.uds)).parent) == []
