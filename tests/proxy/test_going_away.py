"""A client that leaves ends the engine's work in every phase, and nothing is left behind."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
from proxy_fakes import WAIT_S, Call, Proxy, eventually, syn_sent

from kvguard.proxy.upstream import Upstream

PROMPTLY_S = 0.1

LEFT = "client_disconnected"


async def never_answers(call: Call) -> None:
    await call.wait_closed()


async def streams_for_ever(call: Call) -> None:
    await call.start_stream()
    await call.chunk(b"data: 1\n\n")
    await call.wait_closed()


async def stalls_in_json(call: Call) -> None:
    await call.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"a":')
    await call.wait_closed()


def hang_up_and_time(client, call: Call) -> float:
    left_at = client.close()
    assert call.closed.wait(WAIT_S), "the engine's connection stayed open"
    return call.closed_at - left_at


def promptly(attempt: Callable[[], float]) -> bool:
    """Whether one of five hang-ups reached the engine in time: a shared machine pauses now and then, kvguard never may."""
    return any(attempt() < PROMPTLY_S for _ in range(5))


def test_while_waiting_for_headers(serve):
    proxy, engine = serve(never_answers)

    def attempt() -> float:
        with proxy.client() as client:
            client.send("POST", "/v1/completions", body=b'{"stream": false}')
            took = hang_up_and_time(client, engine.next_call())
        assert proxy.observer.next_end() == ("/v1/completions", "POST", 499, LEFT)
        return took

    assert promptly(attempt)


def test_while_streaming(serve):
    proxy, engine = serve(streams_for_ever)

    def attempt() -> float:
        with proxy.client() as client:
            client.send("POST", "/v1/chat/completions", body=b"{}")
            call = engine.next_call()
            client.head()
            assert client.read_chunk() == b"data: 1\n\n"
            took = hang_up_and_time(client, call)
        assert proxy.observer.next_end() == ("/v1/chat/completions", "POST", 200, LEFT)
        return took

    assert promptly(attempt)


def test_inside_a_body_that_is_not_a_stream(serve):
    proxy, engine = serve(stalls_in_json)

    def attempt() -> float:
        with proxy.client() as client:
            client.send("POST", "/v1/completions", body=b"{}")
            call = engine.next_call()
            client.head()
            took = hang_up_and_time(client, call)
        assert proxy.observer.next_end() == ("/v1/completions", "POST", 200, LEFT)
        return took

    assert promptly(attempt)


def test_while_the_client_does_not_read(serve):
    async def floods(call: Call) -> None:
        await call.start_stream(b"application/octet-stream")
        while True:
            await call.chunk(bytes(65536))

    proxy, engine = serve(floods)

    def attempt() -> float:
        with proxy.client() as client:
            client.send("GET", "/big")
            call = engine.next_call()
            client.head()
            took = hang_up_and_time(client, call)
        assert proxy.observer.next_end() == ("other", "GET", 200, LEFT)
        return took

    assert promptly(attempt)


def test_before_the_body_is_complete(serve):
    proxy, engine = serve(never_answers)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", ("content-length: 10",))
        client.socket.sendall(b"abc")
    assert proxy.observer.next_end() == ("/v1/completions", "POST", 499, LEFT)
    assert engine.calls == []
    assert proxy.observer.first_bytes == []


def test_while_connecting():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(3)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            if not eventually(lambda: syn_sent(port) > 0, 1.0):
                pytest.skip("this kernel accepts connections past a full backlog")
            before = syn_sent(port)
            with Proxy(Upstream(None, f"http://127.0.0.1:{port}")) as proxy:

                def attempt() -> float:
                    client = proxy.client()
                    client.send("POST", "/v1/completions", body=b"{}")
                    assert eventually(lambda: syn_sent(port) == before + 1)
                    left_at = client.close()
                    assert eventually(lambda: syn_sent(port) == before)
                    took = time.monotonic() - left_at
                    assert proxy.observer.next_end() == ("/v1/completions", "POST", 499, LEFT)
                    return took

                assert promptly(attempt)
        finally:
            for filler in fillers:
                filler.close()


def test_pool_serves_as_before_after_many_hang_ups(serve):
    hanging = True

    async def script(call: Call) -> None:
        if not hanging:
            await call.json(b"{}")
        elif len(engine.calls) % 2:
            await never_answers(call)
        else:
            await streams_for_ever(call)

    proxy, engine = serve(script)
    for _ in range(40):
        with proxy.client() as client:
            client.send("POST", "/v1/completions", body=b"{}")
            engine.next_call()
        assert proxy.observer.next_end()[3] == LEFT
    assert eventually(lambda: all(call.closed.is_set() for call in engine.calls))
    assert proxy.forwarder.in_flight.count == 0
    hanging = False
    before = engine.connections
    with proxy.client() as client:
        for _ in range(5):
            assert client.ask("POST", "/v1/completions", body=b"{}").status == 200
    assert engine.connections == before + 1
