"""A client on plain sockets that costs little, so that on two cores the proxies get what they need."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

_JSON_BODY = b'{"model":"bench","messages":[{"role":"user","content":"Write about a river."}],"max_tokens":140}'


def request(*, stream: bool = False, user: str = "", key: str = "") -> bytes:
    """A chat request as the OpenAI client sends it, more or less; `user` tells the fake engine what to do (see `upstream`)."""
    body = _JSON_BODY
    if stream:
        body = body[:-1] + b',"stream":true' + (b',"user":"%s"' % user.encode() if user else b"") + b"}"
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\n"
        b"content-type: application/json\r\nuser-agent: OpenAI/Python 2.8.0\r\naccept-encoding: gzip, deflate\r\n"
        b"authorization: Bearer " + (key or "sk-none").encode() + b"\r\nx-stainless-lang: python\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )


@dataclass
class Seen:
    """What the answers of one block looked like. Times in seconds; `reads` is of data after the head."""

    first_byte: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    reads: int = 0
    received: int = 0
    bad: int = 0
    examples: list[bytes] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """Asks again and again on one connection, one request at a time."""

    def __init__(self) -> None:
        self._done: asyncio.Future[bool] | None = None
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._seen = Seen()
        self._asked = 0.0
        self._need: int | None = None
        self._got = 0
        self._first: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, _: Exception | None) -> None:
        self._finish(False)
        if self._first is not None and not self._first.done():
            self._first.set_exception(ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        if self._done is None:
            return
        if not self._parts:
            self._seen.first_byte.append(time.perf_counter() - self._asked)
        self._parts.append(data)
        self._seen.reads += 1
        self._got += len(data)
        if self._need is None:
            self._measure()
        if (self._need == -1 and data.endswith(b"0\r\n\r\n")) or (self._need is not None and 0 <= self._need <= self._got):
            self._finish(True)

    def _measure(self) -> None:
        """From the head: how many bytes the answer has, -1 for chunked."""
        head, found, _ = b"".join(self._parts).partition(b"\r\n\r\n")
        if found:
            lower = head.lower()
            start = lower.find(b"content-length:")
            self._need = -1 if start < 0 else len(head) + 4 + int(lower[start + 15 :].split(b"\r\n", 1)[0])

    def _finish(self, good: bool) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(good)

    async def ask(self, data: bytes, seen: Seen) -> bool:
        """One request to its last byte; False when the connection ended before that or the status is not 200."""
        self._seen, self._parts, self._need, self._got = seen, [], None, 0
        self._done = self._loop.create_future()
        self._asked = time.perf_counter()
        self.transport.write(data)
        good = await self._done
        seen.whole.append(time.perf_counter() - self._asked)
        seen.received += self._got
        if not good or not self._parts[0].startswith(b"HTTP/1.1 200"):
            seen.bad += 1
            seen.examples = [b"".join(self._parts)[:400]]
            return False
        return True

    async def begin(self, data: bytes) -> None:
        """Send, and wait for the first byte of the answer."""
        self._done = None
        self._first = self._loop.create_future()
        self.transport.write(data)
        await self._first


async def connect(place: int | Path) -> Connection:
    """A new connection to a port of this machine, or to a Unix socket."""
    loop = asyncio.get_running_loop()
    if isinstance(place, Path):
        _, connection = await loop.create_unix_connection(Connection, str(place))
    else:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", place)
    return connection


async def block(place: int | Path, data: bytes, count: int, clients: int) -> Seen:
    """`count` requests over `clients` connections."""
    seen = Seen()
    left = count

    async def one() -> None:
        nonlocal left
        connection = await connect(place)
        while left > 0:
            left -= 1
            if not await connection.ask(data, seen):
                connection.transport.close()
                connection = await connect(place)
        connection.transport.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return seen
