"""The external reference: a 16-bit engine of its own, teacher forced with `prompt_logprobs`.

Mind backends whose prefill does not read the cache (MLA, TurboQuant): on a 16-bit reference nothing is quantized, so
that prefill and decode agree there, and the primary's side is always its *decode*.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from kvguard.engine.client import EngineClient, model_cards
from kvguard.reference.inside import PassResult
from kvguard.reference.models import EXACT, Choice, Decode, Pass

_TOP = 20  # vLLM's default for --max-logprobs
_SIXTEEN_BIT = ("bfloat16", "float16")


async def ask_reference(client: EngineClient, primary_version: str) -> tuple[str, str]:
    """(served model, ""), or ("", why this engine is no reference).

    It must run behind kvguard, proven 16-bit by the headers of its answers, and be of the primary's version.
    """
    answer = await client.models()
    names = [str(card.get("id")) for card in model_cards(answer) if not card.get("parent")]
    if not answer.ok or not names:
        return "", f"{client.target}: no model is served there ({answer.problem or 'an empty list'})"
    dtype = answer.headers.get("x-kvguard-kv-cache-dtype", "")
    confidence = answer.headers.get("x-kvguard-confidence", "")
    if dtype not in _SIXTEEN_BIT or confidence != "proven":
        found = f"{dtype or 'no x-kvguard-kv-cache-dtype header'}, {confidence or 'no confidence'}"
        return "", f"{client.target}: a reference must be proven 16-bit behind kvguard; found {found}"
    version = await client.version() or ""
    if not version or version.partition("+")[0] != primary_version.partition("+")[0]:
        return "", f"{client.target}: runs vLLM {version or 'of unknown version'}, the primary {primary_version or 'too'}"
    return names[0], ""


async def run_teacher_forced(client: EngineClient, model: str, decode: Decode, choices: Sequence[Choice]) -> PassResult:
    """Score the decode's tokens on the reference engine. Only the exact choice can be had there."""
    if any(choice != EXACT for choice in choices):
        return PassResult(problem="an external reference has no fake-quantized passes")
    begun = time.monotonic()
    body = {
        "model": model,
        "prompt": [*decode.prompt_ids, *decode.ids],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": _TOP,
        "cache_salt": secrets.token_hex(16),
    }
    answer = await client.post("/v1/completions", body)
    if not answer.ok:  # the engine's own words could repeat the prompt
        said = answer.error if answer.status is None else f"HTTP {answer.status} without a readable answer"
        return PassResult(problem=f"the reference engine: {said}")
    try:
        positions = answer.body["choices"][0]["prompt_logprobs"][len(decode.prompt_ids) :]
        result = _read(positions, decode)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return PassResult(problem=f"the reference engine's answer was not understood: {type(error).__name__}")
    return PassResult(passes=tuple(result for _ in choices), seconds=time.monotonic() - begun)


def _read(positions: Sequence[dict[str, Any]], decode: Decode) -> Pass:
    """prompt_logprobs has, for each position, the logprobs of the token there and of the most likely ones, by id."""
    logprobs, top1, at = [], [], []
    for position, token, top in zip(positions, decode.ids, decode.top, strict=True):
        values = {int(key): float(entry["logprob"]) for key, entry in position.items()}
        logprobs.append(values[token])
        top1.append(max(values, key=lambda key: values[key]))
        at.append(tuple(values.get(wanted) for wanted, _ in top))
    return Pass(logprobs=tuple(logprobs), top1=tuple(top1), at=tuple(at), label=EXACT.label)
