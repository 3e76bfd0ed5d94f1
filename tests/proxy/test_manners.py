"""What is kept of a request, what is said of it, and clients and engines that behave badly in their own ways."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import socket
import sys
import threading
from contextlib import ExitStack, suppress

import httpx
import pytest
from prometheus_client import CollectorRegistry
from proxy_fakes import WAIT_S, Call, FakeEngine, Proxy, eventually, syn_sent

from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.proxy.exchange import Exchange
from kvguard.proxy.management import management_app
from kvguard.proxy.management_server import serve_management
from kvguard.proxy.server import bind
from kvguard.proxy.upstream import Limits, Upstream
from kvguard.telemetry.logging import configure, flush
from kvguard.telemetry.metrics import ProxyMetrics


async def any_ending(call: Call) -> None:
    """What the path asks for."""
    wanted = call.request_line.split()[1]
    if wanted == b"/dies":
        call.abort()
    elif wanted == b"/dies-inside":
        await call.start_stream()
        await call.chunk(b"data: 1\n\n")
        call.writer.close()
    elif wanted == b"/hangs":
        await call.wait_closed()
    elif wanted == b"/streams":
        await call.start_stream()
        await call.chunk(b"data: 1\n\n")
        await call.send(b"0\r\n\r\n")
    else:
        await call.json(b"{}")


def test_nothing_is_kept_of_a_request_in_any_ending(serve):
    proxy, engine = serve(any_ending, Limits(body_bytes=100))
    for path in ("/json", "/dies", "/dies-inside", "/streams", "/_kvguard", "/large", "/hangs"):
        with proxy.client() as client:
            client.send("POST", path, body=bytes(200 if path == "/large" else 10))
            if path == "/hangs":
                engine.next_call()
            else:
                client.answer()
        proxy.observer.next_end()
    assert proxy.plane.wait_idle(WAIT_S)
    assert proxy.forwarder.in_flight.count == 0

    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, Exchange) for one in gc.get_objects())

    end = threading.Event()
    for _ in range(600):  # the loop lets go of its last one in its own time
        if kept() == 0:
            break
        end.wait(0.1)
    assert kept() == 0


def test_probes_and_metrics_answer_while_the_request_loop_stands_still(serve):
    proxy, _ = serve(any_ending)
    registry = CollectorRegistry()
    ProxyMetrics(registry)
    app = management_app(lambda: Status(state=State.SERVING), lambda: None, lambda: None, list, registry)
    stuck, let_go = threading.Event(), threading.Event()

    def stand_still() -> None:
        stuck.set()
        let_go.wait(WAIT_S)

    async def look(port: int) -> list[int]:
        closed = asyncio.Event()
        serving = asyncio.create_task(serve_management(app, management, closed))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=WAIT_S) as client:
            found = [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/metrics")]
        closed.set()
        await serving
        return found

    with bind("127.0.0.1", 0) as management:
        management.listen()
        proxy.plane._server.loop.call_soon_threadsafe(stand_still)
        assert stuck.wait(WAIT_S)
        try:
            assert asyncio.run(look(management.getsockname()[1])) == [200, 200, 200]
        finally:
            let_go.set()


def test_an_engine_that_does_not_take_connections_is_a_502_in_time():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        try:
            if not eventually(lambda: syn_sent(port) > 0, 1.0):
                pytest.skip("this kernel accepts connections past a full backlog")
            with Proxy(Upstream(None, f"http://127.0.0.1:{port}"), Limits(connect_s=0.1, first_byte_s=3.0)) as proxy:
                with proxy.client() as client:
                    answer = client.ask("POST", "/v1/completions", body=b"{}")
                assert answer.status == 502
                assert "no answer in time" in json.loads(answer.body)["error"]["message"]
        finally:
            for filler in fillers:
                filler.close()


def test_an_engine_on_tcp_is_told_its_own_host():
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    heads: list[bytes] = []
    ready, stop = threading.Event(), threading.Event()
    port: list[int] = []

    async def engine() -> None:
        async with await asyncio.start_server(script, "127.0.0.1", 0) as server:
            port.append(server.sockets[0].getsockname()[1])
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(engine(),))
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        with Proxy(Upstream(None, f"http://127.0.0.1:{port[0]}/base/")) as proxy, proxy.client() as client:
            assert client.ask("GET", "/v1/models?a=1").body == b"{}"
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert heads[0].split(b"\r\n")[:2] == [b"GET /base/v1/models?a=1 HTTP/1.1", b"host: 127.0.0.1:%d" % port[0]]


def test_a_client_that_closes_its_half_has_left(serve):
    """uvicorn, as vLLM's own server runs it, cannot answer such a client; its work is not done for nobody."""
    proxy, engine = serve(any_ending)
    with proxy.client() as client:
        client.send("POST", "/hangs", body=b"{}")
        call = engine.next_call()
        client.socket.shutdown(socket.SHUT_WR)
        assert call.closed.wait(WAIT_S)
    assert proxy.observer.next_end() == ("other", "POST", 499, "client_disconnected")


