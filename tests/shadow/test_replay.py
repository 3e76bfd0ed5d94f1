"""The request a probe sends, and what the engine's answer says."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.shadow.candidate import Candidate, Kind, read_request
from kvguard.shadow.models import Decode
from kvguard.shadow.replay import Problem, probe_body, read_decode

USER = {"role": "user", "content": "Hello"}


def candidate(path: str, **fields: Any) -> Candidate:
    found = read_request(path, json.dumps(fields).encode(), [])
    assert isinstance(found, Candidate)
    return found


def probe(path: str, *, greedy: bool = False, cap: int = 64, **fields: Any) -> dict[str, Any]:
    to, body = probe_body(candidate(path, **fields), served_model="base", max_tokens=cap, greedy=greedy, salt="s")
    assert to == path
    return body


def test_a_chat_is_replayed_with_its_own_sampling() -> None:
    body = probe(
        "/v1/chat/completions",
        messages=[USER],
        model="alias",
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.7,
        top_p=0.9,
        seed=3,
        presence_penalty=None,
        user="someone",
        metadata={"a": "b"},
        request_id="abc",
        session_id="def",
        priority=-5,
        include_reasoning=False,
        prompt_logprobs=5,
        logprob_token_ids=[1],
        logprobs=False,
        max_tokens=500,
        chat_template_kwargs={"enable_thinking": False},
        cache_salt="client's",
    )
    assert body == {
        "messages": [USER],
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
        "model": "base",
        "stream": False,
        "n": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": "s",
        "max_completion_tokens": 64,
        "logprobs": True,
        "top_logprobs": 20,
        "include_reasoning": True,
    }


def test_a_completion_is_replayed() -> None:
    body = probe("/v1/completions", prompt=[1, 2], model="m", top_k=5, stream=True, suffix="x")
    assert body == {
        "prompt": [1, 2],
        "top_k": 5,
        "model": "base",
        "stream": False,
        "n": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": "s",
        "max_tokens": 16,
        "logprobs": 20,
    }


def test_greedy_replays_draw_nothing_and_keep_penalties() -> None:
    body = probe(
        "/v1/completions",
        greedy=True,
        prompt="a",
        temperature=1.2,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=1,
        repetition_penalty=1.3,
    )
    assert body["temperature"] == 0
    assert body["repetition_penalty"] == 1.3
    assert not {"top_p", "top_k", "min_p", "seed"} & set(body)


def test_the_smaller_limit_holds() -> None:
    chat = "/v1/chat/completions"
    assert probe(chat, messages=[USER])["max_completion_tokens"] == 64
    assert probe(chat, messages=[USER], max_tokens=9)["max_completion_tokens"] == 9
    assert probe(chat, messages=[USER], max_tokens=9, max_completion_tokens=7)["max_completion_tokens"] == 7
    body = probe("/v1/completions", prompt="a", max_tokens=900, min_tokens=800)
    assert (body["max_tokens"], body["min_tokens"]) == (64, 64)


def test_an_adapter_keeps_its_name() -> None:
    lora = Candidate("completion", {"prompt": "a", "model": "lora"}, 1, "lora", 1, 30)
    assert probe_body(lora, served_model="base", max_tokens=4, greedy=False, salt="s")[1]["model"] == "lora"


def test_lone_surrogates_can_be_written() -> None:
    body = probe("/v1/completions", prompt="\ud83d half")
    assert json.loads(json.dumps(body).encode())["prompt"] == "\ud83d half"


CHAT_ANSWER: dict[str, Any] = {
    "prompt_token_ids": [5, 6, 7],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab"},
            "finish_reason": "length",
            "token_ids": [11, 12],
            "logprobs": {
                "content": [
                    {
                        "token": "token_id:11",
                        "logprob": -2.0,
                        "top_logprobs": [
                            {"token": "token_id:11", "logprob": -2.0},
                            {"token": "token_id:9", "logprob": -0.25},
                        ],
                    },
                    {
                        "token": "token_id:12",
                        "logprob": -0.5,
                        "top_logprobs": [{"token": "token_id:12", "logprob": -0.5}],
                    },
                ]
            },
        }
    ],
}
COMPLETION_ANSWER: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "text": "ab",
            "finish_reason": "length",
            "prompt_token_ids": [5, 6, 7],
            "token_ids": [11, 12],
            "logprobs": {
                "text_offset": [0, 1],
                "tokens": ["token_id:11", "token_id:12"],
                "token_logprobs": [-2.0, -0.5],
                "top_logprobs": [{"token_id:11": -2.0, "token_id:9": -0.25}, {"token_id:12": -0.5}],
            },
        }
    ],
}
DECODE = Decode((5, 6, 7), (11, 12), (-2.0, -0.5), (((9, -0.25), (11, -2.0)), ((12, -0.5),)), "length")
ANSWERS: list[tuple[Kind, dict[str, Any]]] = [("chat", CHAT_ANSWER), ("completion", COMPLETION_ANSWER)]


@pytest.mark.parametrize(("kind", "answer"), ANSWERS)
def test_both_kinds_of_answer_are_read(kind: Kind, answer: dict[str, Any]) -> None:
    assert read_decode(kind, answer) == DECODE


@pytest.mark.parametrize(("kind", "answer"), ANSWERS)
def test_the_other_kinds_answer_is_not_mistaken(kind: Kind, answer: dict[str, Any]) -> None:
    other: Kind = "completion" if kind == "chat" else "chat"
    assert read_decode(other, answer) == Problem.NO_TOKEN_IDS


def test_at_most_twenty_by_falling_logprob() -> None:
    answer = deepcopy(COMPLETION_ANSWER)
    answer["choices"][0]["logprobs"]["top_logprobs"][1] = {f"token_id:{i}": -30.0 + i for i in range(21)}
    decode = read_decode("completion", answer)
    assert isinstance(decode, Decode)
    assert [token for token, _ in decode.top[1]] == list(range(20, 0, -1))


@pytest.mark.parametrize("value", [None, float("nan"), "NaN", float("inf")])
@pytest.mark.parametrize("place", ["token_logprobs", "top_logprobs"])
def test_a_logprob_that_is_not_a_number_is_a_finding(value: Any, place: str) -> None:
    answer = deepcopy(COMPLETION_ANSWER)
    logprobs = answer["choices"][0]["logprobs"]
    logprobs[place][0] = value if place == "token_logprobs" else {"token_id:11": value}
    assert read_decode("completion", answer) == Problem.NAN


def test_the_error_that_vllm_makes_of_nan_is_the_same_finding() -> None:
    message = "Out of range float values are not JSON compliant"
    assert read_decode("chat", {"error": {"message": message, "code": 400}}) == Problem.NAN
    assert read_decode("chat", {"error": {"message": f"{message}: nan"}}) == Problem.NAN
    assert read_decode("chat", {"object": "error", "message": message}) == Problem.NAN
    assert read_decode("chat", {"error": {"message": "too long"}}) == Problem.ERROR


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"token_ids": None}, Problem.NO_TOKEN_IDS),
        ({"prompt_token_ids": []}, Problem.NO_TOKEN_IDS),
        ({"token_ids": []}, Problem.NO_TOKENS),
        ({"token_ids": [11]}, Problem.NO_LOGPROBS),
        ({"token_ids": [11, 13]}, Problem.NO_LOGPROBS),
        ({"token_ids": [11, -12]}, Problem.MALFORMED),
        ({"token_ids": [11, True]}, Problem.MALFORMED),
        ({"token_ids": "ab"}, Problem.MALFORMED),
        ({"logprobs": None}, Problem.NO_LOGPROBS),
        ({"logprobs": {}}, Problem.NO_LOGPROBS),
    ],
)
def test_answers_that_cannot_be_scored(change: dict[str, Any], problem: Problem) -> None:
    answer = deepcopy(COMPLETION_ANSWER)
    answer["choices"][0] |= change
    assert read_decode("completion", answer) == problem


def test_text_tokens_and_masked_logprobs_are_no_logprobs() -> None:
    answer = deepcopy(COMPLETION_ANSWER)
    answer["choices"][0]["logprobs"]["tokens"][0] = "a"
    assert read_decode("completion", answer) == Problem.NO_LOGPROBS
    answer = deepcopy(CHAT_ANSWER)
    # What vLLM writes when it has no logprob for the token.
    answer["choices"][0]["logprobs"]["content"][0] = {"token": "token_id:11", "logprob": -9999.0, "top_logprobs": []}
    assert read_decode("chat", answer) == Problem.NO_LOGPROBS


@pytest.mark.parametrize("answer", [None, [], "text", {}, {"choices": []}, {"choices": [1]}, {"choices": {}}, {"error": None}])
def test_what_is_no_answer(answer: Any) -> None:
    assert isinstance(read_decode("chat", answer), Problem)


paths = st.sampled_from(
    [
        ("prompt_token_ids",),
        ("choices",),
        ("choices", 0, "token_ids"),
        ("choices", 0, "token_ids", 1),
        ("choices", 0, "logprobs"),
        ("choices", 0, "logprobs", "content"),
        ("choices", 0, "logprobs", "content", 0),
        ("choices", 0, "logprobs", "content", 0, "logprob"),
        ("choices", 0, "logprobs", "content", 1, "token"),
        ("choices", 0, "logprobs", "content", 1, "top_logprobs"),
        ("choices", 0, "logprobs", "content", 1, "top_logprobs", 0),
        ("choices", 0, "logprobs", "content", 1, "top_logprobs", 0, "token"),
        ("choices", 0, "finish_reason"),
    ]
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(path=paths, value=junk)
def test_never_raises(path: tuple[Any, ...], value: Any) -> None:
    answer: Any = deepcopy(CHAT_ANSWER)
    place = answer
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    found = read_decode("chat", answer)
    if isinstance(found, Decode):
        assert len(found.ids) == len(found.logprobs) == len(found.top) == 2
    else:
        assert isinstance(found, str)
