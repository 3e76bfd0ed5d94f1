"""One client request and its upstream response, from the first byte to whichever ending comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from kvguard.guard.gate import Gate
from kvguard.proxy.asgi import Headers, Message, Receive, Scope, Send
from kvguard.proxy.connection import Connection
from kvguard.proxy.delivery import Delivery
from kvguard.proxy.ending import CLIENT_LEFT, End, Ending, Outcome, ResponseAborted
from kvguard.proxy.headers import REQUEST_ID, one_value, response_headers, takes_plain_text, upgrade_head
from kvguard.proxy.intake import engine_request_head, read_body, refusal_before_body, send_refusal
from kvguard.proxy.protocol import asks_for_upgrade
from kvguard.proxy.refusal import Refusal, engine_silent, engine_unreachable, error_event, gate_closed
from kvguard.proxy.silence import Silence
from kvguard.proxy.tunnel import Tunnel
from kvguard.proxy.upstream import Client, Limits, Unreachable

FirstByte = Callable[[float], None]
"""Told the seconds to the first byte of the engine's body, as it leaves for the client."""

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Exchange:
    """Owns the engine's connection until the end; giving it up is synchronous, so no cancellation interrupts it.

    The engine's bytes come as calls (`listener.Listener`) and leave at once; the task that runs this waits for the end. The
    server says that the client left only to a waiting receive() (uvicorn announces ASGI 2.3): a second task waits on it.
    """

    def __init__(
        self, gate: Gate, client: Client, limits: Limits, scope: Scope, receive: Receive, send: Send, on_first_byte: FirstByte
    ) -> None:
        self.status = CLIENT_LEFT
        self.outcome = Outcome.UPSTREAM_ERROR
        self.failure = ""
        self.first_byte: float | None = None
        self.body = b""
        self.received = 0
        self.request_id = one_value(scope["headers"], REQUEST_ID)
        self._gate = gate
        self._client = client
        self._limits = limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._on_first_byte = on_first_byte
        self._loop = asyncio.get_running_loop()
        self._started = monotonic()
        self._connection: Connection | None = None
        self._connecting: asyncio.Timeout | None = None
        self._tunnel: Tunnel | None = None
        self._headers: Headers = []
        self._tail = b""
        self._answered = False
        self._ending: Ending | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._delivery: Delivery
        self._silence: Silence

    def elapsed(self) -> float:
        """Seconds since the request's headers arrived."""
        return monotonic() - self._started  # the loop's own clock stands still within a turn, and counts milliseconds

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

    async def _forward(self, body: bytes) -> None:
        head = engine_request_head(self._scope, len(body), self._client, websocket=asks_for_upgrade(self._scope) is not None)
        self._delivery = Delivery(self, self._scope, self._send)
        self._silence = Silence(self._loop, self.end)
        watcher = self._loop.create_task(self._watch_client())
        try:
            ending = await self._ask(head, body)
        finally:
            self._answered = True
            watcher.cancel()
            self._silence.cancel()
            self._delivery.stop()
            self._give_up_connection()
            del self._delivery, self._silence  # they know us: what is left would be garbage in a circle
        if ending is End.CLIENT_LEFT:
            self.outcome = Outcome.CLIENT_DISCONNECTED
        elif ending is End.COMPLETE:
            self.outcome = Outcome.OK
        elif isinstance(ending, Refusal):
            await self._fail(ending)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answered and self._tunnel is None:
            self.end(End.CLIENT_LEFT)

    async def _ask(self, head: bytes, body: bytes) -> Ending:
        """Put the request to the engine and wait for the end. An idle connection may just have been closed there."""
        self._silence.expect_within(self._limits.first_byte_s)
        connection = self._client.idle()
        if connection is not None:
            ending = await self._ask_on(connection, head, body)
            if ending is not End.UNTOUCHED:
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
            return self._ending or engine_silent(self._silence.limit)
        finally:
            self._connecting = None
        if self._ending is not None:
            connection.abort()
            return self._ending
        return await self._ask_on(connection, head, body)

    async def _ask_on(self, connection: Connection, head: bytes, body: bytes) -> Ending:
        self._connection = self._silence.connection = connection
        connection.ask(self, head, body, head_only=self._scope["method"] == "HEAD")
        await self._ended
        return self._ending or End.CLIENT_LEFT

    def _give_up_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        connection.leave()
        self.received += connection.put_bytes
        self._tail = connection.last_put[:-2] or self._delivery.tail
        if self._ending is End.COMPLETE and self._tunnel is None:
            self._client.put_back(connection)
        else:
            connection.abort()

    async def _fail(self, refusal: Refusal) -> None:
        """Tell the client that the engine failed, in the way that is still open."""
        snapshot = self._gate.snapshot
        if self.status == CLIENT_LEFT and not snapshot.open:
            refusal = gate_closed(snapshot)  # an early /metrics, or a gate that closed meanwhile: its reason says more
        else:
            self.failure = refusal.message
        if self.status == CLIENT_LEFT:
            await self._refuse(refusal, Outcome.UPSTREAM_ERROR)
            return
        if not takes_plain_text(self._headers):
            raise ResponseAborted(refusal.message)
        await self._send({"type": "http.response.body", "body": error_event(refusal, self._tail), "more_body": True})
        await self._send(_LAST)

    # --- what the connection calls (listener.Listener) ---

    def response_head(self, status: int, headers: Headers) -> None:
        """The engine's answer begins."""
        if not 200 <= status < 600:
            self.end(engine_unreachable(f"it sent status {status}"))
            return
        self._silence.expect_within(self._limits.between_chunks_s)
        self._headers = response_headers(headers, status, self._gate.snapshot.headers, self.request_id)
        self.status = status
        self._delivery.begin(status, self._headers, self._connection)

    def response_read(self) -> None:
        """What came together leaves together."""
        self._delivery.flush()

    def response_body(self, data: bytes) -> None:
        """The next chunk leaves as it came."""
        if self.first_byte is None:
            self.first_byte = self.elapsed()
            self._on_first_byte(self.first_byte)
        self.received += len(data)
        self._silence.heard()
        self._delivery.pass_chunk(data)

    def response_end(self) -> None:
        """The answer is whole."""
        self._answered = True
        self._delivery.pass_on(_LAST)
        self._delivery.end_in_turn(End.COMPLETE)

    def response_failed(self, detail: str, *, untouched: bool) -> None:
        """The engine went away, or speaks no HTTP."""
        if untouched and self._scope["method"] in _IDEMPOTENT:
            self.end(End.UNTOUCHED)
        elif self.status == CLIENT_LEFT:
            self.end(engine_unreachable(detail))
        else:
            self._delivery.end_in_turn(engine_unreachable(f"it ended in the middle of the response ({detail})"))

    def response_upgraded(self, headers: Headers, rest: bytes) -> None:
        """The engine changed the protocol: from here on bytes pass both ways, until either end closes."""
        protocol, connection = asks_for_upgrade(self._scope), self._connection
        if protocol is None or connection is None or self._ending is not None:
            self.end(engine_unreachable("it changed the protocol without being asked"))
            return
        self._silence.suspend()
        self.status = 101
        passed = response_headers(headers, 101, self._gate.snapshot.headers, self.request_id)
        self._tunnel = protocol.tunnel_to(connection, upgrade_head(passed), rest, self._tunnel_ended)

    def _tunnel_ended(self, client_left: bool) -> None:
        self.end(End.CLIENT_LEFT if client_left else End.COMPLETE)

    # --- what the delivery calls (delivery.Source) ---

    def hold_back(self) -> None:
        """The client reads more slowly than the engine writes; its time is not the engine's silence."""
        self._silence.suspend()
        if self._connection is not None:
            self._connection.pause()

    def go_on(self) -> None:
        """The client has caught up."""
        if self._connection is not None:
            self._silence.heard()
            self._connection.resume()

    def end(self, ending: Ending) -> None:
        """The first ending counts."""
        if self._ending is not None:
            return
        self._ending = ending
        if not self._ended.done():
            self._ended.set_result(None)
        if self._connecting is not None:
            self._connecting.reschedule(self._loop.time())
