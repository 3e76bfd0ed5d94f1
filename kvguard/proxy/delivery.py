"""The client's side of an exchange: what the engine says leaves at once, or in its turn when the client reads slowly."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from kvguard.proxy.asgi import Headers, Message, Scope, Send
from kvguard.proxy.connection import Connection
from kvguard.proxy.ending import Ending
from kvguard.proxy.refusal import engine_unreachable
from kvguard.proxy.step import Rest, begun
from kvguard.proxy.writer import PUT, Writer

_TAIL_BYTES = 4


class Source(Protocol):
    """Where the messages come from: held back while the client is behind."""

    def hold_back(self) -> None:
        """The client is behind: say nothing more."""

    def go_on(self) -> None:
        """The client has caught up."""

    def end(self, ending: Ending) -> None:
        """All that came before this ending is delivered, or nothing more can be."""


class Delivery:
    """Passes messages on without a task for each; only a client that is behind gets one, which sends what is left.

    `tail` is the end of the body so far, of what came through `pass_chunk`.
    """

    __slots__ = ("_behind", "_catching_up", "_send", "_source", "_then", "_writer", "tail")

    def __init__(self, source: Source, scope: Scope, send: Send) -> None:
        extension = scope.get("extensions", {}).get(PUT)
        self.tail = b""
        self._source = source
        self._send = send
        self._writer: Writer | None = extension["writer"] if extension else None
        self._behind: deque[Message] | None = None
        self._then: Ending | None = None
        self._catching_up: asyncio.Task[None] | None = None

    def begin(self, status: int, headers: Headers, connection: Connection | None) -> None:
        """The head, which waits for `flush`; whole chunks may then go from `connection` straight to the client."""
        if self._writer is not None:
            self._writer.hold()
            if connection is not None:
                connection.put = self._writer.put
        self.pass_on({"type": "http.response.start", "status": status, "headers": headers})

    def flush(self) -> None:
        """What came together leaves together."""
        if self._writer is not None:
            self._writer.flush()

    def pass_on(self, message: Message) -> None:
        """To the client, now if it takes it; else the source is held back."""
        if self._behind is not None:
            self._behind.append(message)
            return
        try:
            rest = begun(self._send(message))
        except Exception as error:  # the server's objections to a response, as of a length that is not kept
            self._source.end(_objection(error))
            return
        if isinstance(rest, Rest):
            self._behind = deque()
            self._source.hold_back()
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up(rest))

    def pass_chunk(self, data: bytes) -> None:
        """The same for a piece of the body."""
        self.tail = data if len(data) >= _TAIL_BYTES else self.tail[-_TAIL_BYTES:] + data
        if self._behind is not None or self._writer is None or not self._writer.put(b"%x\r\n%b\r\n" % (len(data), data)):
            self.pass_on({"type": "http.response.body", "body": data, "more_body": True})

    def end_in_turn(self, ending: Ending) -> None:
        """End after what the client has yet to take."""
        if self._behind is None:
            self._source.end(ending)
        else:
            self._then = ending

    def stop(self) -> None:
        """Send nothing more of what is left."""
        if self._catching_up is not None:
            self._catching_up.cancel()

    async def _catch_up(self, rest: Rest[None]) -> None:
        try:
            await rest
            while self._behind:
                await self._send(self._behind.popleft())
        except Exception as error:
            self._source.end(_objection(error))
            return
        self._behind = None
        if self._then is not None:
            self._source.end(self._then)
        else:
            self._source.go_on()


def _objection(error: Exception) -> Ending:
    return engine_unreachable(f"its response cannot be passed on ({type(error).__name__})")
