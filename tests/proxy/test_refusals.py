"""What kvguard answers itself: the closed gate, the private path, bodies that are too large or too slow."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest
from proxy_fakes import GUARD_HEADERS, WAIT_S, Call

from kvguard.guard.gate import UNKNOWN_HEADERS, Snapshot
from kvguard.guard.state import State
from kvguard.proxy.upstream import Limits

CLOSED = Snapshot(State.VERIFYING, False, "the engine is being verified", 7, UNKNOWN_HEADERS)


async def ok(call: Call) -> None:
    await call.json(b"{}")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/"),
        ("POST", "/metrics"),
        ("GET", "/metrics/x"),
        ("GET", "/ping"),
    ],
)
def test_closed_gate_answers_503(serve, method, path):
    proxy, engine = serve(ok)
    proxy.gate.snapshot = CLOSED
    with proxy.client() as client:
        answer = client.ask(method, path, body=b"{}" if method == "POST" else b"")
        assert answer.status == 503
        assert json.loads(answer.body) == {
            "error": {
                "message": "the engine is being verified",
                "type": "service_unavailable",
                "param": None,
                "code": 503,
            }
        }
        assert answer.values(b"retry-after") == [b"7"]
        assert [pair for pair in answer.headers if pair[0].startswith(b"x-kvguard")] == list(UNKNOWN_HEADERS)
        assert len(answer.values(b"date")) == 1
        assert proxy.observer.next_end()[1:] == (method, 503, "refused")
        proxy.gate.snapshot = Snapshot(State.SERVING, True, "", 0, GUARD_HEADERS)
        assert client.ask("GET", "/health").status == 200, "the gate is read for each request"
    assert len(engine.calls) == 1


def test_metrics_pass_a_closed_gate(serve):
    async def script(call: Call) -> None:
        await call.json(b"vllm:num_requests_running 0")

    proxy, _ = serve(script)
    proxy.gate.snapshot = CLOSED
    with proxy.client() as client:
        answer = client.ask("GET", "/metrics")
    assert (answer.status, answer.body) == (200, b"vllm:num_requests_running 0")
    assert [pair for pair in answer.headers if pair[0].startswith(b"x-kvguard")] == list(UNKNOWN_HEADERS)


def test_metrics_of_an_engine_that_does_not_answer_yet_are_503(serve):
    async def script(call: Call) -> None:
        call.abort()

    proxy, _ = serve(script)
    proxy.gate.snapshot = CLOSED
    with proxy.client() as client:
        answer = client.ask("GET", "/metrics")
    assert answer.status == 503
    assert json.loads(answer.body)["error"]["message"] == CLOSED.reason


@pytest.mark.parametrize(
    "path",
    [
        "/_kvguard",
        "/_kvguard/read",
        "/_kvguard-x",
        "/_KVGuard/read",
        "/%5fkvguard/read",
        "/%255Fkvguard/read",
        "/_kv%67uard/read",
        "//_kvguard/read",
        "/./_kvguard/read",
        "/v1/../_kvguard/read",
        "/v1/%2e%2e/_kvguard",
        "/v1%2F..%2F_kvguard",
        "/anything/_kvguard/read",
        "/_kvguard/../v1/models",
        "/%5C_kvguard",
        "/_kvguard?x=1",
    ],
)
def test_private_path_does_not_exist(serve, path):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        for method in ("GET", "POST"):
            answer = client.ask(method, path)
            assert answer.status == 404
            assert json.loads(answer.body)["error"]["code"] == 404
    assert engine.calls == []


def test_paths_that_only_resemble_the_private_one_pass(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        for path in ("/kvguard", "/x_kvguard", "/v1/models?p=/_kvguard/read", "/100%25"):
            assert client.ask("GET", path).status == 200
    assert len(engine.calls) == 4


def test_declared_size_over_the_limit_is_413_before_the_body(serve):
    proxy, engine = serve(ok, Limits(body_bytes=1000))
    with proxy.client() as client:
        client.send("POST", "/v1/completions", (f"content-length: {200 * 2**20}",))
        answer = client.answer()
        assert answer.status == 413
        assert "1000 bytes" in json.loads(answer.body)["error"]["message"]
        assert answer.values(b"connection") == [b"close"]
    assert engine.calls == []
    assert proxy.observer.next_end() == ("/v1/completions", "POST", 413, "refused")


def test_client_that_sends_before_it_reads_still_sees_the_413(serve):
    proxy, _ = serve(ok, Limits(body_bytes=1000))
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=bytes(5 * 2**20))
        assert client.answer().status == 413


def test_undeclared_size_over_the_limit_is_413_on_the_way(serve):
    proxy, engine = serve(ok, Limits(body_bytes=1000))
    with proxy.client() as client:
        client.send("POST", "/v1/completions", ("transfer-encoding: chunked",))
        client.socket.sendall(b"3e8\r\n" + bytes(1000) + b"\r\n1\r\nx\r\n")
        assert client.answer().status == 413, "no end of the body was sent"
    assert engine.calls == []


def test_body_of_exactly_the_limit_passes(serve):
    proxy, engine = serve(ok, Limits(body_bytes=1000))
    with proxy.client() as client:
        assert client.ask("POST", "/v1/completions", body=bytes(1000)).status == 200
    assert len(engine.next_call().body) == 1000


def test_slow_sender_times_out(serve):
    proxy, engine = serve(ok, Limits(body_silence_s=0.05))
    with proxy.client() as client:
        client.send("POST", "/v1/completions", ("content-length: 10",))
        assert client.answer().status == 408
    assert engine.calls == []


def test_head_over_the_limit_is_431(serve):
    proxy, engine = serve(ok, Limits(head_bytes=2000))
    for pieces in (1, 40):
        with proxy.client() as client:
            wire = b"GET /v1/models HTTP/1.1\r\nhost: h\r\nx-long: " + bytes(3000).replace(b"\0", b"a") + b"\r\n\r\n"
            step = len(wire) // pieces
            with suppress(ConnectionError):
                for start in range(0, len(wire), step):
                    client.socket.sendall(wire[start : start + step])
            answer = client.answer()
            assert answer.status == 431
            assert "2000 bytes" in json.loads(answer.body)["error"]["message"]
            assert client.at_end()
    assert engine.calls == []


def test_head_that_never_ends_is_431_before_its_end(serve):
    proxy, engine = serve(ok, Limits(head_bytes=2000))
    with proxy.client() as client:
        client.socket.sendall(b"GET /v1/models HTTP/1.1\r\nhost: h\r\n" + b"x-more: 1234567890\r\n" * 200)
        assert client.answer().status == 431
    assert engine.calls == []


def test_head_under_the_limit_passes_with_a_large_body(serve):
    proxy, engine = serve(ok, Limits(head_bytes=2000))
    with proxy.client() as client:
        for _ in range(2):
            assert client.ask("POST", "/v1/completions", ("x-long: " + "a" * 1500,), bytes(100_000)).status == 200
    assert len(engine.calls) == 2


def test_client_that_sends_nothing_is_closed(serve):
    proxy, engine = serve(ok, Limits(head_s=0.05))
    with proxy.client() as client:
        assert client.at_end()
    assert engine.calls == []


@pytest.mark.parametrize("before", [0, 1])
def test_head_that_stops_halfway_is_408(serve, before):
    """On a first request and on a later one, whose limit begins anew."""
    proxy, _ = serve(ok, Limits(head_s=0.2))

    def stops_halfway() -> bool:
        """False where the machine stood still for the limit's time before half of a head was there."""
        with proxy.client() as client:
            try:
                for _ in range(before):
                    assert client.ask("GET", "/v1/models").status in (200, 408)
                client.socket.sendall(b"GET /v1/models HTTP/1.1\r\nhost")
                answer = client.answer()
            except (ConnectionError, IndexError):
                return False
            assert answer.status == 408
            return client.at_end()

    assert any(stops_halfway() for _ in range(20))


def test_garbage_is_400_and_the_end(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        client.socket.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = client.answer()
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["code"] == 400
        assert client.at_end()
    assert engine.calls == []


def test_garbage_behind_a_request_does_not_break_into_its_answer(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"data: 1\n\n")
        await call.wait_closed()

    proxy, engine = serve(script)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        client.head()
        assert client.read_chunk() == b"data: 1\n\n"
        client.socket.sendall(b"\x00garbage\r\n\r\n")
        assert client.at_end(), "nothing but the end of the connection"
        assert call.closed.wait(WAIT_S)


def test_other_scopes_are_not_served(serve):
    proxy, _ = serve(ok)

    async def never(*_: object) -> dict[str, object]:
        raise AssertionError

    with pytest.raises(RuntimeError, match="websocket"):
        asyncio.run(proxy.forwarder({"type": "websocket", "path": "/v1/realtime"}, never, never))
