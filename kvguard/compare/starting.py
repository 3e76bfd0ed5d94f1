"""One arm's engine: started, proven and recorded as `serve` would, asked its questions, and stopped."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from kvguard.compare.arms import Arm
from kvguard.compare.counters import Counters, read_counters
from kvguard.engine.client import EngineClient, model_cards
from kvguard.evidence.metrics import parse_metrics
from kvguard.evidence.replies import Limits
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.prepare import Prepared
from kvguard.guard.private import run_privately
from kvguard.guard.settings import Settings
from kvguard.vocabulary import Effective, EngineDied, EngineFailed, ExitCode, PolicyRefusal, UsageError


@dataclass(frozen=True, slots=True)
class Proven:
    """An arm's engine while it runs: `record` is its run record, `limits` as read inside."""

    client: EngineClient
    model: str
    prepared: Prepared
    record: dict[str, Any]
    record_digest: str
    effective: Effective
    limits: Limits


Questions = Callable[[Proven], Coroutine[Any, Any, None]]


def run_arm(arm: Arm, env: Mapping[str, str], settings: Settings, outputs: tuple[int, int], questions: Questions) -> bool:
    """Start the arm's engine, and once it is proven do `questions`. False when it was stopped before they were done.

    Raises PolicyRefusal for an engine that does not run the arm's cache, EngineFailed or
    EngineDied for one that does not start, or ends.
    """
    prepared = arm.prepared(env)
    board = Board(Gate())
    finished: list[bool] = []

    async def work(client: EngineClient, secret: str, limits: Limits) -> None:  # noqa: ARG001
        card = next(iter(model_cards(await client.models())), {})
        model = str(card.get("id", prepared.command.model))
        if board.record is None or board.status.effective is None or not board.status.record_digest:
            raise UsageError(f"arm {arm.name}: no run record was written")
        await questions(
            Proven(client, model, prepared, board.record, board.status.record_digest, board.status.effective, limits)
        )
        finished.append(True)

    code = run_privately(prepared, arm.policy, arm.argv, env, settings, board, work, outputs)
    if code == ExitCode.POLICY_VIOLATION:
        raise PolicyRefusal(f"arm {arm.name}: {board.status.reason}")
    if code == ExitCode.ENGINE_DIED:
        raise EngineDied(f"arm {arm.name}: {board.status.reason}; the same command goes on from here")
    if code != ExitCode.CLEAN:
        raise EngineFailed(f"arm {arm.name}: {board.status.reason}")
    return bool(finished)


async def counters(client: EngineClient) -> Counters:
    """What the engine has counted since its start; nothing when its page cannot be read."""
    page = (await client.metrics_text()).body or b""
    try:
        return read_counters(parse_metrics(page))
    except UsageError:
        return Counters()
