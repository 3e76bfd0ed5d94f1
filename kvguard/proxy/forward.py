"""The forwarder: a pure ASGI app that relays every path and method to the engine while the gate is open.

A WebSocket comes as the HTTP request that asks for it (see `protocol.Protocol`): the gate, the headers and the counters
are those of any request, and it is in flight until it closes.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from kvguard.guard.gate import Gate
from kvguard.guard.surface import Tap
from kvguard.proxy.access_log import line
from kvguard.proxy.asgi import Receive, Scope, Send
from kvguard.proxy.ending import Outcome
from kvguard.proxy.exchange import Exchange
from kvguard.proxy.paths import route_label
from kvguard.proxy.upstream import Client, Limits, Upstream

if TYPE_CHECKING:  # what it imports is an extra
    from kvguard.proxy.tracing import Tracing

log = structlog.get_logger("kvguard")


class Observer(Protocol):
    """Told about each request, on the data plane's thread. Implementations must not block.

    Times are seconds since the request's headers arrived. `status` is 499 when the client left before an
    answer began. Every `request_started` is followed by exactly one `finished` with the same route.
    """

    def request_started(self, route: str) -> None:
        """A request arrived."""

    def first_byte(self, route: str, seconds: float) -> None:
        """The first byte of the engine's response body was handed to the client."""

    def finished(self, route: str, method: str, status: int, seconds: float, outcome: str) -> None:
        """The request ended, in whichever way."""


_OK = 200


class InFlight:
    """Counts requests on the data plane's loop; other threads may read `count` and wait for `idle`."""

    def __init__(self) -> None:
        self.count = 0
        self.idle = threading.Event()
        self.idle.set()

    def enter(self) -> None:
        """One more. Only on the loop's thread."""
        self.count += 1
        self.idle.clear()

    def leave(self) -> None:
        """One less. Only on the loop's thread."""
        self.count -= 1
        if self.count == 0:
            self.idle.set()


class Forwarder:
    """The ASGI app. Its HTTP client lives from lifespan startup to lifespan shutdown, on the serving loop."""

    def __init__(
        self,
        gate: Gate,
        upstream: Upstream,
        observer: Observer,
        limits: Limits | None = None,
        *,
        access_log: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self.gate = gate
        self.upstream = upstream
        self.observer = observer
        self.limits = limits or Limits()
        self.in_flight = InFlight()
        self.tap: Tap | None = None
        self._client: Client | None = None
        self._access_log = access_log
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI scope."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            raise RuntimeError(f"the forwarder has no use for an ASGI scope of type {scope['type']}")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._client is None:
            raise RuntimeError("the forwarder needs the ASGI lifespan protocol")
        route = route_label(scope["path"])
        span = None
        if self._tracing is not None:
            span, scope = self._tracing.begin(scope, route)
        on_first_byte = partial(self.observer.first_byte, route)
        exchange = Exchange(self.gate, self._client, self.limits, scope, receive, send, on_first_byte)
        self.in_flight.enter()
        self.observer.request_started(route)
        try:
            await exchange.run()
            if exchange.status == _OK and exchange.outcome is Outcome.OK:
                self._show(scope, exchange.body)
        finally:
            self.observer.finished(route, scope["method"], exchange.status, exchange.elapsed(), exchange.outcome)
            self.in_flight.leave()
            if self._access_log:
                log.info("request", **line(scope, exchange))
            if exchange.failure:
                log.warning("engine failed a request", route=route, status=exchange.status, failure=exchange.failure)
            if span is not None and self._tracing is not None:
                self._tracing.end(span, exchange, self.gate.snapshot.headers)

    def _show(self, scope: Scope, body: bytes) -> None:
        """To the tap, whose errors are never the client's."""
        tap = self.tap  # another thread may take it away
        if tap is None:
            return
        try:
            tap(scope["path"], scope["headers"], body)
        except Exception as error:  # its text could hold the request
            log.warning("an answered request could not be shown to probes", error=type(error).__name__)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._client = Client(self.upstream, self.limits)
        if self._tracing is not None:
            self._tracing.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._client.close()
        self._client = None
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        await send({"type": "lifespan.shutdown.complete"})
