"""The in-engine reference: asks the workers for a pass over a sequence, and reads what it says."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kvguard.engine.client import EngineClient
from kvguard.reference.models import EXACT, Choice, Decode, Pass
from kvguard.reference.ranges import Ranges, over_ranks

DEADLINE = 120.0
"""Seconds to wait for a pass: it waits for the step in progress, and a pass over a full batch is a long prefill."""


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    nonce: str
    rank: int | None = None
    tp_size: int = 1
    error: str | None = None
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()
    max_tokens: int | None = None
    passes: tuple[dict[str, Any], ...] = ()
    ranges: Ranges | None = None


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether the pass reproduces this model's attention. `reasons` name layers and classes; `problem`: it could not be asked.

    `max_tokens` is the longest sequence of one pass: one scheduled batch.
    """

    reasons: tuple[str, ...] = ()
    max_tokens: int | None = None
    problem: str = ""

    @property
    def exact(self) -> bool:
        """Every rank answered, and none named a reason."""
        return not self.reasons and not self.problem


@dataclass(frozen=True, slots=True)
class PassResult:
    """The passes of one question in the order asked, and the engine seconds they took; or why there are none.

    `ranges` is what keys and values of the whole sequence span, where that was asked for and every rank said it.
    """

    passes: tuple[Pass, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    ranges: Ranges | None = None


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What keys and values span in one sequence, all ranks together; or why that is not known."""

    ranges: Ranges = field(default_factory=dict)
    problem: str = ""


async def ask_exactness(client: EngineClient, secret: str) -> Exactness:
    """Ask every rank whether the pass is exact there."""
    replies, problem = await _ask(client, "inexact", secret, None)
    if problem:
        return Exactness(problem=problem)
    reasons = tuple(dict.fromkeys(reason for reply in replies for reason in reply.reasons))
    sizes = [reply.max_tokens for reply in replies if reply.max_tokens]
    return Exactness(reasons=reasons, max_tokens=min(sizes) if sizes else None)


async def run_passes(
    client: EngineClient, secret: str, decode: Decode, choices: Sequence[Choice], *, ranges: bool = False
) -> PassResult:
    """Run one pass for each choice over the prompt and what was generated, and score the generated tokens."""
    question = {
        "ids": [*decode.prompt_ids, *decode.ids],
        "start": len(decode.prompt_ids),
        "at": [[token for token, _ in position] for position in decode.top],
        "passes": [choice.as_question() for choice in choices],
        "ranges": ranges,
    }
    replies, problem = await _ask(client, "reference", secret, question)
    if problem:
        return PassResult(problem=problem)
    with_logits = [reply for reply in replies if any(reply.passes)]
    if not with_logits:
        return PassResult(problem="no rank returned logits")
    seconds = max(reply.seconds for reply in replies)
    try:
        passes = tuple(_read_pass(data, decode) for data in with_logits[0].passes)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return PassResult(seconds=seconds, problem=f"a pass was not understood: {type(error).__name__}")
    if len(passes) != len(choices):
        return PassResult(seconds=seconds, problem=f"{len(choices)} passes were asked for, {len(passes)} came")
    return PassResult(passes=passes, seconds=seconds, ranges=_spanned(replies).ranges or None if ranges else None)


async def measure_ranges(client: EngineClient, secret: str, ids: Sequence[int]) -> RangeResult:
    """Run one exact pass over a sequence of at least two tokens, and say what each layer's keys and values span."""
    question = {"ids": list(ids), "start": len(ids) - 1, "at": [[]], "passes": [EXACT.as_question()], "ranges": True}
    replies, problem = await _ask(client, "reference", secret, question)
    if problem:
        return RangeResult(problem=problem)
    return _spanned(replies)


def _spanned(replies: Sequence[_Reply]) -> RangeResult:
    found = [reply.ranges for reply in sorted(replies, key=lambda reply: reply.rank or 0) if reply.ranges]
    if len(found) != len(replies):
        return RangeResult(problem=f"{len(found)} of {len(replies)} ranks measured their keys and values")
    try:
        return RangeResult(ranges=over_ranks(found))
    except ValueError as error:
        return RangeResult(problem=str(error))


async def _ask(
    client: EngineClient, topic: str, secret: str, question: dict[str, Any] | None
) -> tuple[tuple[_Reply, ...], str]:
    """Every rank's reply, or why there is none that can be used."""
    nonce = secrets.token_hex(8)
    answer = await client.ask(topic, secret, nonce, question, deadline=DEADLINE)
    if not answer.ok:
        return (), answer.problem
    try:
        replies = tuple(_Reply.model_validate(reply) for reply in json.loads(answer.body)["replies"])
    except (ValueError, TypeError, KeyError, ValidationError) as error:
        return (), f"the workers' reply was not understood: {str(error).splitlines()[0]}"
    if any(reply.nonce != nonce for reply in replies):
        return (), client.close_channel(f"{topic}: an answer to another question came")
    failed = [f"rank {reply.rank}: {reply.error}" for reply in replies if reply.error]
    if failed:
        return (), "; ".join(failed[:4])
    if not replies or len(replies) != replies[0].tp_size:
        return (), f"{len(replies)} ranks answered, {replies[0].tp_size if replies else 'at least 1'} were expected"
    return replies, ""


def _read_pass(data: dict[str, Any], decode: Decode) -> Pass:
    result = Pass(
        logprobs=tuple(float(value) for value in data["logprobs"]),
        top1=tuple(int(value) for value in data["top1"]),
        at=tuple(tuple(float(value) for value in position) for position in data["at"]),
        label=str(data["label"]),
    )
    lengths = {len(result.logprobs), len(result.top1), len(result.at), len(decode.ids)}
    if len(lengths) != 1:
        raise ValueError("as many positions as generated tokens are required")
    return result
