"""Whether an engine is there, and still the same run of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvguard.engine.client import EngineClient
from kvguard.evidence.metrics import Marks, marks, parse_metrics
from kvguard.guard.presence import Presence, Seen
from plain_engine import PlainEngine


@pytest.mark.parametrize(
    ("before", "later", "why"),
    [
        (Marks(process_start=1.5, generated_total=7), Marks(process_start=1.5, generated_total=9), ""),
        (Marks(process_start=1.5), Marks(process_start=1.6), "its process began at another time"),
        (Marks(generated_total=7), Marks(generated_total=6), "its counters began again"),
        (Marks(generated_total=0), Marks(generated_total=0), ""),
        (Marks(process_start=1.5, generated_total=7), Marks(), ""),
        (Marks(), Marks(process_start=1.5, generated_total=0), ""),
    ],
)
def test_runs_are_told_apart(before: Marks, later: Marks, why: str) -> None:
    assert before.other_run(later) == why


def test_marks_of_a_page() -> None:
    counters = "".join(f'vllm:generation_tokens_total{{engine="{number}"}} {number + 3}\n' for number in range(2))
    page = f"process_start_time_seconds 1.5\n{counters}"
    assert marks(parse_metrics(page)) == Marks(process_start=1.5, generated_total=7)
    assert marks(parse_metrics("")) == Marks()
    assert parse_metrics("process_start_time_seconds 1.5\n").engines is None
    assert parse_metrics('process_start_time_seconds 1.5\nvllm:num_requests_running{engine="3"} 0\n').engines == 1


def looks(engine: PlainEngine, count: int) -> list[Seen]:
    async def several() -> list[Seen]:
        async with EngineClient(engine.url) as client:
            presence = Presence(client)
            return [await presence.look() for _ in range(count)]

    return asyncio.run(several())


def test_there(tmp_path: Path) -> None:
    engine = PlainEngine(str(tmp_path))
    try:
        assert looks(engine, 3) == [Seen(answers=True)] * 3
        engine.says = {"/metrics": (404, b"")}
        assert looks(engine, 3) == [Seen(answers=True)] * 3
        engine.says = {"/health": (500, b"")}
        assert looks(engine, 5) == [Seen(problem="HTTP 500: no message", status=500)] * 5
        engine.says = {"/health": (503, b"")}
        assert [seen.lost for seen in looks(engine, 3)] == ["", "", "it answered /health with an error three times"]
    finally:
        engine.end()


def test_gone(tmp_path: Path) -> None:
    engine = PlainEngine(str(tmp_path))
    engine.end()
    assert [seen.lost for seen in looks(engine, 3)] == ["", *[f"nobody listens at {engine.url}"] * 2]
