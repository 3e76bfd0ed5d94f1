"""Questions to the workers wait for each other: a verification beside a probe fails neither."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from test_engine_client import run

from kvguard.engine.client import Answer, EngineClient


def test_questions_at_once_are_answered_one_after_the_other(tmp_path: Path) -> None:
    together: list[int] = []
    waiting = 0

    async def handler(_: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        nonlocal waiting
        waiting += 1
        together.append(waiting)
        await asyncio.sleep(0)
        waiting -= 1
        return 200, headers["x-kvguard-nonce"].encode()

    async def use(client: EngineClient) -> list[Answer]:
        asks = (client.ask("reference", "s", f"n{number}", {}, deadline=5) for number in range(4))
        return await asyncio.gather(*asks)

    answers: Any = run(tmp_path, handler, use)
    assert [answer.body for answer in answers] == [b"n0", b"n1", b"n2", b"n3"]
    assert together == [1, 1, 1, 1]


def test_a_channel_closed_meanwhile_stays_closed(tmp_path: Path) -> None:
    async def handler(*_: Any) -> tuple[int, bytes]:
        return 200, b"{}"

    async def use(client: EngineClient) -> tuple[Answer, Answer]:
        first = asyncio.ensure_future(client.ask("reference", "s", "n", {}, deadline=5))
        second = asyncio.ensure_future(client.ask("reference", "s", "n", {}, deadline=5))
        await asyncio.sleep(0)
        client.close_channel("out of step")
        return await first, await second

    first, second = run(tmp_path, handler, use)
    assert first.ok
    assert second.error.startswith("out of step")
