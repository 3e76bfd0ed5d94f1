"""Measuring for a calibration: each prompt through the reference pass of a running engine, all ranks together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from kvguard.engine.client import EngineClient
from kvguard.reference.inside import ask_exactness, measure_ranges
from kvguard.reference.prompts import Prompt, PromptSet
from kvguard.reference.ranges import Ranges, over_sequences
from kvguard.vocabulary import EngineFailed, Frozen, PolicyRefusal, UsageError

Progress = Callable[[int, int], None]
"""Called with how many sequences are done, and of how many."""

_DEADLINE = 600.0


class Measured(Frozen):
    """What the prompts spanned. `sequences` counts the passes: a prompt longer than one batch is several."""

    ranges: Ranges
    tokens: int
    sequences: int


async def measure(
    client: EngineClient,
    secret: str,
    model: str,
    prompts: PromptSet,
    *,
    chat_template: bool,
    max_model_len: int | None,
    progress: Progress,
) -> Measured:
    """Run every prompt through an exact pass. Nothing is written to the cache, and no 8-bit value is read.

    Raises PolicyRefusal, by layer and reason, for a model that the pass does not reproduce.
    """
    exactness = await ask_exactness(client, secret)
    if exactness.reasons:
        more = f" and {len(exactness.reasons) - 4} more" if len(exactness.reasons) > 4 else ""
        raise PolicyRefusal(f"{model} cannot be calibrated: {'; '.join(exactness.reasons[:4])}{more}")
    if exactness.problem:
        raise EngineFailed(f"the engine cannot be asked for a reference pass: {exactness.problem}")
    limits = [size for size in (exactness.max_tokens, max_model_len) if size]
    token_ids = [await tokens_of(client, model, prompt, chat_template=chat_template) for prompt in prompts.prompts]
    pieces = [piece for ids in token_ids for piece in in_pieces(ids, min(limits, default=2048))]
    if not pieces:
        raise UsageError(f"{prompts.origin}: no prompt has two tokens")
    total: Ranges = {}
    for done, piece in enumerate(pieces):
        progress(done, len(pieces))
        result = await measure_ranges(client, secret, piece)
        if result.problem:
            raise EngineFailed(f"a reference pass over {len(piece)} tokens failed: {result.problem}")
        total = over_sequences([total, result.ranges]) if total else result.ranges
    progress(len(pieces), len(pieces))
    return Measured(ranges=total, tokens=sum(map(len, pieces)), sequences=len(pieces))


async def tokens_of(client: EngineClient, model: str, prompt: Prompt, *, chat_template: bool) -> list[int]:
    """A prompt's token ids, by the engine's own tokenizer; a chat without a template is its words alone."""
    body: dict[str, Any] = {"model": model}
    if prompt.messages and chat_template:
        body["messages"] = prompt.as_json()
    else:
        body["prompt"] = prompt.plain
    answer = await client.post("/tokenize", body)
    tokens = answer.body.get("tokens") if answer.ok and isinstance(answer.body, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise EngineFailed(
            f"the engine could not tokenize a calibration prompt: {answer.problem or 'no token ids in its answer'}"
        )
    return tokens


def in_pieces(ids: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive pieces of at most `size` and at least two tokens; a single token left at the end is dropped."""
    size = max(size, 2)
    return [list(ids[begin : begin + size]) for begin in range(0, len(ids), size) if len(ids) - begin > 1]


def one_batch(token_ids: Sequence[Sequence[int]], limit: int) -> list[int]:
    """One prompt of at most `limit` tokens with an equal share of the beginning of each text."""
    used = [ids for ids in token_ids if ids][: max(limit, 1)]
    share = max(limit // len(used), 1) if used else 0
    return [token for ids in used for token in ids[:share]]


async def send_one_batch(client: EngineClient, model: str, prompts: PromptSet, *, chat_template: bool, limit: int) -> int:
    """Send the prompt set as one request that fits one forward pass; returns its number of tokens.

    Where `--calculate-kv-scales` calibrates on the first real batch, that batch is this one. Raises EngineFailed when
    the engine does not answer.
    """
    token_ids = [await tokens_of(client, model, prompt, chat_template=chat_template) for prompt in prompts.prompts]
    batch = one_batch(token_ids, limit)
    body = {"model": model, "prompt": batch, "max_tokens": 1, "temperature": 0, "cache_salt": secrets.token_hex(8)}
    answer = await client.post("/v1/completions", body, deadline=_DEADLINE)
    if not answer.ok:
        raise EngineFailed(f"the calibration prompt of {len(batch)} tokens was not answered: {answer.problem}")
    return len(batch)
