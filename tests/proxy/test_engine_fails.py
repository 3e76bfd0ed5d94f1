"""What the client gets when the engine dies, stalls or never was there."""

from __future__ import annotations

import asyncio
import json
import threading
import time

from proxy_fakes import GUARD_HEADERS, OPEN, WAIT_S, Answer, Call, FakeEngine, Proxy, Recorder

from kvguard.guard.gate import Gate
from kvguard.proxy.forward import Forwarder
from kvguard.proxy.upstream import Limits, Upstream


def error_of(answer: Answer) -> dict[str, object]:
    assert answer.values(b"content-type") == [b"application/json"]
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status
    return error


def test_nothing_listens(short_dir):
    with Proxy(Upstream(str(short_dir / "absent"))) as proxy:
        with proxy.client() as client:
            answer = client.ask("POST", "/v1/completions", body=b"{}")
        assert answer.status == 502
        assert "cannot connect" in str(error_of(answer)["message"])
        assert str(short_dir) not in answer.body.decode()
        assert answer.values(b"retry-after") == [b"5"]
        assert [pair for pair in answer.headers if pair in GUARD_HEADERS] == list(GUARD_HEADERS)
        assert proxy.observer.next_end() == ("/v1/completions", "POST", 502, "upstream_error")


def test_dies_before_headers(serve):
    async def script(call: Call) -> None:
        call.abort()

    proxy, engine = serve(script)
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/completions", body=b"{}")
        assert answer.status == 502
        assert error_of(answer)["type"] == "upstream_error"
        assert answer.values(b"retry-after") == [b"5"]
    assert len(engine.calls) == 1, "a POST that may have been processed is not sent twice"
    assert proxy.observer.next_end() == ("/v1/completions", "POST", 502, "upstream_error")


def test_speaks_no_http(serve):
    async def script(call: Call) -> None:
        await call.send(b"hello\r\n\r\n")

    proxy, _ = serve(script)
    with proxy.client() as client:
        assert error_of(client.ask("POST", "/v1/completions", body=b"{}"))["code"] == 502


def stale(call: Call, seen: set[int]) -> bool:
    """Whether this is not the first request of its connection."""
    known = id(call.writer) in seen
    seen.add(id(call.writer))
    return known


def test_stale_pooled_connection_is_retried_when_that_is_safe(serve):
    seen: set[int] = set()

    async def script(call: Call) -> None:
        if stale(call, seen):
            call.abort()
        else:
            await call.json(b"{}")

    proxy, engine = serve(script)
    with proxy.client() as client:
        assert client.ask("GET", "/v1/models").status == 200
        assert client.ask("GET", "/v1/models").status == 200, "closed without a byte: sent again"
        assert len(engine.calls) == 3
        assert client.ask("POST", "/v1/completions", body=b"{}").status == 502, "could have been processed"
        assert len(engine.calls) == 4


def dying(parts: list[bytes], content_type: bytes = b"text/event-stream", extra: bytes = b""):
    async def script(call: Call) -> None:
        await call.start_stream(content_type, extra)
        for part in parts:
            await call.chunk(part)
        call.writer.close()

    return script


def test_event_stream_that_dies_ends_with_an_error_event(serve):
    proxy, _ = serve(dying([b"data: 1\n\n", b"data: 2\n\n"]))
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/chat/completions", body=b"{}")
    assert answer.complete
    assert answer.chunks[:2] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert len(answer.chunks) == 3
    assert answer.chunks[2].startswith(b"data: ")
    assert answer.chunks[2].endswith(b"\n\n")
    error = json.loads(answer.chunks[2].removeprefix(b"data: "))["error"]
    assert error["code"] == 502
    assert "middle of the response" in error["message"]
    assert b"[DONE]" not in answer.body
    assert proxy.observer.next_end() == ("/v1/chat/completions", "POST", 200, "upstream_error")


def test_error_event_does_not_join_a_cut_event(serve):
    proxy, _ = serve(dying([b'data: {"cut']))
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/chat/completions", body=b"{}")
    events = answer.body.split(b"\n\n")
    assert events[0] == b'data: {"cut'
    assert "error" in json.loads(events[1].removeprefix(b"data: "))


def test_error_event_does_not_join_an_event_cut_later(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"data: 1\n\n")
        await call.reader.readexactly(1)
        await call.chunk(b'data: {"cut')
        await call.reader.readexactly(1)
        call.writer.close()

    proxy, engine = serve(script)
    with proxy.client() as client:
        client.send("POST", "/v1/chat/completions", body=b"{}")
        call = engine.next_call()
        client.head()
        for expected in (b"data: 1\n\n", b'data: {"cut'):
            assert client.read_chunk() == expected
            engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
        assert (client.read_chunk() or b"").startswith(b'\n\ndata: {"error"')


def test_everything_that_came_before_the_death_is_delivered(serve):
    parts = [b"data: %d\n\n" % number for number in range(200)]

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.send(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts))
        call.writer.close()

    proxy, _ = serve(script)
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/completions", body=b"{}")
    assert answer.chunks[:-1] == parts
    assert b'"error"' in answer.chunks[-1]