def test_an_engine_that_resets_inside_a_stream(serve):
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"data: 1\n\n")
        await call.reader.readexactly(1)
        call.abort()

    proxy, engine = serve(script)
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        client.head()
        assert client.read_chunk() == b"data: 1\n\n"
        engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
        assert b'"error"' in (client.read_chunk() or b"")
        assert client.read_chunk() == b""


def test_a_request_behind_a_running_one_waits_its_turn(serve):
    proxy, engine = serve(any_ending)
    with proxy.client() as client:
        wire = b"".join(b"POST /%s HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}" % path for path in (b"streams", b"json"))
        client.socket.sendall(wire)
        assert client.answer().chunks == [b"data: 1\n\n"]
        assert client.answer().body == b"{}"
    assert len(engine.calls) == 2


def logged(short_dir, monkeypatch, *, json_lines: bool) -> str:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    configure(json=json_lines)
    with FakeEngine(any_ending, short_dir / "e") as engine, Proxy(Upstream(str(engine.uds)), access_log=True) as proxy:
        trace = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        with proxy.client() as client:
            secrets = ("authorization: Bearer canary-key", "x-request-id: r1", trace)
            client.ask("POST", "/v1/chat/completions?key=canary-query", secrets, b'{"prompt": "canary-prompt"}')
            client.ask("POST", "/streams", body=b"{}")
    flush(WAIT_S)
    return said.getvalue()


def test_the_access_log_has_a_line_for_each_request_and_nothing_of_its_content(short_dir, monkeypatch):
    said = logged(short_dir, monkeypatch, json_lines=True)
    lines = [json.loads(line) for line in said.splitlines()]
    first, second = [line for line in lines if line["event"] == "request"]
    assert (first["method"], first["path"], first["status"], first["outcome"]) == ("POST", "/v1/chat/completions", 200, "ok")
    assert (first["request_id"], first["trace_id"]) == ("r1", "4bf92f3577b34da6a3ce929d0e0e4736")
    assert (first["request_bytes"], first["response_bytes"], first["client"]) == (27, 2, "127.0.0.1")
    assert first["seconds"] >= first["first_byte_seconds"] >= 0
    assert second["response_bytes"] == len(b"data: 1\n\n")
    assert "request_id" not in second
    assert "canary" not in said


@pytest.mark.parametrize("access_log", [True, False])
def test_a_standard_error_that_nobody_reads_holds_up_no_request(short_dir, monkeypatch, access_log):
    """Neither with a line for each request, nor with one for each that the engine failed."""

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            if not blocked.is_set():
                blocked.set()
                let_go.wait(3 * WAIT_S)
            return len(text)

    blocked, let_go = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "stderr", Stuck())
    configure(json=True)
    try:
        with FakeEngine(any_ending, short_dir / "e") as engine, ExitStack() as stack:
            proxy = stack.enter_context(Proxy(Upstream(str(engine.uds)), access_log=access_log))
            stack.callback(let_go.set)
            with proxy.client() as client:
                assert client.ask("POST", "/dies", body=b"{}").status == 502
                assert blocked.wait(WAIT_S)
                for _ in range(10):
                    assert client.ask("GET", "/json").status == 200
                    assert client.ask("POST", "/dies", body=b"{}").status == 502
            assert not let_go.is_set()
    finally:
        let_go.set()
        with suppress(Exception):
            monkeypatch.undo()
            configure()
