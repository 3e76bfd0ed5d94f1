"""An engine that answers replays and a reference that scores them, both from a table, for shadow probes without vLLM."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvguard.engine.client import Answer, EngineClient
from kvguard.evidence.metrics import EngineFigures
from kvguard.reference.models import Choice, Decode, Pass, Standing
from kvguard.reference.ranges import Ranges
from kvguard.shadow.fidelity import candidates
from kvguard.shadow.references import Scored
from kvguard.shadow.report import ShadowReport
from kvguard.shadow.runner import Shadow, cancel
from kvguard.shadow.settings import Settings

CANARY = "quixotic-bandicoot-58213"
IDLE = EngineFigures(running=0.0, waiting=0.0, kv_pinned_ratio=0.1)
TRUNCATES = {
    "16bit": 0.11,
    "fp8_e4m3 truncate": 0.03,
    "fp8_e4m3 nearest": 0.12,
    "control": 0.4,
}
"""Mean |Δ logprob| against each pass, as on a CPU engine with an fp8_e4m3 cache; other passes leave 0.13."""

TOKENS = 20


def answer(
    prompt: int = 3, ids: Sequence[int] = tuple(range(100, 100 + TOKENS)), logprob: float | str = -1.0
) -> dict[str, Any]:
    """vLLM's answer to a chat's replay."""
    content = [
        {
            "token": f"token_id:{token}",
            "logprob": logprob,
            "top_logprobs": [{"token": f"token_id:{token}", "logprob": logprob}, {"token": "token_id:9", "logprob": -2.0}],
        }
        for token in ids
    ]
    choice = {"token_ids": list(ids), "logprobs": {"content": content}, "finish_reason": "length"}
    return {"prompt_token_ids": list(range(1, 1 + prompt)), "choices": [choice]}


@dataclass
class FakeEngine:
    """Answers every replay with `says` and keeps its body."""

    says: Callable[[int], Any] = lambda _: answer()
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def post(self, path: str, body: dict[str, Any], deadline: float = 0) -> Answer:
        json.dumps(body)
        self.asked.append({"path": path, **body})
        said = self.says(len(self.asked))
        return said if isinstance(said, Answer) else Answer(status=200, body=said)


@dataclass
class FakeReference:
    """Differs from the decode by `table[label]` nats a token, a little more or less by question."""

    table: dict[str, float] = field(default_factory=lambda: dict(TRUNCATES))
    choices_possible: bool = True
    comes_and_goes: bool = False
    standing: Standing = field(default_factory=Standing)
    why_not: str = ""
    problem: str = ""
    seconds: float = 0.001
    ranges: Ranges | None = None
    name: str = "fake"
    asked: list[str] = field(default_factory=list)
    at_once: int = 0
    decodes: dict[int, tuple[int, Decode]] = field(default_factory=dict)

    async def unavailable(self) -> str:
        return self.why_not

    async def run(self, decode: Decode, choices: Sequence[Choice]) -> Scored:
        self.at_once = max(self.at_once, len(choices))
        self.asked += [choice.label for choice in choices]
        if self.problem:
            return Scored(problem=self.problem, seconds=self.seconds)
        number, _ = self.decodes.setdefault(id(decode), (len(self.decodes), decode))
        passes = []
        for choice in choices:
            delta = self.table.get(choice.label, 0.13) * (1.0 + 0.1 * math.sin(number))
            logprobs = tuple(value - delta for value in decode.logprobs)
            at = tuple(tuple(min(value, 0.0) for _, value in top) for top in decode.top)
            passes.append(Pass(logprobs, decode.ids, at, choice.label))
        return Scored(passes=tuple(passes), seconds=self.seconds, ranges=self.ranges)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Probing:
    """A Shadow with everything around it in the test's hands, running on the test's loop."""

    def __init__(
        self,
        reference: FakeReference | None = None,
        engine: FakeEngine | None = None,
        dtype: str = "fp8_e4m3",
        accepted: tuple[float | None, float | None] = (None, None),
        **settings: Any,
    ) -> None:
        self.reference = reference or FakeReference()
        self.engine = engine or FakeEngine()
        self.clock = Clock()
        self.load = IDLE
        self.looks = 0  # at the engine's load
        self.turns = 0  # in which kvguard's own count was asked for
        self.on_look: Callable[[int], None] = lambda _: None
        free = {"rate": 1, "engine_share": 1, "probes_per_minute": 6000, "max_stall_ms": 60_000, "queue_items": 10_000}
        self.shadow = Shadow(
            cast(EngineClient, self.engine),
            self.reference,
            Settings(**{**free, **settings}),
            served_model="base",
            base_models=("alias",),
            dtype=dtype,
            batch_tokens=2048,
            batch_sequences=8,
            figures=self._figures,
            in_flight=self._in_flight,
            generated=lambda: self.load.generated_total,
            baseline=accepted[0],
            tolerance=accepted[1],
            clock=self.clock,
            seed=1,
        )

    def _in_flight(self) -> int:
        self.turns += 1
        return int(self.load.running or 0)

    async def _figures(self) -> EngineFigures:
        self.looks += 1
        self.on_look(self.looks)
        await asyncio.sleep(0)
        return self.load

    @property
    def report(self) -> ShadowReport:
        return self.shadow.report

    async def __aenter__(self) -> Probing:
        """Started, its self-check over."""
        self.task = asyncio.create_task(self.shadow.run())
        await self.until(lambda: self.task.done() or self.shadow._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.task.done():
            self.task.result()
        else:
            await cancel(self.task)

    async def until(self, reached: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if reached():
                return
            await asyncio.sleep(0)
        raise AssertionError(f"never reached; {self.report}")

    def client_asks(self, prompt: str = CANARY, headers: Sequence[tuple[bytes, bytes]] = (), **fields: Any) -> None:
        """A client's chat was answered."""
        body = {"model": "base", "messages": [{"role": "user", "content": prompt}], **fields}
        self.shadow.offer("/v1/chat/completions", headers, json.dumps(body).encode())

    def drops(self) -> dict[str, int]:
        return {str(cause): count.requests for row in self.report.rows for cause, count in row.dropped.items()}


def checked_labels(dtype: str = "fp8_e4m3") -> list[str]:
    """Labels of the self-check's passes over one prompt, in order."""
    return [*(choice.label for choice in candidates(dtype)), "control"]
