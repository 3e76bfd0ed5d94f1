"""Measuring for a calibration, against an engine client in miniature."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.engine.client import Answer, EngineClient
from kvguard.reference.calibrate import Measured, in_pieces, measure, one_batch, send_one_batch
from kvguard.reference.prompts import Prompt, PromptSet, Turn
from kvguard.vocabulary import EngineFailed, KvguardError, PolicyRefusal, UsageError

PROMPTS = PromptSet(
    prompts=(Prompt(text="abcdef"), Prompt(messages=(Turn(role="user", content="xyz"),)), Prompt(text="q")),
    digest="sha256:" + "0" * 64,
    origin="test",
)
LAYER = "model.layers.0.self_attn.attn"


def side(amax: float) -> dict[str, Any]:
    return {"amax": [amax], "count": 10, "saturated": 0, "underflowed": 1, "subnormal": 2}


class Engine:
    """Tokenizes a character to a token, and answers passes with ranges that grow with the sequence."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.passes: list[list[int]] = []

    async def post(self, path: str, body: dict[str, Any], deadline: float = 0) -> Answer:
        self.posted.append((path, body))
        if path == "/tokenize":
            if "tokenize" in self.faults:
                return cast(Answer, self.faults["tokenize"])
            text = body["prompt"] if "prompt" in body else "<" + "".join(turn["content"] for turn in body["messages"]) + ">"
            return Answer(200, {"tokens": [ord(letter) for letter in text]})
        return cast(Answer, self.faults.get("completion", Answer(200, {"choices": []})))

    async def ask(self, topic: str, secret: str, nonce: str, question: Any = None, *, deadline: float) -> Answer:
        assert secret == "s3cret"
        ranks = self.faults.get("ranks", 1)
        reply: dict[str, Any] = {"nonce": nonce, "tp_size": ranks, "max_tokens": 4}
        if topic == "inexact":
            reply["reasons"] = self.faults.get("reasons", [])
            reply["error"] = self.faults.get("inexact")
        else:
            assert (question["start"], question["at"], question["ranges"]) == (len(question["ids"]) - 1, [[]], True)
            self.passes.append(question["ids"])
            reply["passes"] = [{"label": "16bit", "logprobs": [0.0], "top1": [1], "at": [[]]}]
            reply["error"] = self.faults.get("pass")
            size = float(max(question["ids"]))
            reply["ranges"] = None if "no_ranges" in self.faults else {LAYER: {"k": side(size), "v": side(size / 2)}}
        replies = [{**reply, "rank": rank} for rank in range(ranks)]
        return Answer(200, json.dumps({"replies": replies}).encode())

    def close_channel(self, reason: str) -> str:
        return reason


def run(engine: Engine, *, chat: bool = True, max_model_len: int | None = None) -> tuple[Measured, list[tuple[int, int]]]:
    steps: list[tuple[int, int]] = []
    call = measure(
        cast(EngineClient, engine),
        "s3cret",
        "m",
        PROMPTS,
        chat_template=chat,
        max_model_len=max_model_len,
        progress=lambda done, total: steps.append((done, total)),
    )
    return asyncio.run(call), steps


def test_every_prompt_is_measured_in_pieces_of_one_batch() -> None:
    engine = Engine()
    found, steps = run(engine)
    assert ["".join(map(chr, ids)) for ids in engine.passes] == ["abcd", "ef", "<xyz"]
    assert (found.sequences, found.tokens) == (3, 10)
    assert found.ranges[LAYER].k.amax == (ord("z"),)
    assert (found.ranges[LAYER].v.count, found.ranges[LAYER].v.subnormal) == (30, 6)
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_the_models_length_bounds_the_pieces_too() -> None:
    engine = Engine()
    run(engine, max_model_len=3)
    assert max(map(len, engine.passes)) == 3


def test_without_a_template_a_chat_is_its_words() -> None:
    engine = Engine()
    run(engine, chat=False)
    assert "".join(map(chr, engine.passes[-1])) == "xyz"
    assert all("messages" not in body for _, body in engine.posted)


def test_heads_of_two_ranks() -> None:
    found, _ = run(Engine(ranks=2))
    assert len(found.ranges[LAYER].k.amax) == 2


def error(engine: Engine) -> KvguardError:
    with pytest.raises(KvguardError) as caught:
        run(engine)
    return caught.value


def test_a_model_that_the_pass_does_not_reproduce_is_refused_by_layer_and_reason() -> None:
    reasons = [f"model.layers.{index}.attn: MLAAttention is not plain attention" for index in range(6)]
    refused = error(Engine(reasons=reasons))
    assert isinstance(refused, PolicyRefusal)
    assert str(refused).startswith("m cannot be calibrated: model.layers.0.attn: MLAAttention is not plain attention; ")
    assert str(refused).endswith(" and 2 more")


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"inexact": "boom"}, "cannot be asked for a reference pass: rank 0: boom"),
        ({"pass": "boom"}, "a reference pass over 4 tokens failed: rank 0: boom"),
        ({"no_ranges": 1}, "0 of 1 ranks measured their keys and values"),
        ({"tokenize": Answer(404, {"detail": "Not Found"})}, "could not tokenize a calibration prompt: HTTP 404"),
        ({"tokenize": Answer(200, {"tokens": ["a"]})}, "no token ids in its answer"),
    ],
)
def test_an_engine_that_does_not_answer(faults: dict[str, Any], words: str) -> None:
    failed = error(Engine(**faults))
    assert isinstance(failed, EngineFailed)
    assert words in str(failed)


def test_prompts_of_one_token_measure_nothing() -> None:
    engine = Engine(tokenize=Answer(200, {"tokens": [1]}))
    assert isinstance(error(engine), UsageError)


# --- pieces and batches ---


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 12))
def test_pieces_hold_every_token_but_a_single_last_one(ids: list[int], size: int) -> None:
    pieces = in_pieces(ids, size)
    assert all(2 <= len(piece) <= max(size, 2) for piece in pieces)
    joined = [token for piece in pieces for token in piece]
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) <= 1


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=12), st.integers(1, 30))
def test_a_batch_has_the_beginning_of_every_text(token_ids: list[list[int]], limit: int) -> None:
    batch = one_batch(token_ids, limit)
    assert len(batch) <= limit
    used = [ids for ids in token_ids if ids]
    if used and len(used) <= limit:
        assert len(batch) >= len(used)
        assert batch[0] == used[0][0]


def test_the_first_batch_is_one_request_of_token_ids() -> None:
    engine = Engine()
    sent = asyncio.run(send_one_batch(cast(EngineClient, engine), "m", PROMPTS, chat_template=True, limit=6))
    path, body = engine.posted[-1]
    assert (path, sent) == ("/v1/completions", 5)
    assert "".join(map(chr, body["prompt"])) == "ab<xq"
    assert (body["max_tokens"], body["temperature"]) == (1, 0)
    assert body["cache_salt"]
    with pytest.raises(EngineFailed, match="the calibration prompt of 5 tokens was not answered: HTTP 500"):
        asyncio.run(
            send_one_batch(
                cast(EngineClient, Engine(completion=Answer(500, {"error": {"message": "x"}}))),
                "m",
                PROMPTS,
                chat_template=True,
                limit=6,
            )
        )
