"""Who hears of what an engine's connection brings."""

from __future__ import annotations

from typing import Protocol

from kvguard.proxy.asgi import Headers


class Listener(Protocol):
    """Whoever asked: told of the head, each piece of the body, and the end; or once, at any point, of a failure or upgrade."""

    def response_head(self, status: int, headers: Headers) -> None:
        """The response's status and headers, as they came."""

    def response_body(self, data: bytes) -> None:
        """One chunk of the response, or what arrived of it, without its framing."""

    def response_read(self) -> None:
        """All of what was read at once has been told."""

    def response_end(self) -> None:
        """The response is complete."""

    def response_failed(self, detail: str, *, untouched: bool) -> None:
        """No more will come, and why. `untouched`: the connection had been used before, and not a byte came back."""

    def response_upgraded(self, headers: Headers, rest: bytes) -> None:
        """The engine changed the protocol; `rest` are the new protocol's first bytes."""


class Relay(Protocol):
    """What takes the bytes of an upgraded connection."""

    def from_engine(self, data: bytes) -> None:
        """Bytes from the engine."""

    def engine_full(self, full: bool) -> None:
        """The engine does not take more for now, or does again."""

    def engine_lost(self) -> None:
        """The connection ended."""
