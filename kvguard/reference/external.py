"""The external reference: a 16-bit engine of its own, teacher forced with `prompt_logprobs`.

Mind backends whose prefill does not read the cache (MLA, TurboQuant): on a 16-bit reference nothing is quantized, so
that prefill and decode agree there, and the primary's side is always its *decode*.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvguard.engine.client import Answer, EngineClient, model_cards
from kvguard.record.equality import beyond_the_cache, describe_differences
from kvguard.reference.inside import PassResult
from kvguard.reference.models import EXACT, Choice, Decode, Pass, Standing

TOP = 20
"""Most likely tokens asked for at each position: vLLM's default for --max-logprobs."""

RECORD_HEADER = "x-kvguard-record"

NOT_BY_RECORD = "equality not shown by record; checked: the vLLM version, a proven 16-bit cache, the model's name"

_SIXTEEN_BIT = ("bfloat16", "float16")

_NOTHING = Standing()

RecordReader = Callable[[], Awaitable[tuple[Mapping[str, Any] | None, str]]]
"""Reads a reference's run record: the record, or None and why there is none."""


@dataclass(frozen=True, slots=True)
class Primary:
    """The engine that is probed, as far as its reference must equal it.

    `version` is vLLM's, `models` the names it serves its base model under and the last part of the model's own path;
    `record` its run record.
    """

    version: str
    models: frozenset[str] = frozenset()
    record: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What another engine said of itself. `problem` is why it is no reference, "" when it is one.

    `model` is the name to ask it for, `record` the digest that its answers carry.
    """

    problem: str = ""
    model: str = ""
    record: str = ""
    standing: Standing = _NOTHING


async def ask_reference(client: EngineClient, primary: Primary, their_record: RecordReader | None = None) -> Asked:
    """Ask an engine behind kvguard what it is.

    It must be proven 16-bit by the headers of its answers, and be of the primary's version. With `their_record` it must
    further equal the primary in all but the KV cache by the two records, and that record must be the one its answers
    name; without, its model must have one of the primary's names.
    """
    answer = await client.models()
    if not answer.ok:
        return Asked(f"{client.target}: no model is served there ({answer.problem})", standing=Standing(absent=True))
    bases, adapters = bases_and_adapters(answer)
    if not bases:
        return Asked(f"{client.target}: no model is served there (its /v1/models names none)")
    dtype = answer.headers.get("x-kvguard-kv-cache-dtype", "")
    confidence = answer.headers.get("x-kvguard-confidence", "")
    if dtype not in _SIXTEEN_BIT or confidence != "proven":
        found = f"{dtype or 'no x-kvguard-kv-cache-dtype header'}, {confidence or 'no confidence'}"
        return Asked(f"{client.target}: a reference must be proven 16-bit behind kvguard; found {found}")
    version = await client.version() or ""
    if not version or version.partition("+")[0] != primary.version.partition("+")[0]:
        return Asked(f"{client.target}: runs vLLM {version or 'of unknown version'}, the primary {primary.version or 'too'}")
    digest = answer.headers.get(RECORD_HEADER, "")
    if their_record is None:
        equality, problem = NOT_BY_RECORD, _another_model(bases, primary)
    else:
        equality, problem = await _equal_by_record(primary, their_record, digest)
    if problem:
        return Asked(f"{client.target}: {problem}")
    length = bases[0].get("max_model_len")
    standing = Standing(equality=equality, adapters=adapters, max_tokens=length if isinstance(length, int) else None)
    return Asked(model=str(bases[0]["id"]), record=digest, standing=standing)


def bases_and_adapters(models: Answer) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """The base model's cards of a /v1/models answer, and the names of LoRA adapters: cards with a parent."""
    cards = model_cards(models)
    return [card for card in cards if not card.get("parent")], frozenset(
        str(card["id"]) for card in cards if card.get("parent")
    )


def model_names(cards: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of a base model: what it is served as, and the last part of the path or hub name it was loaded from."""
    said = [str(card[key]) for card in cards for key in ("id", "root") if isinstance(card.get(key), str)]
    return frozenset(name.rstrip("/").rpartition("/")[2] or name for name in said)


def _another_model(bases: Sequence[Mapping[str, Any]], primary: Primary) -> str:
    theirs = model_names(bases)
    if not primary.models or theirs & primary.models:
        return ""
    names = [" or ".join(sorted(names)) for names in (theirs, primary.models)]
    return f"serves {names[0]}, the primary {names[1]}; name its run record with --shadow-record to show that they are equal"


async def _equal_by_record(primary: Primary, their_record: RecordReader, digest: str) -> tuple[str, str]:
    """(how the two are equal, ""), or ("", why they are not, or why that cannot be said)."""
    record, problem = await their_record()
    if record is None:
        return "", problem
    if primary.record is None:
        return "", "the primary has no run record to compare with"
    written = str(record["predicate"]["content_digest"])
    if written != digest:
        return "", f"its answers name the record {_short(digest or 'of no digest')}, the one given is {_short(written)}"
    return equal_by_record(primary.record, record)


def equal_by_record(primary: Mapping[str, Any], reference: Mapping[str, Any]) -> tuple[str, str]:
    """(how the two starts are equal, ""), or ("", what differs besides the KV cache)."""
    if differences := beyond_the_cache(primary, reference):
        return "", f"differs from the primary in more than its KV cache, by their records: {describe_differences(differences)}"
    digest = str(reference["predicate"]["content_digest"])
    return f"by its run record {_short(digest)}: nothing but the KV cache, sizes and addresses differs", ""


def _short(digest: str) -> str:
    return digest if len(digest) <= 24 else digest[:19]


async def run_teacher_forced(
    client: EngineClient, model: str, decode: Decode, choices: Sequence[Choice], record: str = ""
) -> PassResult:
    """Score the decode's tokens on the reference engine, with its adapter when one generated them.

    Only the exact choice can be had there. With `record`, an answer that names another record is not used: it is of
    an engine that nobody has looked at.
    """
    if any(choice != EXACT for choice in choices):
        return PassResult(problem="an external reference has no fake-quantized passes")
    begun = time.monotonic()
    body = {
        "model": decode.adapter or model,
        "prompt": [*decode.prompt_ids, *decode.ids],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP,
        "cache_salt": secrets.token_hex(16),
    }
    answer = await client.post("/v1/completions", body)
    if not answer.ok:  # the engine's own words could repeat the prompt
        said = answer.error if answer.status is None else f"HTTP {answer.status} without a readable answer"
        return PassResult(problem=f"the reference engine: {said}")
    if record and answer.headers.get(RECORD_HEADER) != record:
        return PassResult(problem="the reference engine was replaced by another one since it was looked at")
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
