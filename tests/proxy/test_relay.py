"""What passes the proxy passes unchanged."""

from __future__ import annotations

import asyncio
import gzip
import threading
from contextlib import ExitStack

import pytest
from proxy_fakes import GUARD_HEADERS, WAIT_S, Call, Proxy

from kvguard.proxy.upstream import Limits, Upstream


async def ok(call: Call) -> None:
    await call.json(b'{"ok": true}')


def test_request_reaches_the_engine_as_it_was_written(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        answer = client.ask(
            "POST",
            "/v1/a%2Fb//c/%E2%82%AC/../d?x=%20&y=1+2&y=3&empty=",
            ("authorization: Bearer k", "x-thing: one", "x-thing: two", "cookie: a=b; c=d", "x-utf: é", "accept: */*"),
            b'{"prompt": "hi"}',
        )
    call = engine.next_call()
    assert answer.status == 200
    assert call.request_line == b"POST /v1/a%2Fb//c/%E2%82%AC/../d?x=%20&y=1+2&y=3&empty= HTTP/1.1"
    assert call.body == b'{"prompt": "hi"}'
    assert [pair for pair in call.headers if pair[0] != b"content-length"] == [
        (b"host", b"client.example"),
        (b"authorization", b"Bearer k"),
        (b"x-thing", b"one"),
        (b"x-thing", b"two"),
        (b"cookie", b"a=b; c=d"),
        (b"x-utf", "é".encode()),
        (b"accept", b"*/*"),
    ]
    assert call.values(b"content-length") == [b"16"]


def test_nothing_is_added_to_a_bare_request(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        client.ask("GET", "/v1/models")
    assert engine.next_call().headers == [(b"host", b"client.example")]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_every_method_passes(serve, method):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        assert client.ask(method, "/anything/new", body=b"x").body == b'{"ok": true}'
    call = engine.next_call()
    assert call.request_line.split()[0] == method.encode()
    assert call.body == b"x"


def test_chunked_upload_arrives_whole(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        client.send("POST", "/v1/audio/transcriptions", ("transfer-encoding: chunked",))
        client.socket.sendall(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert client.answer().status == 200
    call = engine.next_call()
    assert call.body == b"abcde"
    assert call.values(b"transfer-encoding") == []


def test_body_over_a_megabyte_arrives_whole(serve):
    proxy, engine = serve(ok)
    body = bytes(range(256)) * 12_000
    with proxy.client() as client:
        assert client.ask("POST", "/v1/embeddings", body=body).status == 200
    call = engine.next_call()
    assert call.body == body
    assert call.values(b"content-type") == []


def test_compressed_body_is_not_touched(serve):
    packed = gzip.compress(b'{"choices": []}')

    async def script(call: Call) -> None:
        await call.json(packed, b"content-encoding: gzip\r\n")

    proxy, engine = serve(script)
    with proxy.client() as client:
        answer = client.ask("GET", "/v1/models", ("accept-encoding: gzip",))
    assert answer.body == packed
    assert answer.values(b"content-encoding") == [b"gzip"]
    assert engine.next_call().values(b"accept-encoding") == [b"gzip"]


def test_response_headers_keep_duplicates_order_and_bytes(serve):
    async def script(call: Call) -> None:
        await call.json(b"{}", b"server: uvicorn\r\ndate: today\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nx-raw: \xe9\r\n")

    proxy, engine = serve(script)
    with proxy.client() as client:
        answer = client.ask("GET", "/v1/models")
        client.ask("GET", "/v1/models")
    assert answer.headers == [
        (b"content-type", b"application/json"),
        (b"content-length", b"2"),
        (b"server", b"uvicorn"),
        (b"date", b"today"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"x-raw", b"\xe9"),
        *GUARD_HEADERS,
    ]
    assert engine.calls[1].values(b"cookie") == [], "no cookie jar between clients"


def test_hop_by_hop_headers_are_stripped_both_ways(serve):
    async def script(call: Call) -> None:
        await call.json(b"{}", b"connection: x-secret, keep-alive\r\nx-secret: s\r\nkeep-alive: timeout=5\r\nx-kept: k\r\n")

    proxy, engine = serve(script)
    with proxy.client() as client:
        answer = client.ask(
            "POST",
            "/v1/completions",
            (
                "connection: x-private, keep-alive",
                "x-private: p",
                "keep-alive: 5",
                "te: trailers",
                "proxy-authorization: Basic x",
                "proxy-connection: keep-alive",
                "upgrade: h2c",
                "trailer: x",
                "expect: something",
                "x-kept: k",
            ),
            b"{}",
        )
    names = {name for name, _ in answer.headers}
    assert names.isdisjoint({b"connection", b"x-secret", b"keep-alive"})
    assert answer.values(b"x-kept") == [b"k"]
    assert {name for name, _ in engine.next_call().headers} == {b"host", b"content-length", b"x-kept"}


def test_expect_continue_is_answered_here(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", ("expect: 100-continue", "content-length: 2"))
        assert client.head()[0] == 100
        client.socket.sendall(b"{}")
        assert client.answer().status == 200
    call = engine.next_call()
    assert call.values(b"expect") == []
    assert call.body == b"{}"


def test_guard_headers_replace_what_the_engine_sends(serve):
    async def script(call: Call) -> None:
        await call.json(b"{}", b"x-kvguard-confidence: forged\r\nX-KVGuard-Record: forged\r\n")

    proxy, _ = serve(script)
    with proxy.client() as client:
        answer = client.ask("GET", "/v1/models")
    assert [pair for pair in answer.headers if pair[0].lower().startswith(b"x-kvguard")] == list(GUARD_HEADERS)


def test_chunks_are_not_merged_and_events_may_be_split(serve):
    parts = [b"data: {", b'"a": 1}\n', b"\ndata: 2\n\ndata: 3\n\n", b"data: [DONE]\n\n"]

    async def script(call: Call) -> None:
        await call.start_stream()
        for part in parts:
            await call.chunk(part)
        await call.send(b"0\r\n\r\n")

    proxy, _ = serve(script)
    with proxy.client() as client:
        answer = client.ask("POST", "/v1/chat/completions", body=b"{}")
        again = client.ask("POST", "/v1/chat/completions", body=b"{}")
    assert answer.chunks == parts
    assert answer.complete
    assert again.chunks == parts
    assert answer.values(b"x-accel-buffering") == [b"no"]
    for _ in range(2):
        assert proxy.observer.next_end() == ("/v1/chat/completions", "POST", 200, "ok")
    assert len(proxy.observer.first_bytes) == 2


def test_hundreds_of_chunks_in_one_packet_stay_apart(serve):
    parts = [b"data: %d\n\n" % number for number in range(500)]

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.send(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")

    proxy, _ = serve(script)
    with proxy.client() as client:
        assert client.ask("POST", "/v1/completions", body=b"{}").chunks == parts


def test_each_chunk_leaves_before_the_next_is_written(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        for number in range(3):
            await call.chunk(b"data: %d\n\n" % number)
            await call.reader.readexactly(1)
        await call.send(b"0\r\n\r\n")

    proxy, engine = serve(script)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        client.head()
        for number in range(3):
            assert client.read_chunk() == b"data: %d\n\n" % number
            # The script goes on only after the client has the chunk.
            engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
        assert client.read_chunk() == b""


def test_slow_reader_holds_the_engine_back(serve):
    chunk = bytes(65536)
    total = 800
    sent: list[int] = []

    async def script(call: Call) -> None:
        await call.start_stream(b"application/octet-stream")
        for number in range(total):
            await call.chunk(chunk)
            sent.append(number)
        await call.send(b"0\r\n\r\n")

    proxy, _ = serve(script)
    with proxy.client() as client:
        client.send("GET", "/big")
        client.head()
        assert len(client.read_chunk() or b"") == 65536
        assert len(sent) < total, "50 MB were buffered for a client that reads nothing"
        size = 0
        while data := client.read_chunk():
            size += len(data)
    assert size == (total - 1) * 65536
    assert len(sent) == total


@pytest.mark.parametrize(
    ("method", "status", "extra"),
    [
        ("HEAD", b"200 OK", b"content-length: 123\r\n"),
        ("GET", b"204 No Content", b""),
        ("GET", b"304 Not Modified", b'etag: "x"\r\ncontent-length: 5\r\n'),
    ],
)
def test_responses_without_a_body(serve, method, status, extra):
    async def script(call: Call) -> None:
        if call.request_line.startswith(b"GET /after"):
            await call.json(b"{}")
        else:
            await call.send(b"HTTP/1.1 " + status + b"\r\n" + extra + b"\r\n")

    proxy, _ = serve(script)
    with proxy.client() as client:
        answer = client.ask(method, "/v1/models")
        assert answer.status == int(status[:3])
        assert answer.values(b"content-length") == ([b"123"] if method == "HEAD" else [])
        assert client.ask("GET", "/after").body == b"{}", "the connection goes on"


def test_redirects_are_the_clients_to_follow(serve):
    async def script(call: Call) -> None:
        location = b"location: http://%s/v1/models\r\n" % call.values(b"host")[0]
        await call.json(b"", location, b"307 Temporary Redirect")

    proxy, engine = serve(script)
    with proxy.client() as client:
        answer = client.ask("GET", "/v1/models/")
    assert answer.status == 307
    assert answer.values(b"location") == [b"http://client.example/v1/models"]
    assert len(engine.calls) == 1


def test_engine_errors_pass_unchanged(serve):
    async def script(call: Call) -> None:
        await call.json(b'{"error": {"code": 401}}', b"www-authenticate: Bearer\r\n", b"401 Unauthorized")

    proxy, _ = serve(script)
    with proxy.client() as client:
        answer = client.ask("GET", "/v1/models")
    assert (answer.status, answer.body) == (401, b'{"error": {"code": 401}}')
    assert proxy.observer.next_end() == ("/v1/models", "GET", 401, "ok")


def test_environment_proxies_are_ignored(serve, monkeypatch):
    """Over TCP, where a proxy would be asked; here nobody listens on its port."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    behind, engine = serve(ok)
    host, port = behind.address
    with Proxy(Upstream(None, f"http://{host}:{port}")) as front, front.client() as client:
        assert client.ask("GET", "/v1/models").status == 200
    assert engine.next_call().request_line == b"GET /v1/models HTTP/1.1"


def test_nothing_that_one_client_was_given_goes_with_anothers_request(serve):
    async def script(call: Call) -> None:
        await call.json(b"{}", b"set-cookie: session=one; Path=/\r\nwww-authenticate: Basic\r\n")

    proxy, engine = serve(script)
    for own in (("cookie: session=mine",), ()):
        with proxy.client() as client:
            assert client.ask("GET", "/v1/models", own).values(b"set-cookie") == [b"session=one; Path=/"]
    assert engine.connections == 1, "the engine's connection is shared, and nothing else"
    assert [call.values(b"cookie") for call in engine.calls] == [[b"session=mine"], []]


def test_header_bytes_pass_whatever_their_encoding(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        client.socket.sendall(b"GET /v1/models HTTP/1.1\r\nhost: h\r\nx-raw: \xff\xfe\r\n\r\n")
        assert client.answer().status == 200
    assert engine.next_call().values(b"x-raw") == [b"\xff\xfe"]


def test_request_ids_and_trace_context_pass_and_come_back(serve):
    async def script(call: Call) -> None:
        own = b"x-request-id: engine-1\r\n" if call.request_line.startswith(b"GET /own") else b""
        await call.json(b"{}", own)

    proxy, engine = serve(script)
    trace = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with proxy.client() as client:
        answer = client.ask("GET", "/v1/models", ("x-request-id: mine", trace, "tracestate: a=1,b=2"))
        assert answer.values(b"x-request-id") == [b"mine"]
        assert client.ask("GET", "/own", ("x-request-id: mine",)).values(b"x-request-id") == [b"engine-1"]
        assert client.ask("GET", "/v1/models").values(b"x-request-id") == []
        assert client.ask("GET", "/_kvguard", ("x-request-id: mine",)).values(b"x-request-id") == [b"mine"]
    call = engine.calls[0]
    assert call.values(b"x-request-id") == [b"mine"]
    assert call.values(b"traceparent") == [trace.split(": ")[1].encode()]
    assert call.values(b"tracestate") == [b"a=1,b=2"]


def test_interim_responses_are_not_the_answer(serve):
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        await call.json(b"{}")

    proxy, _ = serve(script)
    with proxy.client() as client:
        for _ in range(2):
            answer = client.ask("GET", "/v1/models")
            assert (answer.status, answer.body, answer.values(b"link")) == (200, b"{}", [])


def test_body_without_a_length_ends_with_its_connection(serve):
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\n" + b"x" * 5000)
        call.writer.close()

    proxy, engine = serve(script)
    with proxy.client() as client:
        for _ in range(2):
            answer = client.ask("GET", "/v1/models")
            assert (answer.status, answer.body, answer.complete) == (200, b"x" * 5000, True)
    assert engine.connections == 2


def test_trailers_and_chunk_extensions_end_here(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        for part in (b"3;a=b\r\nabc\r\n", b"003\r\ndef\r\n", b"0\r\nx-trailer: 1\r\n\r\n"):
            await call.send(part)

    proxy, _ = serve(script)
    with proxy.client() as client:
        for _ in range(2):
            client.send("POST", "/v1/completions", body=b"{}")
            status, headers = client.head()
            raw = b""
            while not raw.endswith(b"0\r\n\r\n"):
                raw += client._file.read(1)
            assert status == 200
            assert b"a=b" not in raw
            assert b"x-trailer" not in raw
            assert b"x-trailer" not in dict(headers)
            assert raw.replace(b"003", b"3") == b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n"


def test_chunks_cut_anywhere_arrive_whole(serve):
    """However the engine's bytes are cut into packets, in size lines and between chunks too, the content is the same."""
    parts = [b"data: %d\r\n" % number for number in range(30)]  # ends of lines that look like the framing's
    wire = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    steps = iter([1, 2, 3, 5, 7, 11, 13, 15, 16, 17, 4, 6])

    async def script(call: Call) -> None:
        await call.start_stream()
        step = next(steps)
        for start in range(0, len(wire), step):
            await call.send(wire[start : start + step])
            await asyncio.sleep(0)
        del call

    proxy, _ = serve(script)
    with proxy.client() as client:
        for _ in range(12):
            answer = client.ask("POST", "/v1/completions", body=b"{}")
            assert answer.complete
            assert answer.body == b"".join(parts)


def test_content_that_looks_like_a_chunk_is_content(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"first")
        for piece in (b"10\r\ndata: ", b"5\r\nhello\r\n", b"\r\n0\r\n\r\n"):
            await call.reader.readexactly(1)
            await call.send(piece)

    proxy, engine = serve(script)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        client.head()
        for expected in (b"first", b"data: ", b"5\r\nhello\r\n", b""):
            assert client.read_chunk() == expected
            engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")


def test_a_second_answer_to_one_request_is_nobodys(serve):
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad")

    proxy, engine = serve(script)
    with proxy.client() as client:
        for _ in range(3):
            assert client.ask("GET", "/v1/models").body == b"{}"
    assert engine.connections == 3, "such a connection is not used again"


def test_idle_connections_are_closed_before_the_engine_closes_them(serve):
    proxy, engine = serve(ok, Limits(pool_idle_s=0.05))
    with proxy.client() as client:
        assert client.ask("GET", "/v1/models").status == 200
        assert engine.next_call().closed.wait(WAIT_S), "nobody asks, and it is closed"
        assert client.ask("POST", "/v1/completions", body=b"{}").status == 200
    assert engine.connections == 2


def test_no_limit_of_a_hundred_connections(serve):
    async def script(call: Call) -> None:
        await call.reader.readexactly(1)
        await call.json(b"{}")

    proxy, engine = serve(script)
    with ExitStack() as stack:
        clients = [stack.enter_context(proxy.client()) for _ in range(150)]
        for client in clients:
            client.send("POST", "/v1/completions", body=b"{}")
            engine.next_call()
        assert engine.connections == 150
        for call in engine.calls:
            engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
        assert {client.answer().status for client in clients} == {200}


def test_pooled_connections_are_reused_and_closed_ones_are_not(serve):
    closing = False
    closed = threading.Semaphore(0)

    async def script(call: Call) -> None:
        close_after = closing
        await call.json(b"{}")
        if close_after:
            call.writer.close()
            await call.writer.wait_closed()
            closed.release()

    proxy, engine = serve(script)
    with proxy.client() as client:
        for _ in range(3):
            assert client.ask("POST", "/v1/completions", body=b"{}").status == 200
        assert engine.connections == 1
        closing = True
        for _ in range(5):
            assert client.ask("POST", "/v1/completions", body=b"{}").status == 200
            assert closed.acquire(timeout=WAIT_S)
    assert engine.connections == 5, "the first closes after its answer, and each later request needs a new one"
