"""A silent engine is asked for a token, and what came of it is shown until tokens come again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from kvguard.engine.client import EngineClient
from kvguard.guard.board import Board
from kvguard.guard.gate import Canaries, Gate
from kvguard.guard.silence import questions, watch_silence

Script = dict[float, float | None]


class Time:
    """A clock that pausing moves, and that ends the test at its last second."""

    def __init__(self, end: float) -> None:
        self.now, self.end = 0.0, end

    def clock(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self.end:
            raise asyncio.CancelledError


def watched(
    counts: Callable[[float], float | None], answers: list[str | Exception | None], *, end: float, quiet: float = 300.0
) -> tuple[list[float], list[Canaries]]:
    """When the engine was asked, and the canaries after each look."""
    time, board = Time(end), Board(Gate())
    asked: list[float] = []
    seen: list[Canaries] = []

    async def tokens() -> float | None:
        seen.append(board.status.canaries)
        return counts(time.now)

    async def ask() -> str | None:
        asked.append(time.now)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch_silence(board, tokens, ask, quiet=quiet, clock=time.clock, pause=time.pause))
    return asked, [*seen, board.status.canaries]


def test_an_engine_that_makes_tokens_is_never_asked() -> None:
    asked, seen = watched(lambda now: now, [], end=3600)
    assert asked == []
    assert seen[-1] == Canaries()


def test_an_idle_engine_is_asked_every_five_minutes_and_answers() -> None:
    asked, seen = watched(lambda now: 7.0, ["", ""], end=610)
    assert asked == [300, 600]
    assert seen[-1] == Canaries(answered=2, unanswered=False)


def test_a_hanging_engine_stays_unanswered_until_tokens_come() -> None:
    asked, seen = watched(lambda now: 7.0 if now < 700 else 8.0, ["no answer within 60 s", "no answer within 60 s"], end=720)
    assert asked == [300, 600]
    assert Canaries(failed=2, unanswered=True) in seen
    assert seen[-1] == Canaries(failed=2, unanswered=False)


def test_an_engine_that_is_not_to_be_asked_counts_as_nothing() -> None:
    asked, seen = watched(lambda now: 7.0, [None], end=310)
    assert asked == [300]
    assert seen[-1] == Canaries()


def test_an_engine_without_metrics_is_asked_too() -> None:
    asked, _ = watched(lambda now: None, ["", ""], end=610)
    assert asked == [300, 600]


def test_a_bug_ends_nothing() -> None:
    asked, seen = watched(lambda now: 7.0, [RuntimeError("bug"), ""], end=320)
    assert asked == [300, 315]
    assert seen[-1] == Canaries(answered=1, unanswered=False)


PAGE = 'vllm:generation_tokens_total{engine="0"} 41.0\nvllm:generation_tokens_total{engine="1"} 1.0\n'


async def asked_over_http(completion: int, *, asleep: bool = False) -> tuple[float | None, str | None, list[dict[str, object]]]:
    """The count, the answer and the bodies, of an engine that answers completions with this status."""
    bodies: list[dict[str, object]] = []

    def reply(value: object, status: int = 200) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            if request.method == "POST":
                bodies.append(await request.json())
            return web.json_response(value, status=status) if not isinstance(value, str) else web.Response(text=value)

        return handler

    app = web.Application()
    app.router.add_get("/metrics", reply(PAGE))
    app.router.add_get("/is_sleeping", reply({"is_sleeping": asleep}))
    app.router.add_get("/v1/models", reply({"data": [{"id": "served-name"}]}))
    app.router.add_post("/v1/completions", reply({"choices": [{"text": "a"}]}, completion))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        async with EngineClient(f"http://127.0.0.1:{port}") as client:
            tokens, ask = questions(client)
            return await tokens(), await ask(), bodies
    finally:
        await runner.cleanup()


def test_the_question_is_the_least_completion_under_the_served_name() -> None:
    tokens, answer, bodies = asyncio.run(asked_over_http(200))
    assert (tokens, answer) == (42.0, "")
    (body,) = bodies
    assert (body["model"], body["max_tokens"]) == ("served-name", 1)
    assert body["cache_salt"]


@pytest.mark.parametrize(("status", "is_problem"), [(500, True), (503, True), (400, None), (404, None)])
def test_an_engine_error_is_no_answer_and_a_rejected_request_no_question(status: int, is_problem: bool | None) -> None:
    _, answer, _ = asyncio.run(asked_over_http(status))
    assert (bool(answer) or None) is is_problem


def test_a_sleeping_engine_is_left_asleep() -> None:
    _, answer, bodies = asyncio.run(asked_over_http(200, asleep=True))
    assert (answer, bodies) == (None, [])
