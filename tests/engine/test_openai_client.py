"""OpenAI's own Python client against a real engine behind kvguard: whatever it can ask, it gets as from the engine itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


LONG = 7000
"""Tokens that nobody waits for: minutes of work."""

PROMPT = 7500
"""Tokens of a prompt that takes many steps."""


class Steps:
    """What the engine's scheduler wrote of its steps (see `step_log`). Requests are named by their x-request-id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self) -> list[dict[str, Any]]:
        whole, _, _ = self.path.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def until(self, name: str, what: str) -> None:
        """Wait for the first event of that kind that names this request."""
        end = time.monotonic() + 600
        while not any(names(event, what, name) for event in self.events()):
            assert time.monotonic() < end, f"{name} is not {what}"
            time.sleep(0.002)


def names(event: dict[str, Any], what: str, name: str) -> bool:
    """Whether this event is of that kind and names that request; the engine writes more around the name."""
    found = event.get(what, ())
    return any(name in one for one in ([found] if isinstance(found, str) else found))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """What the engine of this module computes."""
    return Steps(tmp_path_factory.mktemp("steps") / "log")


@pytest.fixture(scope="module")
def served(guarded: Callable[..., Guarded], steps: Steps) -> Guarded:
    """Prompts are computed some tokens at a time, so that there is something to leave in the middle of."""
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--scheduler-cls", "step_log.WritingScheduler")
    flags += ("--max-num-batched-tokens", "128", "--max-model-len", "8192", "--no-enable-prefix-caching")
    env = {"PYTHONPATH": str(Path(__file__).parent), "STEP_LOG": str(steps.path)}
    return guarded("plain", *flags, options=("--access-log",), env=env).wait_ready()


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


def behind_a_long_prompt(served: Guarded, steps: Steps, number: int, *, leave: bool) -> tuple[list[dict[str, Any]], float]:
    """A long prompt takes all of each step while another request waits in the engine; its client leaves, or does not.

    Returns the events from the long prompt's first step to the other request's, and when the client left.
    """
    long, short = f"long-{number}-x", f"short-{number}-x"
    with ask(served, long, [5] * PROMPT) as first:
        steps.until(long, "step")
        with ask(served, short, [7] * 8) as second:
            steps.until(short, "added")
            left_at = time.monotonic()
            if leave:
                first.close()
            assert second.recv(12) == b"HTTP/1.1 200"
    events = steps.events()
    begin, end = (next(at for at, event in enumerate(events) if names(event, "step", one)) for one in (long, short))
    return events[begin : end + 1], left_at


def ask(served: Guarded, name: str, prompt: list[int]) -> socket.socket:
    """One token after this prompt is asked for, on a connection of its own."""
    data = json.dumps({"model": served.model, "prompt": prompt, "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\nx-request-id: {name}\r\n"
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=600)
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def computed(events: list[dict[str, Any]], name: str) -> int:
    """Tokens of this request that these steps compute."""
    return sum(count for event in events for one, count in event.get("step", {}).items() if name in one)


def test_a_prompt_that_is_left_while_it_is_computed_holds_up_nobody(served, steps):
    """The request that waits gets the very next step: behind the one that was in progress when the client hung up, in one of
    ten attempts, since a shared machine pauses now and then; and in all of them behind the abort."""
    begun: list[int] = []
    for number in range(10):
        events, left_at = behind_a_long_prompt(served, steps, number, leave=True)
        begun.append(sum(names(event, "step", "long-") and event["at"] > left_at for event in events))
        if computed(events, "long-") == PROMPT:
            continue  # this test was too late to leave
        aborted = next((at for at, event in enumerate(events) if names(event, "left", "long-")), None)
        assert aborted is not None, "nobody told the engine"
        assert [event for event in events[aborted:] if "step" in event] == events[-1:]
        if begun[-1] == 0:
            break
    else:
        raise AssertionError(f"steps of the long prompt that began after its client hung up: {begun}")
    assert until_running(served, 0)


def test_a_prompt_that_nobody_leaves_is_computed_first(served, steps):
    """So a prompt that went on for nobody would be seen."""
    events, _ = behind_a_long_prompt(served, steps, 99, leave=False)
    assert computed(events, "long-") == PROMPT


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
