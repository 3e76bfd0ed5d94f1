"""Whether a silent engine still makes tokens: after minutes without one, a small request of ours asks it.

An idle engine and one that hangs look alike from outside: both answer /health, and neither counts a token. The answer, or
none, goes to the board, and from there to `kvguard_canary_unanswered`. It never ends serving.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import structlog

from kvguard.engine.client import EngineClient, model_cards
from kvguard.evidence import metrics as metrics_evidence
from kvguard.guard.board import Board
from kvguard.guard.gate import Canaries
from kvguard.guard.verify import asleep
from kvguard.vocabulary import UsageError

log = structlog.get_logger("kvguard")

QUIET = 300.0
"""Seconds without a token after which the engine is asked for one; longer than most prefills."""

DEADLINE = 60.0
"""Seconds in which it must answer."""

_LOOK_EVERY = 15.0

Tokens = Callable[[], Awaitable[float | None]]
"""The engine's count of generated tokens, None when it does not say."""

Ask = Callable[[], Awaitable[str | None]]
"""Asks for a token: "" when it came, why it did not, None when this engine is not to be asked (it sleeps, say)."""


async def watch_silence(
    board: Board,
    tokens: Tokens,
    ask: Ask,
    *,
    quiet: float = QUIET,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Until cancelled: ask after every `quiet` seconds in which the count of tokens did not move."""
    last: float | None = None
    since = clock()
    while True:
        await pause(min(_LOOK_EVERY, quiet))
        try:
            now = await tokens()
            if now is not None and last is not None and now != last:
                since = clock()
                _heard(board)
            elif clock() - since >= quiet:
                _note(board, await ask())
                now, since = await tokens(), clock()
            last = now
        except Exception as error:  # a bug here must not end serving
            log.warning("the engine could not be asked for a token", error=repr(error))


def _heard(board: Board) -> None:
    before = board.status.canaries
    if before.unanswered:
        log.info("the engine makes tokens again")
        board.update(canaries=before.model_copy(update={"unanswered": False}))


def _note(board: Board, problem: str | None) -> None:
    before = board.status.canaries
    if problem is None:
        return
    if problem:
        log.error("no token came out of a silent engine", because=problem)
        board.update(canaries=Canaries(answered=before.answered, failed=before.failed + 1, unanswered=True))
    else:
        board.update(canaries=Canaries(answered=before.answered + 1, failed=before.failed, unanswered=False))


def questions(client: EngineClient) -> tuple[Tokens, Ask]:
    """How an engine is asked: its own metrics page, and the least completion there is."""

    async def tokens() -> float | None:
        page = await client.metrics_text()
        try:
            return metrics_evidence.marks(metrics_evidence.parse_metrics(page.body or b"")).generated_total if page.ok else None
        except UsageError:
            return None

    async def ask() -> str | None:
        if await asleep(client):
            return None
        card = next(iter(model_cards(await client.models())), {})
        # The salt keeps it out of users' prefix cache, and from being answered out of it.
        body = {"model": card.get("id"), "prompt": "1", "max_tokens": 1, "temperature": 0, "cache_salt": secrets.token_hex(8)}
        answer = await client.post("/v1/completions", body, DEADLINE)
        if answer.status is not None and 400 <= answer.status < 500:
            return None  # a pooling model writes no tokens
        return "" if answer.ok else answer.problem

    return tokens, ask
