"""One client request and its upstream response, from the first byte to whichever ending comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, StrEnum

import aiohttp
from yarl import URL

from kvguard.guard.gate import Gate
from kvguard.proxy.asgi import Headers, Receive, Scope, Send
from kvguard.proxy.headers import request_headers, response_headers, takes_plain_text
from kvguard.proxy.intake import raw_path, read_body, refusal_before_body, send_refusal
from kvguard.proxy.refusal import BAD_REQUEST, Refusal, engine_silent, engine_unreachable, error_event, gate_closed
from kvguard.proxy.upstream import UPSTREAM_FAILURES, Client, Limits, failure_text, tie_body_to_connection

CLIENT_LEFT = 499
"""Reported as the status when the client left before an answer began (nginx's number)."""

_TAIL_BYTES = 4


class Outcome(StrEnum):
    """How a request ended. `refused` is kvguard's own answer: gate closed, private path, body too large."""

    OK = "ok"
    CLIENT_DISCONNECTED = "client_disconnected"
    UPSTREAM_ERROR = "upstream_error"
    REFUSED = "refused"


class ResponseAborted(Exception):
    """Raised out of the app so that the server cuts the connection: what was sent is not a whole response."""


class _Stop(Enum):
    CLIENT_LEFT = "client left"
    ENGINE_SILENT = "engine silent"


class Exchange:
    """Owns the upstream response for its whole life; closing it is synchronous, so no cancellation interrupts it.

    A server says that the client left only to a waiting receive() (uvicorn announces ASGI 2.3), so the request
    body is read first and a second task then waits on receive() while this one works with the engine. Whatever
    stops the work, a client that left or an engine that is silent, does so by expiring one timeout scope.
    """

    def __init__(self, gate: Gate, client: Client, limits: Limits, *, scope: Scope, receive: Receive, send: Send) -> None:
        self.status = CLIENT_LEFT
        self.outcome = Outcome.UPSTREAM_ERROR
        self.failure = ""
        self.on_first_byte: Callable[[float], None] = lambda _: None
        self._gate = gate
        self._client = client
        self._limits = limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._response: aiohttp.ClientResponse | None = None
        self._untie: Callable[[], None] = lambda: None
        self._headers: Headers = []
        self._tail = b""
        self._answered = False
        self._stopped_by: _Stop | None = None
        self._work = asyncio.timeout(None)
        self.body = b""
        self._silence_limit = limits.first_byte_s
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None

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
        await send_refusal(refusal, self._gate.snapshot, self._receive, self._send)

    # --- with the engine ---

    async def _forward(self, body: bytes) -> None:
        try:
            url = self._client.url(raw_path(self._scope), self._scope["query_string"].decode())
            headers = request_headers(self._scope["headers"], len(body), self._client.host)
        except ValueError:
            await self._refuse(BAD_REQUEST)
            return
        watcher: asyncio.Task[None] | None = None
        failed: Refusal | None = None
        try:
            async with self._work:
                watcher = self._loop.create_task(self._watch_client())
                failed = await self._relay(url, headers, body)
        except TimeoutError:
            if self._stopped_by is _Stop.ENGINE_SILENT:
                failed = engine_silent(self._silence_limit)
        finally:
            self._answered = True
            if watcher is not None:
                watcher.cancel()
            if self._timer is not None:
                self._timer.cancel()
            self._untie()
            if self._response is not None:
                self._response.close()
        if self._stopped_by is _Stop.CLIENT_LEFT:
            self.outcome = Outcome.CLIENT_DISCONNECTED
        elif failed is not None:
            await self._fail(failed)

    async def _relay(self, url: URL, headers: list[tuple[str, str]], body: bytes) -> Refusal | None:
        """Engine to client. None when the response is complete, else why it is not."""
        self._expect_within(self._limits.first_byte_s)
        try:
            response = await self._client.request(self._scope["method"], url, headers, body)
        except UPSTREAM_FAILURES as error:
            return engine_unreachable(failure_text(error))
        self._response = response
        self._untie = tie_body_to_connection(response)
        if not 200 <= response.status < 600:
            return engine_unreachable(f"it sent status {response.status}")
        self._expect_within(self._limits.between_chunks_s)
        self._deadline = None
        self._headers = response_headers(response.raw_headers, response.status, self._gate.snapshot.headers)
        self.status = response.status
        await self._send({"type": "http.response.start", "status": response.status, "headers": self._headers})
        failed = await self._relay_body(response.content)
        if failed is None:
            self._answered = True
            self.outcome = Outcome.OK
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return failed

    async def _relay_body(self, content: aiohttp.StreamReader) -> Refusal | None:
        """Each chunk of the engine's as one message, as it comes."""
        failed: Refusal | None = None
        first = True
        while True:
            self._deadline = self._loop.time() + self._silence_limit
            try:
                chunk, _ = await content.readchunk()
            except UPSTREAM_FAILURES as error:
                if failed is not None:
                    return failed
                failed = engine_unreachable(f"it ended in the middle of the response ({failure_text(error)})")
                # aiohttp 3.14 raises before it hands over what had arrived: clear the error and read that first.
                content.set_exception(None)  # type: ignore[arg-type]
                content.feed_eof()
                continue
            self._deadline = None
            if chunk:
                if first:
                    first = False
                    self.on_first_byte(self.elapsed())
                self._tail = (self._tail + chunk[-_TAIL_BYTES:])[-_TAIL_BYTES:]
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            elif content.at_eof():
                return failed

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
        self.outcome = Outcome.UPSTREAM_ERROR
        if not takes_plain_text(self._headers):
            raise ResponseAborted(refusal.message)
        await self._send({"type": "http.response.body", "body": error_event(refusal, self._tail), "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    # --- what can stop the work ---

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answered:
            self._stop(_Stop.CLIENT_LEFT)

    def _expect_within(self, limit: float) -> None:
        self._silence_limit = limit
        self._deadline = self._loop.time() + limit
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(limit, self._check_silence)

    def _check_silence(self) -> None:
        """One timer a phase, moved lazily: chunks only note their deadline, None while the client is waited for."""
        now = self._loop.time()
        if self._deadline is not None and now >= self._deadline:
            self._stop(_Stop.ENGINE_SILENT)
        else:
            self._timer = self._loop.call_at(self._deadline or now + self._silence_limit, self._check_silence)

    def _stop(self, reason: _Stop) -> None:
        if self._stopped_by is None:
            self._stopped_by = reason
            self._work.reschedule(self._loop.time())
