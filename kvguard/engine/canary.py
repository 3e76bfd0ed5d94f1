"""Canary requests: an engine is ready when tokens came out, not when /health answers.

vLLM 0.26.0 with NaN scales answers /health with 200 and dies at its first request, so each start sends a few
small requests whose answers are checked: no error, no single repeated token, finite log probabilities.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

from kvguard.engine.client import EngineClient
from kvguard.vocabulary import Check, CheckResult, Frozen, Json

_TEXT = (
    "A lighthouse keeper counts the ships that pass before dawn. On Monday there were seven, on Tuesday twelve, and "
    "on Wednesday the fog hid all but three. "
)
_QUESTION = "Name three colours of the rainbow and say which one is warmest."
# No system turn: some chat templates (Gemma's) refuse one.
_TURNS = (
    {"role": "user", "content": "Which is larger, the Moon or the Earth?"},
    {"role": "assistant", "content": "The Earth is larger than the Moon."},
    {"role": "user", "content": "And which of the two has an atmosphere we can breathe?"},
)
CANARIES = "canaries"
"""The name of the canaries' check."""

_TOKENS = 12
_CHARACTERS_PER_TOKEN = 3  # fewer than any usual tokenizer needs, so that a long prompt surely exceeds the window


class Canary(Frozen):
    """One canary's outcome. `problem` is "" when it passed; `skipped` says why it could not be sent."""

    name: str
    problem: str = ""
    skipped: str = ""


async def send_canaries(
    client: EngineClient,
    model: str,
    *,
    chat: bool,
    window: int | None,
    max_model_len: int | None,
) -> tuple[Canary, ...]:
    """Send a completion, a multi-turn chat and, with a sliding window, a prompt longer than it."""
    outcomes = [await _completion(client, model, "completion", _TEXT + _QUESTION)]
    if chat:
        outcomes.append(await _chat(client, model))
    if window:
        if max_model_len is not None and max_model_len <= window + 2 * _TOKENS:
            outcomes.append(Canary(name="beyond_window", skipped=f"no prompt is longer than the window of {window}"))
        else:
            repeats = window * 2 * _CHARACTERS_PER_TOKEN // len(_TEXT) + 1
            outcomes.append(await _completion(client, model, "beyond_window", _TEXT * repeats + _QUESTION))
    return tuple(outcomes)


def _common(model: str) -> dict[str, Any]:
    # The salt keeps canary blocks out of users' prefix cache.
    return {"model": model, "max_tokens": _TOKENS, "temperature": 0, "cache_salt": secrets.token_hex(8)}


async def _completion(client: EngineClient, model: str, name: str, prompt: str) -> Canary:
    body = {**_common(model), "prompt": prompt, "logprobs": 1, "return_tokens_as_token_ids": True}
    answer = await client.post("/v1/completions", body)
    if not answer.ok:
        return Canary(name=name, problem=answer.problem)
    logprobs = _logprobs(answer.body)
    return Canary(name=name, problem=examine(_items(logprobs, "tokens"), _items(logprobs, "token_logprobs")))


async def _chat(client: EngineClient, model: str) -> Canary:
    body = {**_common(model), "messages": list(_TURNS), "logprobs": True, "return_tokens_as_token_ids": True}
    answer = await client.post("/v1/chat/completions", body)
    if not answer.ok:
        return Canary(name="chat", problem=answer.problem)
    content = [item for item in _items(_logprobs(answer.body), "content") if isinstance(item, dict)]
    return Canary(
        name="chat", problem=examine([item.get("token") for item in content], [item.get("logprob") for item in content])
    )


def _logprobs(body: Json) -> dict[str, Any]:
    """The first choice's log probabilities; empty for an answer of another shape."""
    choices = _items(body, "choices")
    logprobs = choices[0].get("logprobs") if choices and isinstance(choices[0], dict) else None
    return logprobs if isinstance(logprobs, dict) else {}


def _items(value: Json, key: str) -> list[Any]:
    items = value.get(key) if isinstance(value, dict) else None
    return items if isinstance(items, list) else []


def examine(tokens: Sequence[Any], logprobs: Sequence[Any]) -> str:
    """What is wrong with an answer, "" if nothing: no token, one repeated token, invalid log probabilities."""
    if not tokens:
        return "no token came out"
    if len(logprobs) != len(tokens):
        return f"{len(tokens)} tokens came with {len(logprobs)} log probabilities"
    bad = [value for value in logprobs if not isinstance(value, int | float) or not -math.inf < value <= 0]
    if bad:
        return f"invalid log probability {bad[0]!r}"
    if len(tokens) >= _TOKENS and all(token == tokens[0] for token in tokens):
        return f"one token repeated {len(tokens)} times ({tokens[0]})"
    return ""


def canary_check(canaries: Sequence[Canary], *, dummy_weights: bool) -> Check:
    """The canaries as one check. With dummy or random weights a repeated token is a warning, not a failure."""
    failed = [canary for canary in canaries if canary.problem]
    only_repeats = bool(failed) and all("repeated" in canary.problem for canary in failed)
    if not failed:
        result = CheckResult.PASS
    else:
        result = CheckResult.WARN if only_repeats and dummy_weights else CheckResult.FAIL
    found = "; ".join(f"{canary.name}: {canary.problem}" for canary in failed)
    passed = ", ".join(f"{canary.name} ({canary.skipped or 'ok'})" for canary in canaries)
    return Check(
        name=CANARIES,
        result=result,
        required="tokens that vary, with finite log probabilities",
        found=found or passed,
        where="answers of the started engine",
        action="" if result is CheckResult.PASS else "the engine computes garbage: check scales, dtype and the engine log",
    )
