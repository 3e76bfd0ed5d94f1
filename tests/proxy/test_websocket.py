"""A WebSocket through the proxy: the realtime API's, byte for byte, under the same gate and with the same headers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_fakes import GUARD_HEADERS, WAIT_S, Call, Proxy, eventually
from websockets.exceptions import ConnectionClosedError, ConnectionClosedOK, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, unix_serve

from kvguard.guard.gate import UNKNOWN_HEADERS, Snapshot
from kvguard.guard.state import State
from kvguard.proxy.tunnel import GOING_AWAY, Frames
from kvguard.proxy.upstream import Upstream

KEY = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
HANDSHAKE = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13", KEY)
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nsec-websocket-accept: x\r\n\r\n"

Talk = Callable[[ServerConnection], None]
Realtime = Callable[[Talk], Proxy]


@pytest.fixture
def realtime(short_dir: Path) -> Iterator[Realtime]:
    """Start a WebSocket engine, which talks as it is told, and a proxy in front of it."""
    with ExitStack() as stack:

        def start(talk: Talk) -> Proxy:
            path = short_dir / "e"
            server = stack.enter_context(unix_serve(talk, str(path), subprotocols=["realtime"]))  # type: ignore[list-item]
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join, WAIT_S)
            stack.callback(server.shutdown)
            return stack.enter_context(Proxy(Upstream(str(path))))

        yield start


def client(proxy: Proxy, path: str = "/v1/realtime?model=m", **more: object) -> ClientConnection:
    host, port = proxy.address
    url = f"ws://{host}:{port}{path}"
    return connect(url, proxy=None, open_timeout=WAIT_S, subprotocols=["realtime"], **more)  # type: ignore[arg-type, list-item]


def echo(engine: ServerConnection) -> None:
    for message in engine:
        engine.send(message)


def test_messages_pass_both_ways(realtime: Realtime) -> None:
    seen: list[object] = []

    def talk(engine: ServerConnection) -> None:
        assert engine.request is not None
        seen.append((engine.request.path, engine.request.headers["authorization"], engine.subprotocol))
        with suppress(ConnectionClosedError):
            echo(engine)
        seen.append(engine.close_code)

    proxy = realtime(talk)
    headers = {"authorization": "Bearer k"}
    with client(proxy, additional_headers=headers) as socket_:
        assert socket_.subprotocol == "realtime"
        assert socket_.response is not None
        passed = [(name.encode(), value.encode()) for name, value in socket_.response.headers.raw_items()]
        assert [pair for pair in passed if pair[0].startswith(b"x-kvguard")] == list(GUARD_HEADERS)
        for message in ("hello", b"\x00\xff" * 10, "é" * 70_000, b"x" * 700_000, ""):
            socket_.send(message)
            assert socket_.recv(timeout=WAIT_S) == message
        assert socket_.ping().wait(WAIT_S)
        assert proxy.forwarder.in_flight.count == 1
        socket_.close(4001, "enough")
    assert proxy.observer.next_end()[:3] == ("other", "GET", 101)
    assert proxy.plane.wait_idle(WAIT_S)
    assert eventually(lambda: len(seen) == 2)
    assert seen == [("/v1/realtime?model=m", "Bearer k", "realtime"), 4001]


def test_bytes_before_and_after_the_switch_are_not_lost(serve):
    async def script(call: Call) -> None:
        await call.send(SWITCH + b"early")
        await call.send(await call.reader.readexactly(4))
        call.writer.close()

    proxy, engine = serve(script)
    with proxy.client() as raw:
        lines = "\r\n".join(("GET /v1/realtime HTTP/1.1", "host: h", *HANDSHAKE))
        raw.socket.sendall(lines.encode() + b"\r\n\r\n" + b"more")
        assert raw.head()[0] == 101
        assert raw._file.read() == b"earlymore"
    call = engine.next_call()
    assert call.values(b"upgrade") == [b"websocket"]
    assert call.values(b"connection") == [b"upgrade"]
    assert call.values(b"content-length") == []


def test_the_engine_may_refuse(serve):
    async def script(call: Call) -> None:
        await call.json(b'{"error": 1}', status=b"403 Forbidden")

    proxy, _ = serve(script)
    with proxy.client() as raw:
        answer = raw.ask("GET", "/v1/realtime", HANDSHAKE)
        assert (answer.status, answer.body) == (403, b'{"error": 1}')
        assert answer.values(b"connection") == [b"close"]
        assert raw.at_end()
    assert proxy.observer.next_end() == ("other", "GET", 403, "ok")


def test_the_gate_and_the_private_path_hold(realtime: Realtime) -> None:
    proxy = realtime(echo)
    with pytest.raises(InvalidStatus) as refused:
        client(proxy, "/_kvguard/read")
    assert refused.value.response.status_code == 404
    proxy.gate.snapshot = Snapshot(State.VERIFYING, False, "being verified", 7, UNKNOWN_HEADERS)
    with pytest.raises(InvalidStatus) as closed:
        client(proxy)
    assert closed.value.response.status_code == 503
    assert closed.value.response.headers["retry-after"] == "7"


def test_an_engine_that_is_not_there(short_dir: Path) -> None:
    with Proxy(Upstream(str(short_dir / "absent"))) as proxy, pytest.raises(InvalidStatus) as refused:
        client(proxy)
    assert refused.value.response.status_code == 502


def test_a_client_that_leaves_is_gone_for_the_engine(realtime: Realtime) -> None:
    ended = threading.Event()

    def talk(engine: ServerConnection) -> None:
        engine.send("hello")
        with suppress(ConnectionClosedError, ConnectionClosedOK):
            engine.recv()
        ended.set()

    proxy = realtime(talk)
    with client(proxy) as left:
        assert left.recv(timeout=WAIT_S) == "hello"
        left.socket.shutdown(socket.SHUT_RDWR)
        assert ended.wait(WAIT_S)
    assert proxy.observer.next_end() == ("other", "GET", 101, "client_disconnected")
    assert proxy.plane.wait_idle(WAIT_S)


def test_what_an_engine_sent_before_it_died_arrives(serve):
    async def script(call: Call) -> None:
        await call.send(SWITCH + b"\x82\x7f" + (5_000_000).to_bytes(8) + bytes(5_000_000))
        call.writer.close()

    proxy, _ = serve(script)
    with proxy.client() as raw:
        raw.send("GET", "/v1/realtime", HANDSHAKE)
        assert raw.head()[0] == 101
        assert len(raw._file.read()) == 10 + 5_000_000
    assert proxy.observer.next_end() == ("other", "GET", 101, "ok")


def test_a_slow_end_holds_the_other_back(serve):
    total, piece = 400, bytes(65536)
    sent: list[int] = []

    async def script(call: Call) -> None:
        await call.send(SWITCH + b"\x82\x7f" + (total * len(piece)).to_bytes(8))
        for number in range(total):
            await call.send(piece)
            sent.append(number)
        call.writer.close()

    proxy, _ = serve(script)
    with proxy.client() as raw:
        raw.send("GET", "/v1/realtime", HANDSHAKE)
        assert raw.head()[0] == 101
        raw._file.read(10 + 65536)
        assert len(sent) < total, "25 MB were buffered for a client that reads nothing"
        assert len(raw._file.read()) == (total - 1) * 65536


def test_an_engine_that_reads_nothing_holds_the_client_back(serve):
    async def script(call: Call) -> None:
        await call.send(SWITCH)
        call.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.to_thread(reads_again.wait, WAIT_S)
        call.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await call.wait_closed()

    reads_again = threading.Event()
    proxy, _ = serve(script)
    with proxy.client() as raw:
        raw.send("GET", "/v1/realtime", HANDSHAKE)
        assert raw.head()[0] == 101
        raw.socket.settimeout(1.0)
        taken = 0
        with suppress(TimeoutError):
            while taken < 100 * 2**20:
                taken += raw.socket.send(bytes(65536))
    assert taken < 100 * 2**20
    reads_again.set()
    assert proxy.observer.next_end()[2:] == (101, "client_disconnected")


def test_a_drain_says_goodbye_between_two_messages(realtime: Realtime) -> None:
    gone = threading.Event()

    def talk(engine: ServerConnection) -> None:
        engine.send("one")
        with suppress(ConnectionClosedError, ConnectionClosedOK):
            engine.recv()
        gone.set()

    proxy = realtime(talk)
    with client(proxy) as open_:
        assert open_.recv(timeout=WAIT_S) == "one"
        proxy.plane.stop_accepting()
        with pytest.raises(ConnectionClosedOK) as closed:
            open_.recv(timeout=WAIT_S)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001
    assert gone.wait(WAIT_S)
    assert proxy.plane.wait_idle(WAIT_S)


def test_a_drain_lets_the_message_finish(serve):
    async def script(call: Call) -> None:
        await call.send(SWITCH + b"\x81\x0aabcde")
        await call.reader.readexactly(1)
        await call.send(b"fghij" + b"\x81\x01z")
        await call.wait_closed()

    proxy, engine = serve(script)
    with proxy.client() as raw:
        raw.send("GET", "/v1/realtime", HANDSHAKE)
        assert raw.head()[0] == 101
        assert raw._file.read(7) == b"\x81\x0aabcde"
        proxy.plane.stop_accepting()
        call = engine.next_call()
        engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
        assert raw._file.read(9) == b"fghij" + GOING_AWAY
        raw.socket.shutdown(socket.SHUT_RDWR)
        assert call.closed.wait(WAIT_S)
    assert proxy.plane.wait_idle(WAIT_S)


@pytest.mark.parametrize("cut", [None, 30, -12, -8, -7, -6, -5, -4])
def test_other_upgrades_are_not_made_and_lose_no_body(serve, cut):
    async def script(call: Call) -> None:
        await call.json(b"{}")

    proxy, engine = serve(script)
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__", "x-kept: 1")
    lines = "\r\n".join(("POST /v1/completions HTTP/1.1", "host: h", *offer, "content-length: 4"))
    wire = lines.encode() + b"\r\n\r\nbody"
    with proxy.client() as raw:
        for _ in range(2):  # the connection goes on
            raw.socket.sendall(wire[:cut])
            if cut is not None:
                time.sleep(0.02)  # two packets, most of the time
                raw.socket.sendall(wire[cut:])
            assert raw.answer().status == 200
    assert [call.body for call in engine.calls] == [b"body", b"body"]
    assert {name for name, _ in engine.calls[1].headers} == {b"host", b"content-length", b"x-kept"}


def test_an_upgrade_that_nobody_asked_for_is_a_failure(serve):
    async def script(call: Call) -> None:
        await call.send(SWITCH)
        await call.wait_closed()

    proxy, _ = serve(script)
    with proxy.client() as raw:
        assert raw.ask("GET", "/v1/models").status == 502


frames = st.lists(
    st.tuples(
        st.sampled_from([b"\x81", b"\x01", b"\x80", b"\x00", b"\x89", b"\xc1"]),
        st.one_of(st.integers(0, 200), st.integers(65530, 65540)),
        st.booleans(),
    ),
    max_size=6,
)


def frame(first: bytes, length: int, masked: bool) -> bytes:
    mask = 0x80 if masked else 0
    if length < 126:
        head = first + bytes([mask | length])
    elif length < 65536:
        head = first + bytes([mask | 126]) + length.to_bytes(2)
    else:
        head = first + bytes([mask | 127]) + length.to_bytes(8)
    return head + (b"mask" if masked else b"") + bytes(length)


@given(frames, st.lists(st.integers(1, 70_000), max_size=8))
def test_frames_are_followed_however_they_are_cut(parts: list[tuple[bytes, int, bool]], cuts: list[int]) -> None:
    wire = b"".join(frame(*part) for part in parts)
    followed = Frames()
    position = 0
    for cut in [*cuts, len(wire)]:
        piece = wire[position : position + cut]
        assert followed.take(piece, stop=False) == len(piece)
        position += len(piece)
    fragmented = False
    for first, _, _ in parts:
        if not first[0] & 0x08:
            fragmented = not first[0] & 0x80
    assert followed.between_messages is not fragmented


@given(frames)
def test_frames_stop_at_the_end_of_a_message(parts: list[tuple[bytes, int, bool]]) -> None:
    wire = b"".join(frame(*part) for part in parts)
    followed = Frames()
    followed.take(b"\x01\x02a", stop=False)  # inside a text that the client has half of
    taken = followed.take(b"b" + wire, stop=True)
    expected = 1
    for first, length, masked in parts:
        expected += len(frame(first, length, masked))
        if not first[0] & 0x08 and first[0] & 0x80:
            break
    else:
        expected = 1 + len(wire)
    assert taken == expected
