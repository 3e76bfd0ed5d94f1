"""OpenAI's own Python client against a real engine behind kvguard: whatever it can ask, it gets as from the engine itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from guarded import Guarded, Reader

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
    "required": ["capital", "big"],
    "additionalProperties": False,
}


LONG = 7000
"""Tokens that nobody waits for: minutes of work."""


@pytest.fixture(scope="module")
def served(guarded: Callable[..., Guarded]) -> Guarded:
    """Prompts are computed 64 tokens at a time, so that there is something to leave in the middle of."""
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags += ("--max-num-batched-tokens", "64", "--max-model-len", "8192", "--no-enable-prefix-caching")
    return guarded("plain", *flags, options=("--access-log",)).wait_ready()


@pytest.fixture(scope="module")
def client(served: Guarded) -> Iterator[openai.OpenAI]:
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="sk-secret-41", max_retries=0, http_client=http) as made:
        yield made


def total(served: Guarded, name: str) -> float:
    """A counter of the engine's."""
    value = served.gauge(name)
    assert value is not None
    return value


def until_running(served: Guarded, number: int) -> bool:
    """Whether so many requests come to run, by the engine's own gauge."""
    end = time.monotonic() + 600
    while served.gauge("vllm:num_requests_running") != number:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def abandoned(served: Guarded) -> Iterator[None]:
    """What is asked inside is left before its LONG tokens are made: the engine comes to rest, and has not made them."""
    before = total(served, "vllm:generation_tokens_total")
    yield
    assert until_running(served, 0)
    assert total(served, "vllm:generation_tokens_total") - before < LONG, "the engine made all of it, for nobody"


def test_chat(served, client):
    answer = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=12, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == answer.usage.total_tokens - answer.usage.prompt_tokens


def test_headers_of_the_answer_and_the_request_id(served, client):
    raw = client.chat.completions.with_raw_response.create(
        model=served.model, messages=CHAT, max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-kvguard-kv-cache-dtype"] == served.effective().dtype
    assert raw.request_id == "mine-7"


def test_completions(served, client):
    answer = client.completions.create(model=served.model, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text


def test_streams_give_what_one_answer_gives(served, client):
    whole = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 4
    assert chunks[-1].usage == whole.usage
    text = client.completions.create(model=served.model, prompt="One, two,", max_tokens=6, temperature=0, stream=True)
    assert sum(1 for _ in text) >= 6


def test_tools(served, client):
    answer = client.chat.completions.create(
        model=served.model,
        messages=CHAT,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=60,
        temperature=0,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)


def test_logprobs(served, client):
    answer = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 4
    for token in content:
        assert math.isfinite(token.logprob)
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def test_structured_output(served, client):
    answer = client.chat.completions.create(
        model=served.model,
        messages=CHAT,
        max_tokens=80,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"capital", "big"}
    assert isinstance(found["big"], bool)


def test_errors_are_the_engines(served, client):
    with pytest.raises(openai.APIStatusError) as embeddings:
        client.embeddings.create(model=served.model, input="x")
    assert embeddings.value.status_code in (400, 404)
    with pytest.raises(openai.NotFoundError) as absent:
        client.chat.completions.create(model="no-such-model", messages=CHAT)
    assert "no-such-model" in absent.value.message
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=1, temperature=-3)
    assert [model.id for model in client.models.list()] == [served.model]


def test_a_stream_that_is_closed_ends_the_engines_work(served, client):
    with abandoned(served):
        stream = client.chat.completions.create(
            model=served.model, messages=CHAT, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert until_running(served, 1)
        stream.close()


def test_a_timeout_ends_the_engines_work(served, client):
    with abandoned(served), pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).chat.completions.create(
            model=served.model, messages=CHAT, max_tokens=LONG, extra_body={"ignore_eos": True}
        )


def behind_a_long_prompt(served: Guarded, steps: Reader, *, leave: bool) -> tuple[int, bool]:
    """Engine steps from the hang-up of a long prompt to the first token of the request behind it; whether it was computed.

    `steps` is a stream that gets a token in every step. With `leave` False nobody hangs up.
    """
    body = {"model": served.model, "prompt": [5] * 7500, "max_tokens": 1}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    prompts = total(served, "vllm:prompt_tokens_total")
    with socket.create_connection(("127.0.0.1", served.port), timeout=600) as long:
        long.sendall(head.encode() + data)
        assert until_running(served, 2)
        if leave:
            long.close()
        before = steps.tokens()
        answer = httpx.post(f"{served.base_url}/v1/completions", json={**body, "prompt": [7] * 8}, trust_env=False, timeout=600)
        took = steps.tokens() - before
    assert answer.status_code == 200
    computed = total(served, "vllm:prompt_tokens_total") - prompts
    assert until_running(served, 1)
    return took, computed > 8  # a prompt is counted when its last part is computed


def test_a_prompt_that_is_left_while_it_is_computed_holds_up_nobody(served):
    """The step in progress, one scheduled ahead, and the next request's own; not the rest of the prompt.

    Four steps on a quiet machine; a quarter of the prompt's, in one of five attempts, on one that stands still between what
    is done here and what is counted.
    """
    steps = Reader(served, max_tokens=LONG, stream_options={"include_usage": True, "continuous_usage_stats": True})
    try:
        assert steps.began.wait(300)
        whole, stayed = behind_a_long_prompt(served, steps, leave=False)
        left = [behind_a_long_prompt(served, steps, leave=True) for _ in range(5)]
        assert any(took <= max(4, whole // 4) and not computed for took, computed in left), (whole, left)
        assert stayed, "the prompt that nobody left is counted, so the count would show one that went on"
    finally:
        steps.leave()
    assert until_running(served, 0)


def test_a_closed_connection_is_retried_by_the_client(served):
    """Retries are the client's: a request that fails on its way out is sent again, on a new connection, and answered."""
    attempts = []

    class Flaky(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            attempts.append(request.headers["x-stainless-retry-count"])
            if len(attempts) == 1:
                raise httpx.ConnectError("refused", request=request)
            return super().handle_request(request)

    with httpx.Client(transport=Flaky()) as http:
        retrying = openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="k", max_retries=2, http_client=http)
        answer = retrying.chat.completions.create(model=served.model, messages=CHAT, max_tokens=4)
    assert answer.choices
    assert attempts == ["0", "1"]


def test_async(served):
    async def ask() -> list[str]:
        http = httpx.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="k", http_client=http) as made:

            async def one() -> str:
                stream = await made.chat.completions.create(
                    model=served.model, messages=CHAT, max_tokens=8, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(one() for _ in range(6))))

    answers = asyncio.run(ask())
    assert all("Paris" in answer for answer in answers)
    assert until_running(served, 0)


def test_async_cancellation_ends_the_engines_work(served):
    async def ask() -> None:
        http = httpx.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="k", http_client=http) as made:
            asking = asyncio.create_task(
                made.chat.completions.create(
                    model=served.model, messages=CHAT, max_tokens=LONG, extra_body={"ignore_eos": True}
                )
            )
            assert await asyncio.to_thread(until_running, served, 1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    with abandoned(served):
        asyncio.run(ask())


def test_the_access_log_names_requests_and_not_their_content(served):
    lines = [line for line in served.err.splitlines() if " request  " in line]
    mine = [line for line in lines if "request_id=mine-7" in line]
    assert len(mine) == 1
    assert "path=/v1/chat/completions" in mine[0]
    assert "status=200" in mine[0]
    assert not any("capital" in line or "sk-secret-41" in line for line in lines)