def test_death_while_the_client_reads_slowly_loses_nothing(short_dir):
    """The engine is gone before the proxy has read what it had sent."""
    parts = [b"data: %d\n\n" % number for number in range(50)]
    closed = threading.Event()

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.send(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts))
        call.writer.close()
        await call.writer.wait_closed()
        closed.set()

    sent: list[bytes] = []
    to_app: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def slow_send(message) -> None:
        if message["type"] == "http.response.start":
            await asyncio.to_thread(closed.wait, WAIT_S)
            for _ in range(20):
                await asyncio.sleep(0)  # the loop sees the end of the engine's connection
        elif message["type"] == "http.response.body":
            sent.append(message["body"])

    async def exchange(uds: str) -> None:
        gate = Gate()
        gate.snapshot = OPEN
        forwarder = Forwarder(gate, Upstream(uds), Recorder())
        lifespan = asyncio.create_task(forwarder({"type": "lifespan"}, to_app.get, slow_send))
        await to_app.put({"type": "lifespan.startup"})
        await asyncio.sleep(0)
        requests: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        await requests.put({"type": "http.request", "body": b"{}", "more_body": False})
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-length", b"2")],
        }
        await forwarder(scope, requests.get, slow_send)
        await to_app.put({"type": "lifespan.shutdown"})
        await lifespan

    with FakeEngine(script, short_dir / "e") as engine:
        asyncio.run(exchange(str(engine.uds)))
    assert sent[: len(parts)] == parts
    assert b'"error"' in sent[len(parts)]
    assert sent[len(parts) + 1 :] == [b""]


def test_json_that_dies_is_cut_off(serve):
    async def script(call: Call) -> None:
        await call.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"a":')
        call.writer.close()

    proxy, _ = serve(script)
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/completions", body=b"{}")
        assert not answer.complete
        assert answer.body == b'{"a":'
        assert client.at_end()
    assert proxy.observer.next_end() == ("/v1/completions", "POST", 200, "upstream_error")


def test_chunked_json_that_dies_is_cut_off(serve):
    proxy, _ = serve(dying([b'{"a":'], b"application/json"))
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/completions", body=b"{}")
    assert (answer.chunks, answer.complete) == ([b'{"a":'], False)


def test_compressed_event_stream_that_dies_is_cut_off(serve):
    proxy, _ = serve(dying([b"\x1f\x8b"], extra=b"content-encoding: gzip\r\n"))
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/completions", body=b"{}")
    assert (answer.body, answer.complete) == (b"\x1f\x8b", False)


def test_engine_that_sends_its_own_error_and_done_passes_unchanged(serve):
    parts = [b'data: {"error": {"code": 500}}\n\n', b"data: [DONE]\n\n"]

    async def script(call: Call) -> None:
        await call.start_stream()
        for part in parts:
            await call.chunk(part)
        await call.send(b"0\r\n\r\n")
        call.writer.close()

    proxy, _ = serve(script)
    with proxy.client() as client:
        assert client.ask("POST", "/v1/completions", body=b"{}").chunks == parts


def test_silence_before_the_first_byte_is_a_504(serve):
    async def script(call: Call) -> None:
        await call.wait_closed()

    proxy, engine = serve(script, Limits(first_byte_s=0.05))
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/completions", body=b"{}")
    assert answer.status == 504
    assert error_of(answer)["type"] == "upstream_timeout"
    assert engine.next_call().closed.wait(60)


def test_silence_inside_a_stream_ends_it_with_an_error_event(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"data: 1\n\n")
        await call.wait_closed()

    proxy, engine = serve(script, Limits(between_chunks_s=0.05))
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/completions", body=b"{}")
    assert json.loads(answer.chunks[-1].removeprefix(b"data: "))["error"]["code"] == 504
    assert answer.complete
    assert engine.next_call().closed.wait(60)
    assert proxy.observer.next_end() == ("/v1/completions", "POST", 200, "upstream_error")


def test_slow_but_steady_stream_outlives_the_silence_limit(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        for number in range(8):
            await call.chunk(b"data: %d\n\n" % number)
            await call.reader.readexactly(1)
        await call.send(b"0\r\n\r\n")

    limit = 0.3
    proxy, engine = serve(script, Limits(first_byte_s=5.0, between_chunks_s=limit))
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        client.head()
        started = time.monotonic()
        for number in range(8):
            assert client.read_chunk() == b"data: %d\n\n" % number
            call.closed.wait(limit / 4)
            engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
        assert client.read_chunk() == b""
        assert time.monotonic() - started > limit


def test_malformed_chunk_inside_a_stream_is_an_engine_failure(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"data: 1\n\n")
        await call.reader.readexactly(1)
        await call.send(b"not-a-size\r\n")
        await call.wait_closed()

    proxy, engine = serve(script)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        client.head()
        assert client.read_chunk() == b"data: 1\n\n"
        engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
        assert b'"error"' in (client.read_chunk() or b"")
        assert client.read_chunk() == b""
    assert proxy.observer.next_end() == ("/v1/completions", "POST", 200, "upstream_error")
