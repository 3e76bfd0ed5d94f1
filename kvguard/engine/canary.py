"""Canary requests: an engine is ready when tokens came out, not when /health answers.

vLLM 0.26.0 with NaN scales answers /health with 200 and dies at its first request, so each start sends a few
small requests whose answers are checked: no error, no single repeated token, finite log probabilities.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

from kvguard.engine.client import Answer, EngineClient
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
    """One canary's outcome. `problem` is "" when it passed; `skipped` says why it could not be sent.

    `rejected`: the engine answered 4xx, so that the request was at fault and not what it computes.
    """

    name: str
    problem: str = ""
    skipped: str = ""
    rejected: bool = False


async def send_canaries(
    client: EngineClient,
    model: str,
    *,
    chat: bool,
    window: int | None,
    max_model_len: int | None,
    logits: bool = False,
) -> tuple[Canary, ...]:
    """Send a completion, a multi-turn chat and, with a sliding window, a prompt longer than it.

    What the engine's flags forbid is left out: no log probabilities (`--max-logprobs 0`), or a context too short for
    the prompts, still leaves a short completion whose tokens are looked at. A pooling model gets an embedding.
    """
    outcomes = [await _completion(client, model, "completion", _TEXT + _QUESTION, logits)]
    if outcomes[0].rejected:
        outcomes = [await _least(client, model)]
        if outcomes[0].rejected:
            embedded = await _embedding(client, model)
            return (outcomes[0] if embedded.rejected else embedded,)
        return tuple(outcomes)
    if chat:
        talked = await _chat(client, model, logits)
        outcomes.append(Canary(name="chat", skipped=talked.problem) if talked.rejected else talked)
    if window:
        if max_model_len is not None and max_model_len <= window + 2 * _TOKENS:
            outcomes.append(Canary(name="beyond_window", skipped=f"no prompt is longer than the window of {window}"))
        else:
            repeats = window * 2 * _CHARACTERS_PER_TOKEN // len(_TEXT) + 1
            outcomes.append(await _completion(client, model, "beyond_window", _TEXT * repeats + _QUESTION, logits))
    return tuple(outcomes)


def _common(model: str) -> dict[str, Any]:
    # The salt keeps canary blocks out of users' prefix cache.
    return {"model": model, "max_tokens": _TOKENS, "temperature": 0, "cache_salt": secrets.token_hex(8)}


def _refusal(name: str, answer: Answer) -> Canary:
    rejected = answer.status is not None and 400 <= answer.status < 500
    return Canary(name=name, problem=f"{'not accepted: ' if rejected else ''}{answer.problem}", rejected=rejected)


async def _least(client: EngineClient, model: str) -> Canary:
    """The least request that makes a token: a few words, no log probabilities."""
    body = {**_common(model), "prompt": "One, two, three,", "max_tokens": 4, "return_token_ids": True}
    answer = await client.post("/v1/completions", body)
    if not answer.ok:
        return _refusal("short completion", answer)
    choices = _items(answer.body, "choices")
    tokens = _items(choices[0] if choices else None, "token_ids")
    return Canary(name="short completion", problem="" if tokens else "no token came out")


async def _embedding(client: EngineClient, model: str) -> Canary:
    answer = await client.post("/v1/embeddings", {"model": model, "input": _QUESTION})
    if not answer.ok:
        return _refusal("embedding", answer)
    data = _items(answer.body, "data")
    values = _items(data[0] if data else None, "embedding")
    bad = [value for value in values if not isinstance(value, int | float) or not math.isfinite(value)]
    problem = "an empty embedding" if not values else f"invalid value {bad[0]!r} in the embedding" if bad else ""
    return Canary(name="embedding", problem=problem)


async def _completion(client: EngineClient, model: str, name: str, prompt: str, logits: bool) -> Canary:
    body = {**_common(model), "prompt": prompt, "logprobs": 1, "return_tokens_as_token_ids": True}
    answer = await client.post("/v1/completions", body)
    if not answer.ok:
        return _refusal(name, answer)
    logprobs = _logprobs(answer.body)
    return Canary(name=name, problem=examine(_items(logprobs, "tokens"), _items(logprobs, "token_logprobs"), logits=logits))


async def _chat(client: EngineClient, model: str, logits: bool) -> Canary:
    body = {**_common(model), "messages": list(_TURNS), "logprobs": True, "return_tokens_as_token_ids": True}
    answer = await client.post("/v1/chat/completions", body)
    if not answer.ok:
        return _refusal("chat", answer)
    content = [item for item in _items(_logprobs(answer.body), "content") if isinstance(item, dict)]
    return Canary(
        name="chat",
        problem=examine([item.get("token") for item in content], [item.get("logprob") for item in content], logits=logits),
    )


def _logprobs(body: Json) -> dict[str, Any]:
    """The first choice's log probabilities; empty for an answer of another shape."""
    choices = _items(body, "choices")
    logprobs = choices[0].get("logprobs") if choices and isinstance(choices[0], dict) else None
    return logprobs if isinstance(logprobs, dict) else {}


def _items(value: Json, key: str) -> list[Any]:
    items = value.get(key) if isinstance(value, dict) else None
    return items if isinstance(items, list) else []


def examine(tokens: Sequence[Any], logprobs: Sequence[Any], *, logits: bool = False) -> str:
    """What is wrong with an answer, "" if nothing: no token, one repeated token, invalid log probabilities.

    `logits`: --logprobs-mode makes them logits, which may be positive.
    """
    if not tokens:
        return "no token came out"
    if len(logprobs) != len(tokens):
        return f"{len(tokens)} tokens came with {len(logprobs)} log probabilities"
    most = math.inf if logits else 0.0
    bad = [value for value in logprobs if not isinstance(value, int | float) or not -math.inf < value <= most]
    bad += [value for value in logprobs if value == math.inf]
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
        action="" if result is CheckResult.PASS else _action(failed),
    )


def _action(failed: Sequence[Canary]) -> str:
    if all(canary.rejected for canary in failed):
        return "the engine answered no request of ours: check its flags against the message"
    return "the engine computes garbage: check scales, dtype and the engine log"
