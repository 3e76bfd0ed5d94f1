"""A fake engine that speaks raw HTTP over a Unix or TCP socket, a raw client, and the data plane between them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvguard.guard.gate import Gate, Snapshot, headers_for
from kvguard.guard.state import State
from kvguard.proxy.forward import Forwarder
from kvguard.proxy.server import TLS, DataPlane, bind
from kvguard.proxy.upstream import Limits, Upstream
from kvguard.vocabulary import Confidence, Effective, ScaleState

WAIT_S = 60.0
PROVEN = Effective(dtype="fp8_e4m3", confidence=Confidence.PROVEN, scales=ScaleState.CHECKPOINT)
GUARD_HEADERS = headers_for(PROVEN, "sha256:abc")
OPEN = Snapshot(State.SERVING, True, "", 0, GUARD_HEADERS)


@dataclass
class Call:
    """One request as the fake engine got it, and its connection."""

    head: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closed: threading.Event = field(default_factory=threading.Event)
    closed_at: float = 0.0

    @property
    def request_line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        lines = [line for line in self.head.split(b"\r\n")[1:] if line]
        return [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def json(self, body: bytes = b"{}", extra: bytes = b"", status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (status, len(body))
        await self.send(head + extra + b"\r\n" + body)

    async def start_stream(self, content_type: bytes = b"text/event-stream; charset=utf-8", extra: bytes = b"") -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n%s\r\n" % (content_type, extra))

    async def wait_closed(self) -> None:
        """Until the proxy hangs up."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self.mark_closed()

    def mark_closed(self) -> None:
        if not self.closed.is_set():
            self.closed_at = time.monotonic()
            self.closed.set()

    def abort(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Call], Awaitable[None]]


class FakeEngine:
    """Runs `script` for each request, on a thread of its own. `calls` lists the requests, `connections` counts."""

    def __init__(self, script: Script, uds: Path) -> None:
        self.script = script
        self.uds = uds
        self.calls: list[Call] = []
        self.connections = 0
        self.arrived = threading.Semaphore(0)
        self.errors: list[BaseException] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="fake-engine")

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.uds.unlink(missing_ok=True)
        assert self.errors == []

    def next_call(self) -> Call:
        """The next request that has wholly arrived."""
        assert self.arrived.acquire(timeout=WAIT_S), "no request reached the engine"
        return self.calls[-1]

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_unix_server(self._accept, str(self.uds))
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call: Call | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                call = Call(head[:-2], b"", reader, writer)
                length = call.values(b"content-length")
                call.body = await reader.readexactly(int(length[0])) if length else b""
                self.calls.append(call)
                self.arrived.release()
                await self.script(call)
                if writer.transport.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            self.errors.append(error)
        finally:
            if call is not None:
                call.mark_closed()
            writer.close()


class Recorder:
    """An observer that keeps everything it is told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.first_bytes: list[float] = []
        self.ended: list[tuple[str, str, int, str]] = []
        self._ended = threading.Semaphore(0)

    def request_started(self, route: str) -> None:
        self.started.append(route)

    def first_byte(self, route: str, seconds: float) -> None:
        self.first_bytes.append(seconds)

    def finished(self, route: str, method: str, status: int, seconds: float, outcome: str) -> None:
        assert seconds >= 0
        self.ended.append((route, method, status, str(outcome)))
        self._ended.release()

    def next_end(self) -> tuple[str, str, int, str]:
        """How the next request ended."""
        assert self._ended.acquire(timeout=WAIT_S), "no request ended"
        return self.ended[-1]


class Proxy:
    """A data plane on a free port, with its gate open."""

    def __init__(self, upstream: Upstream, limits: Limits | None = None, tls: TLS | None = None, **options: Any) -> None:
        """`options` are the forwarder's own, as `access_log` and `tracing`."""
        self.gate = Gate()
        self.gate.snapshot = OPEN
        self.observer = Recorder()
        self.forwarder = Forwarder(self.gate, upstream, self.observer, limits, **options)
        listener = bind("127.0.0.1", 0)
        self.address: tuple[str, int] = listener.getsockname()
        self.plane = DataPlane(self.forwarder, [listener], tls)

    def __enter__(self) -> Proxy:
        self.plane.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.close()
        assert not self.plane.alive
        assert self.forwarder.in_flight.count == 0
        assert len(self.observer.started) == len(self.observer.ended)

    def client(self) -> RawClient:
        return RawClient(self.address)


@dataclass
class Answer:
    """A response as it stood on the wire. `chunks` are the HTTP chunks, `complete` says that it ended properly."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    chunks: list[bytes]
    complete: bool

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class RawClient:
    """A blocking client on a plain socket that shows exactly what came."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=WAIT_S)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> float:
        """Hang up; the time it happened."""
        self._file.close()
        now = time.monotonic()
        self.socket.close()
        return now

    def send(self, method: str, target: str, headers: tuple[str, ...] = (), body: bytes = b"") -> None:
        lines = [f"{method} {target} HTTP/1.1", "host: client.example", *headers]
        if body:
            lines.append(f"content-length: {len(body)}")
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def ask(self, method: str, target: str, headers: tuple[str, ...] = (), body: bytes = b"") -> Answer:
        self.send(method, target, headers, body)
        return self.answer(head_only=method == "HEAD")

    def answer(self, head_only: bool = False) -> Answer:
        status, headers = self.head()
        values = dict(headers)
        if head_only or status in (204, 304):
            return Answer(status, headers, b"", [], True)
        if b"content-length" in values:
            length = int(values[b"content-length"])
            body = self._file.read(length)
            return Answer(status, headers, body, [body], len(body) == length)
        chunks: list[bytes] = []
        while (chunk := self.read_chunk()) is not None:
            if not chunk:
                return Answer(status, headers, b"".join(chunks), chunks, True)
            chunks.append(chunk)
        return Answer(status, headers, b"".join(chunks), chunks, False)

    def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        status = int(self._file.readline().split()[1])
        headers = []
        while (line := self._file.readline().rstrip(b"\r\n")) != b"":
            name, _, value = line.partition(b": ")
            headers.append((name, value))
        return status, headers

    def read_chunk(self) -> bytes | None:
        """The next HTTP chunk; b"" is the proper end, None a connection that ended without one."""
        size = self._file.readline()
        if not size:
            return None
        data = self._file.read(int(size, 16))
        self._file.readline()
        return data

    def at_end(self) -> bool:
        """Whether the server closed the connection."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True


def syn_sent(port: int) -> int:
    """Connection attempts of this machine to a port that nobody has answered."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(fields[2].endswith(f":{port:04X}") and fields[3] == "02" for fields in map(str.split, lines))


def eventually(condition: Callable[[], bool], deadline_s: float = WAIT_S) -> bool:
    """Whether it becomes true."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
    return True
