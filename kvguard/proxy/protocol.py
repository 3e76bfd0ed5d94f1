"""uvicorn's HTTP protocol with what it lacks: limits on a request's head, and a way to give the connection away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvguard.proxy.asgi import Scope
from kvguard.proxy.connection import Connection
from kvguard.proxy.headers import asks_for_websocket, request_head
from kvguard.proxy.refusal import MALFORMED, NO_TUNNELS, SLOW_HEAD, Refusal, head_too_large, refusal_wire
from kvguard.proxy.tunnel import Tunnel
from kvguard.proxy.upstream import Limits
from kvguard.proxy.writer import PUT, Writer

UPGRADE = "kvguard.upgrade"
"""The ASGI extension under which a request that asks for a WebSocket carries its own connection, a `Protocol`."""

_WAITING_BYTES = 64 * 2**10
_WAITING_REQUESTS = 16


class _Nowhere(list[tuple[bytes, bytes]]):
    """Where a request's trailers go: behind a body nothing may be added to its headers."""

    def append(self, _: tuple[bytes, bytes]) -> None:
        """Keep nothing."""


_NOWHERE = _Nowhere()


class Protocol(HttpToolsProtocol):
    """One client connection. uvicorn 0.54 reads a head of any size for ever, and drops upgrades it cannot make itself."""

    limits: Limits

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self._in_head = False
        self._head_bytes = 0
        self._arriving = 0
        self._begun = 0
        self._inside_body = False
        self._carried = b""
        self._head_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._websocket = False
        self._waiting = b""
        self._tunnel: Tunnel | None = None

    # --- what the forwarder may do with it ---

    def tunnel_to(self, engine: Connection, head: bytes, rest: bytes, ended: Callable[[bool], None]) -> Tunnel:
        """Answer the upgrade with `head`; from now on bytes pass between client and engine, whose first ones are `rest`."""
        tunnel = Tunnel(self.transport, engine.transport, ended)
        engine.hand_over(tunnel)
        self._unset_keepalive_if_required()
        self._tunnel = tunnel
        self.transport.write(head)
        waiting, self._waiting = self._waiting, b""
        if waiting:
            tunnel.from_client(waiting)
        if not self.transport.is_closing():
            self.transport.resume_reading()
        if rest:
            tunnel.from_engine(rest)
        return tunnel

    # --- asyncio's calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._head_timer = self.loop.call_later(self.limits.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            # uvicorn tells the request that came last; the one that runs can be one before it.
            self._running.disconnected = True
            self._running.message_event.set()
        if self._tunnel is not None:
            self._tunnel.client_lost()

    def data_received(self, data: bytes) -> None:
        if self._tunnel is not None:
            self._tunnel.from_client(data)
            return
        if self._websocket:
            self._waiting += data
            if len(self._waiting) > _WAITING_BYTES:
                self.transport.pause_reading()
            return
        self._unset_keepalive_if_required()
        self._arriving = len(data)
        self._begun = 0
        alone = not self._inside_body
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._waiting = data[upgrade.args[0] :]
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _HeadTooLarge):
                self._refuse(head_too_large(self.limits.head_bytes))
            elif isinstance(cause, _WantsTunnel):
                self._refuse(NO_TUNNELS)
            elif isinstance(cause, _OtherUpgrade) and alone and self._begun <= 1:
                _, _, rest = (self._carried + data).partition(b"\r\n\r\n")
                self._carried = b""
                self._read_again(rest)
            else:
                self._refuse(MALFORMED)
            return
        if self._in_head:
            self._carried = (self._carried + data)[-3:]
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.head_bytes:
                self._refuse(head_too_large(self.limits.head_bytes))
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(self.limits.head_s, self._head_is_late)
        else:
            self._carried = b""

    def _read_again(self, rest: bytes) -> None:
        """Read a request that offers another protocol without the offer, since nobody here takes it.

        httptools takes its body for that protocol's first bytes, and uvicorn loses it: Java's client offers h2c with every
        POST. `rest` is what follows the head.
        """
        target, headers, method = self.url, self.headers, self.parser.get_method().decode()
        kept = [pair for pair in headers if pair[0] not in (b"upgrade", b"connection", b"http2-settings")]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(request_head(method, target, kept) + rest)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._tunnel is not None:
            self._tunnel.client_full(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._tunnel is not None:
            self._tunnel.client_full(False)

    def shutdown(self) -> None:
        """uvicorn's call: no further request. A WebSocket has no end of its own to wait for."""
        if self._tunnel is not None:
            self._tunnel.go_away()
        else:
            super().shutdown()

    # --- httptools' calls ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._begun += 1

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._stop_head_timer()
        if self._arriving + self._head_bytes > self.limits.head_bytes and self._head_size() > self.limits.head_bytes:
            raise _HeadTooLarge
        self._inside_body = True
        if self.parser.should_upgrade():
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise _WantsTunnel
            if method != b"GET" or not asks_for_websocket(self.headers):
                raise _OtherUpgrade
            self._websocket = True
            self.scope["extensions"] = {UPGRADE: {"connection": self}}
            super().on_headers_complete()
            self.cycle.keep_alive = False  # refused upgrades end the connection: what follows may not be HTTP
            return
        super().on_headers_complete()
        self.headers = _NOWHERE
        self.scope["extensions"] = {PUT: {"writer": Writer(self.cycle)}}
        if self.pipeline and len(self.pipeline) <= _WAITING_REQUESTS:
            self.flow.resume_reading()  # who does not read does not see the client leave

    def on_message_complete(self) -> None:
        self._inside_body = False
        super().on_message_complete()

    # --- uvicorn's calls ---

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse(SLOW_HEAD, answer=self._in_head)

    def _refuse(self, refusal: Refusal, *, answer: bool = True) -> None:
        """End the connection, with an answer unless another request is to be answered first."""
        self._stop_head_timer()
        if answer and self._is_next() and not self.transport.is_closing():
            self.transport.write(refusal_wire(refusal))
        self.transport.close()

    def _is_next(self) -> bool:
        """Whether the next answer on this connection is that of the request that is arriving."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        return self._inside_body and cycle is self._running and not cycle.response_started


class _HeadTooLarge(Exception):
    """Carried through httptools to its caller."""


class _WantsTunnel(Exception):
    """The same, for CONNECT."""


class _OtherUpgrade(Exception):
    """The same, for an upgrade to anything but a WebSocket."""


def asks_for_upgrade(scope: Scope) -> Protocol | None:
    """The client's own connection, when this request asks for a WebSocket."""
    extension = scope.get("extensions", {}).get(UPGRADE)
    return extension["connection"] if extension else None
