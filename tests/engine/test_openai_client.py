"""OpenAI's own Python client against a real engine behind kvguard: whatever it can ask, it gets as from the engine itself."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from guarded import Guarded

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


@pytest.fixture(scope="module")
def served(guarded: Callable[..., Guarded]) -> Guarded:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    return guarded("plain", *flags, options=("--access-log",)).wait_ready()


@pytest.fixture(scope="module")
def client(served: Guarded) -> Iterator[openai.OpenAI]:
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="sk-secret-41", max_retries=0, http_client=http) as made:
        yield made


def idle(served: Guarded) -> bool:
    """Whether the engine comes to rest."""
    end = time.monotonic() + 300
    while served.gauge("vllm:num_requests_running") != 0.0:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


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
    stream = client.chat.completions.create(
        model=served.model, messages=CHAT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert served.gauge("vllm:num_requests_running") == 1.0
    stream.close()
    assert idle(served)


def test_a_timeout_ends_the_engines_work(served, client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).chat.completions.create(
            model=served.model, messages=CHAT, max_tokens=1500, extra_body={"ignore_eos": True}
        )
    assert idle(served)


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
    assert idle(served)


def test_async_cancellation_ends_the_engines_work(served):
    async def ask() -> None:
        http = httpx.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="k", http_client=http) as made:
            asking = asyncio.create_task(
                made.chat.completions.create(
                    model=served.model, messages=CHAT, max_tokens=1500, extra_body={"ignore_eos": True}
                )
            )
            while served.gauge("vllm:num_requests_running") != 1.0:
                await asyncio.sleep(0.05)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(ask())
    assert idle(served)


def test_the_access_log_names_requests_and_not_their_content(served):
    lines = [line for line in served.err.splitlines() if " request  " in line]
    mine = [line for line in lines if "request_id=mine-7" in line]
    assert len(mine) == 1
    assert "path=/v1/chat/completions" in mine[0]
    assert "status=200" in mine[0]
    assert not any("capital" in line or "sk-secret-41" in line for line in lines)
