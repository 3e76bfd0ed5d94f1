"""The small requests whose answers say whether an engine computes, and what is wrong with an answer."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.engine.canary import Canary, canary_check, examine, send_canaries
from kvguard.engine.client import Answer, EngineClient
from kvguard.vocabulary import CheckResult

GOOD = [-0.5 - index for index in range(12)]
WORDS = [f"token_id:{index}" for index in range(12)]


class Engine:
    """Answers each request with `answer`, and keeps what it was asked."""

    def __init__(self, answer: Answer | None = None) -> None:
        self._answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        self.asked.append((path, body))
        return self._answer or Answer(status=200, body={"choices": [{"logprobs": answer_of(path)}]})

    def send(self, **more: Any) -> tuple[Canary, ...]:
        given = {"chat": True, "window": None, "max_model_len": 2048, **more}
        return asyncio.run(send_canaries(cast(EngineClient, self), "m", **given))


def answer_of(path: str, tokens: list[str] = WORDS, logprobs: list[Any] = GOOD) -> dict[str, Any]:
    if "chat" in path:
        return {"content": [{"token": token, "logprob": value} for token, value in zip(tokens, logprobs, strict=True)]}
    return {"tokens": tokens, "token_logprobs": logprobs}


def test_short_chat_and_beyond_the_window() -> None:
    engine = Engine()
    sent = engine.send(window=256)
    assert [(one.name, one.problem, one.skipped) for one in sent] == [
        ("completion", "", ""),
        ("chat", "", ""),
        ("beyond_window", "", ""),
    ]
    assert [path for path, _ in engine.asked] == ["/v1/completions", "/v1/chat/completions", "/v1/completions"]
    assert len(engine.asked[2][1]["prompt"]) > 256 * 6


def test_canaries_leave_no_trace_in_the_prefix_cache_and_work_for_every_template() -> None:
    engine = Engine()
    engine.send()
    salts = {body["cache_salt"] for _, body in engine.asked}
    assert len(salts) == 2
    assert all(body["temperature"] == 0 and body["model"] == "m" for _, body in engine.asked)
    assert [turn["role"] for turn in engine.asked[1][1]["messages"]] == ["user", "assistant", "user"]


def test_no_chat_without_a_template_and_no_prompt_longer_than_the_model() -> None:
    sent = Engine().send(chat=False, window=2040)
    assert [one.name for one in sent] == ["completion", "beyond_window"]
    assert "2040" in sent[1].skipped
    assert (
        canary_check(sent, dummy_weights=False).found
        == "completion (ok), beyond_window (no prompt is longer than the window of 2040)"
    )
    unlimited = Engine().send(chat=False, window=2040, max_model_len=None)
    assert unlimited[1].skipped == ""


@pytest.mark.parametrize(
    "answer", [Answer(status=500, body={"error": {"message": "EngineCore died"}}), Answer(error="connection lost")]
)
def test_an_error_is_a_problem(answer: Answer) -> None:
    sent = Engine(answer).send(window=16)
    assert all(one.problem for one in sent)
    check = canary_check(sent, dummy_weights=True)
    assert check.result is CheckResult.FAIL
    assert ("EngineCore died" in check.found) or ("connection lost" in check.found)


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        None,
        "text",
        {"choices": []},
        {"choices": [None]},
        {"choices": {"a": 1}},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": []}]},
        {"choices": [{"logprobs": {"tokens": "abc", "content": [1, None]}}]},
    ],
)
def test_an_answer_of_another_shape_has_no_token(body: Any) -> None:
    assert [one.problem for one in Engine(Answer(status=200, body=body)).send()] == ["no token came out"] * 2


@pytest.mark.parametrize(
    ("tokens", "logprobs", "problem"),
    [
        (WORDS, GOOD, ""),
        (WORDS[:1], [0], ""),
        ([], [], "no token came out"),
        (WORDS, [*GOOD[:-1], float("nan")], "invalid log probability nan"),
        (WORDS, [float("inf"), *GOOD[1:]], "invalid log probability inf"),
        (WORDS, [float("-inf"), *GOOD[1:]], "invalid log probability -inf"),
        (WORDS, [None, *GOOD[1:]], "invalid log probability None"),
        (WORDS, [0.1, *GOOD[1:]], "invalid log probability 0.1"),
        (WORDS, [-(10**400), *GOOD[1:]], ""),
        (WORDS, GOOD[:-1], "12 tokens came with 11 log probabilities"),
        (["token_id:0"] * 12, GOOD, "one token repeated 12 times (token_id:0)"),
        (["token_id:0"] * 11, GOOD[:11], ""),
        ([[1]] * 12, GOOD, "one token repeated 12 times ([1])"),
    ],
)
def test_what_is_wrong_with_an_answer(tokens: list[Any], logprobs: list[Any], problem: str) -> None:
    assert examine(tokens, logprobs) == problem


@given(st.lists(st.one_of(st.none(), st.text(), st.integers())), st.lists(st.one_of(st.none(), st.floats(), st.integers())))
def test_any_answer_can_be_examined(tokens: list[Any], logprobs: list[Any]) -> None:
    assert isinstance(examine(tokens, logprobs), str)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["choices", "logprobs", "tokens", "token_logprobs", "content", "token"]), inner, max_size=3
        ),
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_body_can_be_read(body: Any) -> None:
    assert len(Engine(Answer(status=200, body=body)).send()) == 2


REPEATED = Canary(name="chat", problem="one token repeated 12 times (a)")
BROKEN = Canary(name="completion", problem="invalid log probability nan")
FINE = Canary(name="completion")


@pytest.mark.parametrize(
    ("canaries", "dummy", "result"),
    [
        ((FINE,), False, CheckResult.PASS),
        ((FINE, REPEATED), False, CheckResult.FAIL),
        ((FINE, REPEATED), True, CheckResult.WARN),
        ((BROKEN, REPEATED), True, CheckResult.FAIL),
        ((BROKEN,), True, CheckResult.FAIL),
    ],
)
def test_the_check(canaries: tuple[Canary, ...], dummy: bool, result: CheckResult) -> None:
    check = canary_check(canaries, dummy_weights=dummy)
    assert check.result is result
    assert check.enforced
    assert bool(check.action) is (result is not CheckResult.PASS)
    for canary in canaries:
        assert canary.problem in check.found


class Picky:
    """Answers some paths, or some bodies, with 400."""

    def __init__(self, *accepted: str, embedding: object = (0.1, -0.2)) -> None:
        self._accepted = accepted
        self._embedding = embedding

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        kind = path.removeprefix("/v1/") + (" short" if "return_token_ids" in body else "")
        if kind not in self._accepted:
            return Answer(status=400, body={"error": {"message": f"{kind} is not for me"}})
        choice = {"logprobs": answer_of(path), "token_ids": [1, 2]}
        return Answer(status=200, body={"choices": [choice], "data": [{"embedding": self._embedding}]})

    def send(self, **more: Any) -> tuple[Canary, ...]:
        given = {"chat": True, "window": None, "max_model_len": 2048, **more}
        return asyncio.run(send_canaries(cast(EngineClient, self), "m", **given))


def test_what_the_engines_flags_forbid_is_left_out() -> None:
    [short] = Picky("completions short").send()
    assert (short.name, short.problem) == ("short completion", "")
    no_chat = Picky("completions").send()
    assert [(one.name, one.problem) for one in no_chat] == [("completion", ""), ("chat", "")]
    assert "chat/completions is not for me" in no_chat[1].skipped


@pytest.mark.parametrize(
    ("embedding", "problem"),
    [
        ([0.1, -0.2], ""),
        ([], "an empty embedding"),
        (None, "an empty embedding"),
        ([0.1, float("nan")], "invalid value nan in the embedding"),
        (["x"], "invalid value 'x' in the embedding"),
    ],
)
def test_a_pooling_model_gets_an_embedding(embedding: object, problem: str) -> None:
    [one] = Picky("embeddings", embedding=embedding).send()
    assert (one.name, one.problem) == ("embedding", problem)


def test_an_engine_that_accepts_nothing_fails_the_start_and_says_its_flags_may_be_why() -> None:
    sent = Picky().send()
    check = canary_check(sent, dummy_weights=False)
    assert check.result is CheckResult.FAIL
    assert "not accepted: HTTP 400: completions short is not for me" in check.found
    assert check.action == "the engine answered no request of ours: check its flags against the message"


def test_logits_may_be_positive() -> None:
    assert examine(WORDS, [5.5, *GOOD[1:]], logits=True) == ""
    for value in (float("nan"), float("inf"), float("-inf")):
        assert examine(WORDS, [value, *GOOD[1:]], logits=True)
