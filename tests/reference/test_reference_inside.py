"""Asking the workers for passes, and reading what they say."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from kvguard.engine.client import Answer, EngineClient
from kvguard.reference.inside import ask_exactness, run_passes
from kvguard.reference.models import EXACT, Choice, Decode
from kvguard.shadow.references import InEngine

DECODE = Decode((1, 2, 3), (10, 11), (-1.0, -0.5), (((10, -1.0), (12, -1.2)), ((11, -0.5),)))
ONE = {"label": "16bit", "logprobs": [-1.5, -0.5], "top1": [12, 11], "at": [[-1.5, -0.3], [-0.5]]}


class Workers:
    """Replies by rank, each a dict that a nonce is added to, or an Answer."""

    def __init__(self, *replies: Any) -> None:
        self.replies = replies
        self.asked: list[tuple[str, Any]] = []
        self.closed = ""

    async def ask(self, topic: str, secret: str, nonce: str, question: Any = None, *, deadline: float) -> Answer:
        assert secret == "s3cret"
        self.asked.append((topic, question))
        if self.replies and isinstance(self.replies[0], Answer):
            return self.replies[0]
        replies = [{"nonce": nonce, **reply} if isinstance(reply, dict) else reply for reply in self.replies]
        return Answer(200, json.dumps({"replies": replies}).encode())

    def close_channel(self, reason: str) -> str:
        self.closed = reason
        return reason


def run(workers: Workers, *choices: Choice) -> Any:
    return asyncio.run(run_passes(cast(EngineClient, workers), "s3cret", DECODE, choices or (EXACT,)))


def exactness(workers: Workers) -> Any:
    return asyncio.run(ask_exactness(cast(EngineClient, workers), "s3cret"))


def test_a_pass_is_asked_for_and_read() -> None:
    workers = Workers(
        {"rank": 0, "tp_size": 2, "seconds": 0.5, "passes": [ONE, {**ONE, "label": "x"}]},
        {"rank": 1, "tp_size": 2, "seconds": 0.7, "passes": [{}, {}]},
    )
    found = run(workers, EXACT, Choice(label="x", format="fp8_e4m3", scales={"k": (1.0,), "v": (2.0,)}))
    assert (found.problem, found.seconds, [one.label for one in found.passes]) == ("", 0.7, ["16bit", "x"])
    assert found.passes[0].at == ((-1.5, -0.3), (-0.5,))
    [(topic, question)] = workers.asked
    assert topic == "reference"
    assert (question["ids"], question["start"], question["at"]) == ([1, 2, 3, 10, 11], 3, [[10, 12], [11]])
    assert [one["format"] for one in question["passes"]] == [None, "fp8_e4m3"]
    assert question["passes"][1]["scales"] == {"k": [1.0], "v": [2.0]}


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        ((), "0 ranks answered, at least 1 were expected"),
        (({"tp_size": 2, "passes": [ONE]},), "1 ranks answered, 2 were expected"),
        (({"rank": 0, "error": "not exact: MLA"},), "rank 0: not exact: MLA"),
        (({"passes": []},), "no rank returned logits"),
        (({"passes": [{}]},), "no rank returned logits"),
        (({"passes": [ONE, ONE]},), "1 passes were asked for, 2 came"),
        (({"passes": [{**ONE, "logprobs": [-1.0]}]},), "a pass was not understood: ValueError"),
        (({"passes": [{**ONE, "at": None}]},), "a pass was not understood: TypeError"),
        (({"passes": [{"label": "16bit"}]},), "a pass was not understood: KeyError"),
        (({"passes": [{**ONE, "top1": [float("inf"), 1]}]},), "a pass was not understood: OverflowError"),
        ((3,), "the workers' reply was not understood"),
        (({"passes": 3},), "the workers' reply was not understood"),
        ((Answer(500, error="the workers could not be read"),), "the workers could not be read"),
        ((Answer(200, b"nonsense"),), "the workers' reply was not understood"),
        ((Answer(200, b"[]"),), "the workers' reply was not understood"),
    ],
)
def test_no_pass(replies: tuple[Any, ...], problem: str) -> None:
    workers = Workers(*replies)
    found = run(workers)
    assert found.passes == ()
    assert found.problem.startswith(problem)
    assert workers.closed == ""


def test_an_answer_to_another_question_closes_the_channel() -> None:
    workers = Workers({"passes": [ONE], "nonce": "older"})
    assert run(workers).problem == workers.closed == "reference: an answer to another question came"


def test_exactness_is_every_ranks() -> None:
    fine = {"tp_size": 2, "max_tokens": 2048}
    found = exactness(Workers({"rank": 0, **fine}, {"rank": 1, **fine, "max_tokens": 1024}))
    assert (found.exact, found.max_tokens) == (True, 1024)
    found = exactness(Workers({"rank": 0, **fine}, {"rank": 1, **fine, "reasons": ["a: MLA", "a: MLA", "b: MLA"]}))
    assert (found.exact, found.reasons) == (False, ("a: MLA", "b: MLA"))
    assert not exactness(Workers(Answer(404, error="no reader"))).exact


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ({}, ""),
        ({"reasons": [f"layer {n}" for n in range(6)]}, "would not be exact: layer 0; layer 1; layer 2; layer 3 and 2 more"),
        ({"error": "AttributeError: x"}, "could not be asked for: rank None: AttributeError: x"),
    ],
)
def test_why_the_pass_cannot_be_had(reply: dict[str, Any], why: str) -> None:
    reference = InEngine(cast(EngineClient, Workers(reply)), "s3cret")
    found = asyncio.run(reference.unavailable())
    assert found == (f"the reference pass {why}" if why else "")


def test_token_ids_stay_out_of_repr() -> None:
    found = run(Workers({"passes": [ONE]}))
    assert "12" not in repr(found.passes[0])
    assert "10" not in repr(DECODE)
