"""A WebSocket between client and engine: bytes pass unchanged both ways, compression and control frames among them.

Only the boundaries of the engine's messages are followed, so that a replica that drains can say goodbye (close code 1001)
between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

GOING_AWAY = b"\x88\x02\x03\xe9"
"""A close frame of a server: code 1001, no reason (RFC 6455 §5.5.1)."""

_CLOSE = 0x8
_LINGER_S = 2.0


class Frames:
    """Follows the frames of one direction, whatever way they are cut into pieces."""

    def __init__(self) -> None:
        self._header = b""
        self._payload = 0
        self._fragmented = False

    @property
    def between_messages(self) -> bool:
        """Whether a frame of ours could stand here."""
        return not self._header and not self._payload and not self._fragmented

    def take(self, data: bytes, *, stop: bool) -> int:
        """How many of these bytes were followed: all, or with `stop` those up to the first end of a message."""
        position = 0
        while position < len(data):
            if stop and self.between_messages:
                return position
            if self._payload:
                step = min(self._payload, len(data) - position)
                self._payload -= step
                position += step
            else:
                self._header += data[position : position + 1]
                position += 1
                self._read_header()
        return position

    def _read_header(self) -> None:
        """A header's length follows from its second byte: 2, 4 or 10, and 4 more with a mask."""
        header = self._header
        if len(header) < 2:
            return
        short = header[1] & 0x7F
        extended = {126: 2, 127: 8}.get(short, 0)
        masked = 4 if header[1] & 0x80 else 0
        if len(header) < 2 + extended + masked:
            return
        self._payload = int.from_bytes(header[2 : 2 + extended]) if extended else short
        if not header[0] & 0x08:  # control frames may stand inside a fragmented message
            self._fragmented = not header[0] & 0x80
        self._header = b""


class Tunnel:
    """Both ends of one WebSocket. `ended` is called once; the owner then closes what is still open."""

    def __init__(self, client: asyncio.Transport, engine: asyncio.Transport, ended: Callable[[bool], None]) -> None:
        """`ended` is told whether it was the client that left."""
        self._client = client
        self._engine = engine
        self._ended = ended
        self._frames = Frames()
        self._leaving = False
        self._said_goodbye = False

    def from_client(self, data: bytes) -> None:
        """Bytes from the client; after the goodbye only its own is waited for."""
        if self._said_goodbye:
            if data[0] & 0x0F == _CLOSE:
                self._client.close()
        elif not self._engine.is_closing():
            self._engine.write(data)

    def from_engine(self, data: bytes) -> None:
        """Bytes from the engine."""
        if self._said_goodbye or self._client.is_closing():
            return
        followed = self._frames.take(data, stop=self._leaving)
        if followed:
            self._client.write(data[:followed] if followed < len(data) else data)
        if self._leaving:
            self._say_goodbye()

    def client_full(self, full: bool) -> None:
        """The client does not take more for now, or does again."""
        _hold(self._engine, full)

    def engine_full(self, full: bool) -> None:
        """The engine does not take more for now, or does again."""
        _hold(self._client, full)

    def client_lost(self) -> None:
        """The client's connection ended."""
        self._ended(not self._said_goodbye)

    def engine_lost(self) -> None:
        """The engine's connection ended: what it sent still leaves, then the client's is closed."""
        if not self._said_goodbye:
            self._client.close()
            self._ended(False)

    def go_away(self) -> None:
        """Tell the client to go elsewhere, as soon as the engine is not in the middle of a message."""
        self._leaving = True
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        if self._said_goodbye or not self._frames.between_messages or self._client.is_closing():
            return
        self._said_goodbye = True
        self._client.write(GOING_AWAY)
        self._engine.abort()
        _hold(self._client, False)
        # To close at once could reset the connection under a goodbye that is not read yet.
        asyncio.get_running_loop().call_later(_LINGER_S, self._client.close)


def _hold(transport: asyncio.Transport, hold: bool) -> None:
    if transport.is_closing():
        return
    if hold:
        transport.pause_reading()
    else:
        transport.resume_reading()
