"""Spans of requests: OpenTelemetry's names, the client's trace continued and passed on, and nothing of what was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from proxy_fakes import OPEN, Call, FakeEngine, Proxy

from kvguard.guard.gate import UNKNOWN_HEADERS, Snapshot
from kvguard.guard.state import State
from kvguard.proxy.span_attributes import asked_attributes, trace_context
from kvguard.proxy.tracing import Tracing
from kvguard.proxy.upstream import Upstream

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRETS = ("authorization: Bearer canary-key", "cookie: canary-cookie", "x-request-id: r1", "user-agent: OpenAI/Python 3")
ASKED = {
    "model": "smol",
    "messages": [{"role": "user", "content": "canary-prompt"}],
    "max_tokens": 12,
    "temperature": 0.5,
    "stream": True,
    "stop": ["canary-stop"],
    "user": "canary-user",
}


async def script(call: Call) -> None:
    """What the path asks for."""
    wanted = call.request_line.split()[1]
    if wanted == b"/v1/completions":
        call.abort()
    elif wanted.startswith(b"/v1/chat/completions"):
        await call.start_stream()
        await call.chunk(b'data: {"text": "canary-answer"}\n\n')
        await call.send(b"0\r\n\r\n")
    elif wanted == b"/dies-inside":
        await call.start_stream()
        await call.chunk(b"data: 1\n\n")
        call.writer.close()
    elif wanted == b"/hangs":
        await call.wait_closed()
    else:
        await call.json(b"{}")


class Traced:
    """A proxy whose spans are kept."""

    def __init__(self, uds: Path, provider: TracerProvider) -> None:
        self.kept = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.proxy = Proxy(Upstream(str(uds)), tracing=Tracing(provider))

    def spans(self) -> list[ReadableSpan]:
        """Those of all requests, once the proxy is closed."""
        self.proxy.plane.close()
        return list(self.kept.get_finished_spans())

    def span(self) -> ReadableSpan:
        [span] = self.spans()
        return span

    def attributes(self) -> Mapping[str, Any]:
        return self.span().attributes or {}


@pytest.fixture
def engine(short_dir: Path) -> Iterator[FakeEngine]:
    with FakeEngine(script, short_dir / "e") as one:
        yield one


@pytest.fixture
def traced(engine: FakeEngine) -> Iterator[Traced]:
    one = Traced(engine.uds, TracerProvider(shutdown_on_exit=False))
    with one.proxy:
        yield one


def traceparent(call: Call) -> re.Match[str]:
    [value] = call.values(b"traceparent")
    match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", value.decode())
    assert match is not None
    return match


def sampled(call: Call) -> bool:
    return bool(int(traceparent(call)[3], 16) & 1)


def test_the_clients_trace_goes_on_through_us_to_the_engine(engine: FakeEngine, traced: Traced) -> None:
    with traced.proxy.client() as client:
        client.ask("GET", "/v1/models", (f"traceparent: 00-{TRACE}-{PARENT}-01", "tracestate: a=1", "tracestate: b=2"))
    call, span = engine.next_call(), traced.span()
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.kind is SpanKind.SERVER
    assert traceparent(call).groups()[:2] == (TRACE, f"{span.context.span_id:016x}")
    assert sampled(call)
    assert b",".join(call.values(b"tracestate")) == b"a=1,b=2"


@pytest.mark.parametrize("given_headers", [(), ("traceparent: nonsense", "tracestate: a=1")])
def test_a_request_without_a_trace_begins_one(engine: FakeEngine, traced: Traced, given_headers: tuple[str, ...]) -> None:
    with traced.proxy.client() as client:
        client.ask("GET", "/v1/models", given_headers)
    call, span = engine.next_call(), traced.span()
    assert span.parent is None
    assert traceparent(call).groups()[:2] == (f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}")
    assert sampled(call)
    assert call.values(b"tracestate") == [], "the state of a trace that does not go on"


def test_a_chat_has_the_usual_attributes_and_nothing_of_its_content(engine: FakeEngine, traced: Traced) -> None:
    with traced.proxy.client() as client:
        client.ask("POST", "/v1/chat/completions?key=canary-query", SECRETS, json.dumps(ASKED).encode())
    port = traced.proxy.address[1]
    span = traced.span()
    found = dict(span.attributes or {})
    assert span.name == "POST /v1/chat/completions"
    assert span.status.status_code is StatusCode.UNSET
    assert found.pop("client.port") != port
    assert 0 <= found.pop("gen_ai.response.time_to_first_chunk") <= (span.end_time - span.start_time) / 1e9
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "server.address": "127.0.0.1",
        "server.port": port,
        "client.address": "127.0.0.1",
        "user_agent.original": "OpenAI/Python 3",
        "http.request.header.x-request-id": ("r1",),
        "http.request.body.size": len(json.dumps(ASKED)),
        "http.response.body.size": len(b'data: {"text": "canary-answer"}\n\n'),
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "smol",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": True,
        "kvguard.outcome": "ok",
        "kvguard.kv_cache_dtype": "fp8_e4m3",
        "kvguard.kv_scales": "checkpoint",
        "kvguard.confidence": "proven",
        "kvguard.record": "sha256:abc",
    }
    assert "canary" not in span.to_json()


def test_an_unknown_path_and_method_make_no_names(traced: Traced) -> None:
    with traced.proxy.client() as client:
        client.ask("PROPFIND", "/some/" + "a" * 300)
    found = traced.attributes()
    assert traced.kept.get_finished_spans()[0].name == "HTTP"
    assert (found["http.request.method"], found["http.request.method_original"]) == ("_OTHER", "PROPFIND")
    assert "http.route" not in found
    assert len(found["url.path"]) == 200


@pytest.mark.parametrize(
    ("path", "status", "error", "said"),
    [
        ("/v1/completions", 502, "upstream_error", "it closed the connection"),
        ("/dies-inside", 200, "upstream_error", "middle of the response"),
        ("/_kvguard", 404, None, ""),
    ],
)
def test_what_the_server_failed_is_an_error(traced: Traced, path: str, status: int, error: str | None, said: str) -> None:
    with traced.proxy.client() as client:
        client.ask("POST", path, body=b"{}")
    span = traced.span()
    found = span.attributes or {}
    assert (found["http.response.status_code"], found.get("error.type")) == (status, error)
    assert span.status.status_code is (StatusCode.ERROR if error else StatusCode.UNSET)
    assert said in (span.status.description or "")


def test_a_closed_gate_is_an_error_with_an_unknown_cache(traced: Traced) -> None:
    traced.proxy.gate.snapshot = Snapshot(State.VERIFYING, False, "the engine is being verified", 7, UNKNOWN_HEADERS)
    with traced.proxy.client() as client:
        assert client.ask("GET", "/v1/models").status == 503
    found = traced.attributes()
    assert (found["error.type"], found["kvguard.outcome"], found["kvguard.kv_cache_dtype"]) == ("503", "refused", "unknown")


def test_a_client_that_left_got_no_status_and_is_no_error(engine: FakeEngine, traced: Traced) -> None:
    with traced.proxy.client() as client:
        client.send("POST", "/hangs", body=b"{}")
        engine.next_call()
    traced.proxy.observer.next_end()
    span = traced.span()
    assert span.attributes is not None
    assert span.attributes["kvguard.outcome"] == "client_disconnected"
    assert "http.response.status_code" not in span.attributes
    assert span.status.status_code is StatusCode.UNSET


def test_what_is_not_sampled_passes_on_that_it_is_not(engine: FakeEngine) -> None:
    one = Traced(engine.uds, TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))
    with one.proxy, one.proxy.client() as client:
        assert client.ask("GET", "/v1/models", (f"traceparent: 00-{TRACE}-{PARENT}-01",)).status == 200
        assert not sampled(engine.next_call())
        assert one.spans() == []


def test_every_request_has_a_span_of_its_own(engine: FakeEngine, traced: Traced) -> None:
    traced.proxy.gate.snapshot = OPEN
    with traced.proxy.client() as client:
        for _ in range(50):
            assert client.ask("POST", "/v1/embeddings", body=b'{"model": "m", "input": "canary"}').status == 200
    spans = traced.spans()
    assert len(spans) == 50
    assert len({span.context.span_id for span in spans}) == 50
    assert {(span.attributes or {})["gen_ai.operation.name"] for span in spans} == {"embeddings"}
    assert all(span.end_time - span.start_time >= 0 for span in spans)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"n": 1, "seed": 7, "top_k": 5, "top_p": 1}', {"seed": 7, "top_k": 5, "top_p": 1}),
        (b'{"n": 2, "max_completion_tokens": 9}', {"choice.count": 2, "max_tokens": 9}),
        (b'{"model": ["x"], "max_tokens": true, "temperature": "hot", "seed": 1.5, "stream": "yes"}', {}),
        (b'{"seed": 99999999999999999999999}', {}),
        (b'{"temperature": 1e999}', {}),
        (b"[1]", {}),
        (b"{", {}),
        (b"[" * 100_000, {}),
        (b"\xff", {}),
        (b'{"model": "m", "prompt": "' + b"x" * 2**18 + b'"}', {}),
    ],
)
def test_what_a_body_asks_for(body: bytes, expected: dict[str, Any]) -> None:
    found = asked_attributes("/v1/completions", body)
    assert found == {f"gen_ai.request.{name}": value for name, value in expected.items()}
    assert asked_attributes("/v1/models", body) == {}


SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text()


@given(SCALARS | st.lists(SCALARS) | st.dictionaries(st.text(), SCALARS))
def test_no_value_breaks_it(value: Any) -> None:
    names = ("model", "max_tokens", "temperature", "n", "stream", "seed", "messages")
    found = asked_attributes("/v1/chat/completions", json.dumps(dict.fromkeys(names, value)).encode())
    assert all(isinstance(one, str | int | float) for one in found.values())
    assert not any("messages" in name for name in found)


def test_two_traceparents_are_none() -> None:
    one = b"00-" + TRACE.encode() + b"-" + PARENT.encode() + b"-01"
    assert "," in trace_context([(b"traceparent", one), (b"traceparent", one)])["traceparent"]
