"""Probing in the life of a guarded engine: wired while it serves, gone afterwards, and never a reason to stop serving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from kvguard.engine.client import Answer, EngineClient
from kvguard.evidence.metrics import EngineFigures
from kvguard.evidence.replies import Limits
from kvguard.guard import shadowing
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.settings import Settings
from kvguard.guard.surface import Tap
from kvguard.policy.models import ShadowPolicy
from kvguard.shadow.references import External, InEngine
from kvguard.shadow.runner import Shadow
from kvguard.vocabulary import Effective

CANARY = "quixotic-bandicoot-58213"
PAGE = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n"


class Engine:
    """The engine's client."""

    def __init__(self, page: Any = PAGE) -> None:
        self._page = page
        self.cards: list[Any] = [{"id": "one"}, {"id": "two", "parent": None}, {"id": "lora", "parent": "one"}]

    async def models(self) -> Answer:
        return Answer(200, {"data": self.cards})

    async def metrics_text(self) -> Answer:
        return Answer(200, self._page)


class Surface:
    alive, in_flight = True, 0

    def __init__(self) -> None:
        self.taps: list[Tap | None] = []

    def stop_accepting(self) -> None: ...

    def wait_idle(self, timeout_s: float) -> bool:
        return True

    def set_tap(self, tap: Tap | None) -> None:
        self.taps.append(tap)


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Callable[[Shadow], Any], shadow: str = "in-engine") -> None:
        async def replaced(prober: Shadow) -> None:
            await run(prober)

        monkeypatch.setattr(Shadow, "run", replaced)
        self.engine, self.surface, self.board = Engine(), Surface(), Board(Gate())
        self.board.update(effective=Effective(dtype="fp8_e4m3"), engine_version="0.32.0")
        self.accepted = ShadowPolicy(baseline=0.04)
        self.settings = Settings(record_directory=Path("/nowhere"), shadow=shadow)

    async def probe(self) -> None:
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=2048)
        client = cast(EngineClient, self.engine)
        await shadowing.probe_traffic(
            client,
            "s3cret",
            self.settings,
            self.board,
            self.surface,
            limits=limits,
            model="/models/m",
            accepted=self.accepted,
        )


async def nothing(_: Shadow) -> None: ...


def test_off_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, nothing, "off")
    asyncio.run(world.probe())
    assert (world.surface.taps, world.board.shadow) == ([], None)


def test_the_tap_is_there_while_probing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(shadow: Shadow) -> None:
        assert world.board.shadow is shadow
        assert world.surface.taps == [shadow.tap]
        assert isinstance(shadow._reference, InEngine)
        assert (shadow._served_model, shadow._dtype) == ("one", "fp8_e4m3")
        assert shadow._rules.base_models == {"one", "two"}
        assert (shadow._accepted, shadow._tolerance) == (0.04, None)
        assert not shadow._rules.require_opt_in
        assert shadow._sampler._batch_tokens == 2048
        seen.append(await shadow._figures())

    seen: list[EngineFigures] = []
    world = World(monkeypatch, look)
    with capture_logs() as logs:
        asyncio.run(world.probe())
    said = {"event": "shadow probes on", "log_level": "info", "reference": "in-engine", "rate": 0.05, "engine_share": 0.003}
    assert logs == [said]
    assert (seen[0].running, seen[0].waiting) == (2, 1)
    assert world.surface.taps[-1] is None


@pytest.mark.parametrize("page", [b"<html>{{{", None, b""])
def test_load_that_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch, page: Any) -> None:
    async def look(shadow: Shadow) -> None:
        load = await shadow._figures()
        assert (load.running, load.waiting) == (None, None)
        seen.append(True)

    seen: list[bool] = []
    world = World(monkeypatch, look)
    world.engine = Engine(page)
    asyncio.run(world.probe())
    assert seen == [True]


def test_an_engine_without_a_list_of_models_is_asked_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(shadow: Shadow) -> None:
        assert shadow._served_model == "/models/m"
        seen.append(True)

    seen: list[bool] = []
    world = World(monkeypatch, look)
    world.engine.cards = []
    asyncio.run(world.probe())
    assert seen == [True]


def test_another_engine_as_the_reference_stalls_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(shadow: Shadow) -> None:
        assert isinstance(shadow._reference, External)
        assert shadow._sampler._batch_tokens is None
        clients.append(shadow._reference._client)

    clients: list[EngineClient] = []
    asyncio.run(World(monkeypatch, look, "http://other:8000").probe())
    assert (clients[0].target, clients[0]._http.is_closed) == ("http://other:8000", True)


def test_an_error_in_probing_does_not_end_serving_or_show_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Shadow) -> None:
        raise ValueError(CANARY)

    world = World(monkeypatch, fail)
    with capture_logs() as logs:
        asyncio.run(world.probe())
    assert world.surface.taps[-1] is None
    entry = logs[-1]
    assert (entry["log_level"], entry["error"]) == ("error", "ValueError")
    assert "in fail" in entry["traceback"]
    assert CANARY not in str(logs)


def test_a_reference_that_has_no_address_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, nothing, "http://[::1")
    with capture_logs() as logs:
        asyncio.run(world.probe())
    assert [entry["error"] for entry in logs] == ["UsageError"]


def test_stopping_takes_the_tap_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        started = asyncio.Event()

        async def wait(_: Shadow) -> None:
            started.set()
            await asyncio.Event().wait()

        world = World(monkeypatch, wait)
        task = asyncio.create_task(world.probe())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.surface.taps[-1] is None

    asyncio.run(scenario())


def test_a_policy_can_demand_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(shadow: Shadow) -> None:
        seen.append(shadow._rules.require_opt_in)

    seen: list[bool] = []
    world = World(monkeypatch, look)
    world.accepted = ShadowPolicy(require_opt_in=True)
    asyncio.run(world.probe())
    assert seen == [True]
