"""One client request and its upstream response, from the first byte to whichever ending comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum, StrEnum

from kvguard.guard.gate import Gate
from kvguard.proxy.asgi import Headers, Message, Receive, Scope, Send
from kvguard.proxy.connection import Connection
from kvguard.proxy.headers import (
    REQUEST_ID,
    one_value,
    request_head,
    request_headers,
    response_headers,
    takes_plain_text,
    upgrade_head,
)
from kvguard.proxy.intake import raw_path, read_body, refusal_before_body, send_refusal
from kvguard.proxy.protocol import PUT, UPGRADE, Protocol, Writer
from kvguard.proxy.refusal import Refusal, engine_silent, engine_unreachable, error_event, gate_closed
from kvguard.proxy.step import Rest, begun
from kvguard.proxy.tunnel import Tunnel
from kvguard.proxy.upstream import Client, Limits, Unreachable

CLIENT_LEFT = 499
"""Reported as the status when the client left before an answer began (nginx's number)."""

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_TAIL_BYTES = 4
_LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Outcome(StrEnum):
    """How a request ended. `refused` is kvguard's own answer: gate closed, private path, body too large."""

    OK = "ok"
    CLIENT_DISCONNECTED = "client_disconnected"
    UPSTREAM_ERROR = "upstream_error"
    REFUSED = "refused"


class ResponseAborted(Exception):
    """Raised out of the app so that the server cuts the connection: what was sent is not a whole response."""


class _End(Enum):
    COMPLETE = "complete"
    CLIENT_LEFT = "client left"
    UNTOUCHED = "the connection was closed before it took the request"


_Ending = _End | Refusal


class Exchange:
    """Owns the engine's connection until the end; giving it up is synchronous, so no cancellation interrupts it.

    The engine's bytes come as calls (`connection.Listener`) and leave at once; the task that runs this only waits for the
    end. A server says that the client left only to a waiting receive() (uvicorn announces ASGI 2.3), so the request body is
    read first and a second task then waits on receive(). Whichever ending is first counts.
    """

    def __init__(self, gate: Gate, client: Client, limits: Limits, *, scope: Scope, receive: Receive, send: Send) -> None:
        self.status = CLIENT_LEFT
        self.outcome = Outcome.UPSTREAM_ERROR
        self.failure = ""
        self.first_byte: float | None = None
        self.on_first_byte: Callable[[float], None] | None = None
        self.body = b""
        self.received = 0
        self.request_id = one_value(scope["headers"], REQUEST_ID)
        self._gate = gate
        self._client = client
        self._limits = limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._connection: Connection | None = None
        self._connecting: asyncio.Timeout | None = None
        self._tunnel: Tunnel | None = None
        extension = scope.get("extensions", {}).get(PUT)
        self._writer: Writer | None = extension["writer"] if extension else None
        self._headers: Headers = []
        self._tail = b""
        self._answered = False
        self._ending: _Ending | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._behind: deque[Message] | None = None
        self._then: _Ending | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._silence_limit = limits.first_byte_s
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0

    def elapsed(self) -> float:
        """Seconds since the request's headers arrived."""
        return self._loop.time() - self._started

    async def run(self) -> None:
        """Answer the request. Raises ResponseAborted when a body that was begun cannot be completed."""
        refusal = refusal_before_body(self._scope, self._gate.snapshot)
        if refusal is not None:
            await self._refuse(refusal)
            return
        body = await read_body(self._scope, self._receive, self._limits)
        if isinstance(body, Refusal):
            await self._refuse(body)
        elif body is None:
            self.outcome = Outcome.CLIENT_DISCONNECTED
        else:
            self.body = body
            await self._forward(body)

    async def _refuse(self, refusal: Refusal, outcome: Outcome = Outcome.REFUSED) -> None:
        self.status, self.outcome = refusal.status, outcome
        await send_refusal(refusal, self._gate.snapshot, self._receive, self._send, self.request_id)

    # --- with the engine ---

    async def _forward(self, body: bytes) -> None:
        scope = self._scope
        headers = request_headers(scope["headers"], len(body), self._client.host, websocket=self._upgrade() is not None)
        target = (self._client.prefix + raw_path(scope)).encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        head = request_head(scope["method"], target, headers)
        watcher = self._loop.create_task(self._watch_client())
        try:
            ending = await self._ask(head, body)
        finally:
            self._answered = True
            watcher.cancel()
            if self._timer is not None:
                self._timer.cancel()
            if self._catching_up is not None:
                self._catching_up.cancel()
            self._give_up_connection()
        if ending is _End.CLIENT_LEFT:
            self.outcome = Outcome.CLIENT_DISCONNECTED
        elif ending is _End.COMPLETE:
            self.outcome = Outcome.OK
        elif isinstance(ending, Refusal):
            await self._fail(ending)

    async def _ask(self, head: bytes, body: bytes) -> _Ending:
        """Put the request to the engine and wait for the end. An idle connection may just have been closed there."""
        self._expect_within(self._limits.first_byte_s)
        connection = self._client.idle()
        if connection is not None:
            ending = await self._ask_on(connection, head, body)
            if ending is not _End.UNTOUCHED:
                return ending
            connection.abort()
            self._ending, self._ended = None, self._loop.create_future()
        self._connecting = asyncio.timeout(None)
        try:
            async with self._connecting:
                connection = await self._client.connect()
        except Unreachable as error:
            return engine_unreachable(str(error))
        except TimeoutError:  # the scope was expired by whatever ended the exchange
            return self._ending or engine_silent(self._silence_limit)
        finally:
            self._connecting = None
        if self._ending is not None:
            connection.abort()
            return self._ending
        return await self._ask_on(connection, head, body)

    async def _ask_on(self, connection: Connection, head: bytes, body: bytes) -> _Ending:
        self._connection = connection
        connection.ask(self, head, body, head_only=self._scope["method"] == "HEAD")
        await self._ended
        return self._ending or _End.CLIENT_LEFT

    def _give_up_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        connection.leave()
        self.received += connection.put_bytes
        self._tail = connection.last_put[:-2] or self._tail
        if self._ending is _End.COMPLETE and self._tunnel is None:
            self._client.put_back(connection)
        else:
            connection.abort()

    def _end(self, ending: _Ending) -> None:
        """The first ending counts."""
        if self._ending is not None:
            return
        self._ending = ending
        if not self._ended.done():
            self._ended.set_result(None)
        if self._connecting is not None:
            self._connecting.reschedule(self._loop.time())

    async def _fail(self, refusal: Refusal) -> None:
        """Tell the client that the engine failed, in the way that is still open."""
        snapshot = self._gate.snapshot
        if self.status == CLIENT_LEFT and not snapshot.open:
            # An early /metrics, or a gate that closed meanwhile: its reason says more than ours.
            await self._refuse(gate_closed(snapshot), Outcome.UPSTREAM_ERROR)
            return
        self.failure = refusal.message
        if self.status == CLIENT_LEFT:
            await self._refuse(refusal, Outcome.UPSTREAM_ERROR)
            return
        if not takes_plain_text(self._headers):
            raise ResponseAborted(refusal.message)
        await self._send({"type": "http.response.body", "body": error_event(refusal, self._tail), "more_body": True})
        await self._send(_LAST)

    # --- what the connection calls (connection.Listener) ---

    def response_head(self, status: int, headers: Headers) -> None:
        """The engine's answer begins."""
        if not 200 <= status < 600:
            self._end(engine_unreachable(f"it sent status {status}"))
            return
        self._expect_within(self._limits.between_chunks_s)
        self._headers = response_headers(headers, status, self._gate.snapshot.headers, self.request_id)
        self.status = status
        if self._writer is not None:
            self._writer.hold()
            if self._connection is not None:
                self._connection.put = self._writer.put
        self._pass_on({"type": "http.response.start", "status": status, "headers": self._headers})

    def response_read(self) -> None:
        """What came together leaves together."""
        if self._writer is not None:
            self._writer.flush()

    def response_body(self, data: bytes) -> None:
        """The next chunk leaves as it came."""
        if self.first_byte is None:
            self.first_byte = self.elapsed()
            if self.on_first_byte is not None:
                self.on_first_byte(self.first_byte)
        self.received += len(data)
        self._tail = data if len(data) >= _TAIL_BYTES else self._tail[-_TAIL_BYTES:] + data
        self._deadline = self._loop.time() + self._silence_limit
        if self._behind is not None or self._writer is None or not self._writer.put(b"%x\r\n%b\r\n" % (len(data), data)):
            self._pass_on({"type": "http.response.body", "body": data, "more_body": True})

    def response_end(self) -> None:
        """The answer is whole."""
        self._answered = True
        self._pass_on(_LAST)
        self._end_in_turn(_End.COMPLETE)

    def response_failed(self, detail: str, *, untouched: bool) -> None:
        """The engine went away, or speaks no HTTP."""
        if untouched and self._scope["method"] in _IDEMPOTENT:
            self._end(_End.UNTOUCHED)
        elif self.status == CLIENT_LEFT:
            self._end(engine_unreachable(detail))
        else:
            self._end_in_turn(engine_unreachable(f"it ended in the middle of the response ({detail})"))

    def response_upgraded(self, headers: Headers, rest: bytes) -> None:
        """The engine changed the protocol: from here on bytes pass both ways, until either end closes."""
        protocol, connection = self._upgrade(), self._connection
        if protocol is None or connection is None or self._ending is not None:
            self._end(engine_unreachable("it changed the protocol without being asked"))
            return
        self._deadline = None
        self.status = 101
        passed = response_headers(headers, 101, self._gate.snapshot.headers, self.request_id)
        self._tunnel = Tunnel(protocol.transport, connection.transport, self._tunnel_ended)
        connection.hand_over(self._tunnel)
        protocol.take_over(upgrade_head(passed), self._tunnel)
        if rest:
            self._tunnel.from_engine(rest)

    def _tunnel_ended(self, client_left: bool) -> None:
        self._end(_End.CLIENT_LEFT if client_left else _End.COMPLETE)

    def _upgrade(self) -> Protocol | None:
        """The client's own connection, when it asks for a WebSocket."""
        extension = self._scope.get("extensions", {}).get(UPGRADE)
        return extension["connection"] if extension else None

    # --- a client that reads more slowly than the engine writes ---

    def _pass_on(self, message: Message) -> None:
        """To the client, now if it takes it; else the engine is held back, and a task sends what is left."""
        if self._behind is not None:
            self._behind.append(message)
            return
        try:
            rest = begun(self._send(message))
        except Exception as error:  # the server's objections to a response, as of a length that is not kept
            self._end(engine_unreachable(f"its response cannot be passed on ({type(error).__name__})"))
            return
        if isinstance(rest, Rest):
            self._behind = deque()
            self._deadline = None
            if self._connection is not None:
                self._connection.pause()
            self._catching_up = self._loop.create_task(self._catch_up(rest))

    async def _catch_up(self, rest: Rest[None]) -> None:
        try:
            await rest
            while self._behind:
                await self._send(self._behind.popleft())
        except Exception as error:
            self._end(engine_unreachable(f"its response cannot be passed on ({type(error).__name__})"))
            return
        self._behind = None
        if self._then is not None:
            self._end(self._then)
        elif self._connection is not None:
            self._deadline = self._loop.time() + self._silence_limit
            self._connection.resume()

    def _end_in_turn(self, ending: _Ending) -> None:
        """End after what the client has yet to take."""
        if self._behind is None:
            self._end(ending)
        else:
            self._then = ending

    # --- what else can end it ---

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answered and self._tunnel is None:
            self._end(_End.CLIENT_LEFT)

    def _expect_within(self, limit: float) -> None:
        self._silence_limit = limit
        self._deadline = due = self._loop.time() + limit
        if self._timer is None or self._timer_due > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_due = self._loop.call_at(due, self._check_silence), due

    def _check_silence(self) -> None:
        """One timer, moved lazily: chunks only note their deadline, None while the client is waited for."""
        now = self._loop.time()
        deadline = self._deadline
        if deadline is not None and self._connection is not None:
            deadline = max(deadline, self._connection.put_at + self._silence_limit)
        if deadline is not None and now >= deadline:
            self._end(engine_silent(self._silence_limit))
        else:
            self._timer_due = deadline or now + self._silence_limit
            self._timer = self._loop.call_at(self._timer_due, self._check_silence)
