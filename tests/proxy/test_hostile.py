"""Requests that try to be taken for something else, and clients that bend the rules of HTTP: the engine sees none of it."""

from __future__ import annotations

import json
import resource
import socket
from contextlib import ExitStack

import pytest
from proxy_fakes import WAIT_S, Call, RawClient

from kvguard.proxy.upstream import Limits

POST = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"


async def ok(call: Call) -> None:
    await call.json(b"{}")


async def hangs(call: Call) -> None:
    await call.wait_closed()


def raw(client: RawClient, data: bytes) -> None:
    client.socket.sendall(data)


@pytest.mark.parametrize(
    "wire",
    [
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        POST + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"content-length: 2, 2\r\n\r\n{}",
        POST + b"content-length: +2\r\n\r\n{}",
        POST + b"content-length: -2\r\n\r\n{}",
        POST + b"content-length: 0x2\r\n\r\n{}",
        POST + b"content-length: 99999999999999999999\r\n\r\n{}",
        POST + b"content-length : 2\r\n\r\n{}",
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n",
        CHUNKED + b"\r\n0\r\ncontent-length: 7\r\n\r\n",
        CHUNKED + b"content-length: 40\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: h\r\n\r\n",
        POST + b"transfer-encoding: identity\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        POST + b"host: other\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"x: 1\r\n folded: 2\r\n\r\n",
        POST + b"x: a\0b\r\n\r\n",
        POST + b"x y: 1\r\n\r\n",
        POST + b"x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\nhost: h\n\n",
        b"GET /v1/models HTTP/1.2\r\nhost: h\r\n\r\n",
        b"GET /v1/models HTTP/9\r\nhost: h\r\n\r\n",
        b"GET /v1/mo dels HTTP/1.1\r\nhost: h\r\n\r\n",
        b"GET /v1/\xc3\xa9 HTTP/1.1\r\nhost: h\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nhost: h\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_two_parsers_could_read_in_two_ways_is_400_and_the_end(serve, wire):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        raw(client, wire)
        answer = client.answer()
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["code"] == 400
        assert client.at_end()
    assert engine.calls == []


@pytest.mark.parametrize(
    "chunks", [b"zz\r\nab\r\n0\r\n\r\n", b"2\r\nabc\r\n0\r\n\r\n", b"-2\r\nab\r\n", b"fffffffffffffffff\r\n", b"2\nab\n0\n\n"]
)
def test_a_body_in_bad_chunks_is_400_and_the_end(serve, chunks):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        raw(client, CHUNKED + b"\r\n")
        raw(client, chunks)
        assert client.answer().status == 400
        assert client.at_end()
    assert engine.calls == []
    assert proxy.observer.next_end()[3] == "client_disconnected"


def test_bad_chunks_behind_a_running_request_end_both_without_an_answer(serve):
    proxy, engine = serve(hangs)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        raw(client, CHUNKED + b"\r\nzz\r\n")
        assert client.at_end()
    assert call.closed.wait(WAIT_S)
    assert proxy.observer.next_end()[3] == "client_disconnected"


def test_trailers_are_no_headers(serve):
    proxy, engine = serve(ok)
    trailers = b"authorization: Bearer stolen\r\nhost: evil\r\nconnection: x-kept\r\nx-request-id: t\r\n"
    with proxy.client() as client:
        for _ in range(2):
            raw(client, CHUNKED + b"x-kept: 1\r\ntrailer: authorization\r\n\r\n2\r\n{}\r\n0\r\n" + trailers + b"\r\n")
            answer = client.answer()
            assert answer.status == 200
            assert answer.values(b"x-request-id") == []
    for call in engine.calls:
        assert call.body == b"{}"
        assert call.headers == [(b"host", b"h"), (b"x-kept", b"1"), (b"content-length", b"2")]


def test_connect_is_not_answered(serve, caplog):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        raw(client, b"CONNECT db.internal:5432 HTTP/1.1\r\nhost: db.internal:5432\r\n\r\n")
        answer = client.answer()
        assert answer.status == 501
        assert "forward proxy" in json.loads(answer.body)["error"]["message"]
        assert client.at_end()
    assert engine.calls == []
    assert caplog.records == []


def test_a_whole_url_as_target_leads_to_the_engine_and_nowhere_else(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        assert client.ask("GET", "http://metadata.internal/v1/models?a=1").status == 200
        assert client.ask("GET", "http://metadata.internal/_kvguard/read").status == 404
    [call] = engine.calls
    assert call.request_line == b"GET /v1/models?a=1 HTTP/1.1"
    assert call.values(b"host") == [b"client.example"]


def test_methods_that_the_engine_may_refuse_are_the_engines(serve):
    async def refuses(call: Call) -> None:
        await call.json(b"{}", status=b"405 Method Not Allowed")

    proxy, engine = serve(refuses)
    with proxy.client() as client:
        for method in ("TRACE", "PROPFIND", "PURGE"):
            assert client.ask(method, "/v1/models").status == 405
    assert [call.request_line.split()[0] for call in engine.calls] == [b"TRACE", b"PROPFIND", b"PURGE"]


def test_a_websocket_is_asked_for_by_get_alone(serve):
    proxy, engine = serve(ok)
    offer = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: eA==")
    with proxy.client() as client:
        assert client.ask("POST", "/v1/completions", offer, b'{"prompt": "kept"}').status == 200
    call = engine.next_call()
    assert call.body == b'{"prompt": "kept"}'
    assert call.values(b"upgrade") == call.values(b"connection") == []


def test_an_old_client_is_answered_and_closed(serve):
    proxy, engine = serve(ok)
    with proxy.client() as client:
        raw(client, b"POST /v1/completions HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\n{}")
        answer = client.answer()
        assert (answer.status, answer.body) == (200, b"{}")
        assert answer.values(b"connection") == [b"close"]
        assert client.at_end()
    assert engine.next_call().request_line == b"POST /v1/completions HTTP/1.1"


@pytest.mark.parametrize("waiting", [1, 5])
def test_a_client_that_leaves_with_requests_behind_ends_the_one_that_runs(serve, waiting):
    proxy, engine = serve(hangs)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        for _ in range(waiting):
            client.send("POST", "/v1/completions", body=b"{}")
        client.socket.shutdown(socket.SHUT_WR)
        assert call.closed.wait(WAIT_S), "the engine works on for nobody"
    assert proxy.observer.next_end() == ("/v1/completions", "POST", 499, "client_disconnected")
    assert len(engine.calls) == 1


def test_many_requests_at_once_are_answered_in_their_order(serve):
    async def echo(call: Call) -> None:
        await call.json(call.body)

    proxy, engine = serve(echo)
    with proxy.client() as client:
        for number in range(100):
            client.send("POST", "/v1/completions", body=b"%d" % number)
        assert [client.answer().body for _ in range(100)] == [b"%d" % number for number in range(100)]
    assert len(engine.calls) == 100


def test_a_thousand_connections_that_say_little_hold_up_nobody(serve):
    """Each stops in the middle of its head; what one more asks is answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        proxy, engine = serve(ok, Limits(head_s=600.0))
        with ExitStack() as stack:
            for _ in range(1000):
                raw(stack.enter_context(proxy.client()), b"GET /v1/models HTTP/1.1\r\nhos")
            with proxy.client() as one:
                assert one.ask("GET", "/v1/models").status == 200
        assert len(engine.calls) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
