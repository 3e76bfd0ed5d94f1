"""One HTTP/1.1 connection to the engine: a request goes out, its response comes back as calls on whoever asked.

Calls and not a stream to read, because a chunk then costs one pass through the loop in place of two. httptools parses; what
it hands over is what came, undecoded but for the transfer coding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httptools

from kvguard.proxy.asgi import Headers
from kvguard.proxy.listener import Listener, Relay

_ONE_WRITE = 16 * 2**10  # below this a copy costs less than a second write
_MOST_HEADERS = 1000
_MOST_HEADER_BYTES = 2**20
_BODILESS = frozenset({204, 304})
_CHUNK_SIZES = {text % size: size for size in range(1, 4096) for text in (b"%x", b"%X")}
"""The lines before chunks as servers write them; larger chunks and other spellings are the parser's."""


class Connection(asyncio.Protocol):
    """Belongs to one exchange at a time, which returns it to the pool or aborts it.

    `put` may be set once the response's head is there. A read that is exactly one whole chunk, framing and all, then goes to
    it and to nobody else, as long as it returns True: most of a stream is that, and what it costs is the cost of the hop.
    `put_at` is the loop's time of the last one, `put_bytes` the sum, `last_put` the last one itself, empty when another
    piece came after it.
    """

    def __init__(self, forget: Callable[[Connection], None]) -> None:
        self.idle_since = 0.0
        self.transport: asyncio.Transport
        self._forget = forget
        self._parser = httptools.HttpResponseParser(self)
        self._listener: Listener | None = None
        self._relay: Relay | None = None
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._requests = 0
        self._head_only = False
        self._reset()

    def _reset(self) -> None:
        self._headers: Headers = []
        self._header_bytes = 0
        self._in_head = True
        self._in_trailer = False
        self._until_close = False
        self._heard = False
        self._complete = False
        self._keep_alive = True
        self._between_chunks = False
        self._aligned = False
        self.put: Callable[[bytes], bool] | None = None
        self.put_at = 0.0
        self.put_bytes = 0
        self.last_put = b""

    # --- for its owner ---

    @property
    def closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._closing or self.transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether another request can follow: the response ended properly and all of the request is sent."""
        return self._complete and self._keep_alive and not self.closing and not self.transport.get_write_buffer_size()

    def ask(self, listener: Listener, head: bytes, body: bytes, *, head_only: bool) -> None:
        """Send a request; `head_only` for HEAD, whose response has no body whatever it says."""
        self._reset()
        self._listener = listener
        self._head_only = head_only
        self._requests += 1
        if len(body) < _ONE_WRITE:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    def leave(self) -> None:
        """The owner hears no more of it."""
        self._listener = None
        self.put = None

    def pause(self) -> None:
        """Stop reading: the client is behind."""
        if not self.closing:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if not self.closing:
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once, whatever is still to be written."""
        self._closing = True
        self._listener = None
        self._relay = None
        self.put = None
        self.transport.abort()

    def hand_over(self, relay: Relay) -> None:
        """From now on its bytes go to `relay`."""
        self._relay = relay

    # --- asyncio's calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's call."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """asyncio's call."""
        if self._aligned and self.put is not None:
            line = data.find(b"\r\n")
            size = len(data) - line - 4
            if _CHUNK_SIZES.get(data[:line]) == size and data.endswith(b"\r\n") and self.put(data):
                self.put_at = self._loop.time()
                self.put_bytes += size
                self.last_put = data
                return
        if self._relay is not None:
            self._relay.from_engine(data)
            return
        listener = self._listener
        if listener is None:
            self._forget(self)
            self.abort()
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
            listener.response_read()
            # Whatever ends a line after a chunk's end is the next chunk's header, so this is a boundary.
            self._aligned = self._between_chunks and data.endswith(b"\r\n")
        except httptools.HttpParserUpgrade as upgrade:
            listener.response_upgraded(self._headers, data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            listener.response_read()
            self._keep_alive = False
            self._fail(f"it does not speak HTTP ({type(error).__name__})")

    def pause_writing(self) -> None:
        """asyncio's call."""
        if self._relay is not None:
            self._relay.engine_full(True)

    def resume_writing(self) -> None:
        """asyncio's call."""
        if self._relay is not None:
            self._relay.engine_full(False)

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio's call."""
        self._closing = True
        if self._relay is not None:
            relay, self._relay = self._relay, None
            relay.engine_lost()
        elif self._listener is None:
            self._forget(self)
        elif self._until_close and error is None:
            self._finish()
        elif not self._complete:
            self._fail(f"it closed the connection ({type(error).__name__})" if error else "it closed the connection")

    # --- httptools' calls ---

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools' call; trailers come this way too, and end here."""
        if not self._in_head:
            return
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MOST_HEADER_BYTES or len(self._headers) >= _MOST_HEADERS:
            raise ValueError("more headers than any response needs")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """httptools' call."""
        status = self._parser.get_status_code()
        if self._complete:
            raise ValueError("a second response to one request")
        if self._listener is None or (status == 101 and self._parser.should_upgrade()):
            return
        if 100 <= status < 200 and status != 101:
            self._headers = []
            return
        self._in_head = False
        self._keep_alive = self._parser.should_keep_alive()
        names = {name for name, _ in self._headers}
        self._until_close = not (
            self._head_only or status in _BODILESS or b"content-length" in names or b"transfer-encoding" in names
        )
        self._listener.response_head(status, self._headers)
        if self._head_only:
            # httptools cannot be told that no body follows.
            self._parser = httptools.HttpResponseParser(self)
            self._finish()

    def on_body(self, data: bytes) -> None:
        """httptools' call."""
        if self._listener is not None and not self._complete:
            self.last_put = b""
            self._listener.response_body(data)

    def on_chunk_header(self) -> None:
        """httptools' call."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """httptools' call."""
        self._between_chunks = True

    def on_message_complete(self) -> None:
        """httptools' call, after interim responses too."""
        if not self._in_head:
            self._finish()

    def _finish(self) -> None:
        if self._listener is not None and not self._complete:
            self._complete = True
            self._listener.response_end()

    def _fail(self, detail: str) -> None:
        if self._listener is not None and not self._complete:
            listener, self._listener = self._listener, None
            listener.response_failed(detail, untouched=self._requests > 1 and not self._heard)
