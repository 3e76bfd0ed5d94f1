"""What the guard needs of the data plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Tap = Callable[[str, Sequence[tuple[bytes, bytes]], bytes], None]
"""Shown path, headers and body of each request that was answered 200, after the client has the whole answer. On the
data plane's thread: it must return at once, and must not raise."""


class Surface(Protocol):
    """The data plane as the guard sees it; its calls return at once or are made on a worker thread."""

    @property
    def alive(self) -> bool:
        """Whether it serves; False without having been stopped means that it failed."""

    @property
    def in_flight(self) -> int:
        """Requests in flight now."""

    def stop_accepting(self) -> None:
        """Close the listening sockets; requests in flight go on."""

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False when the time ran out."""

    def set_tap(self, tap: Tap | None) -> None:
        """Show each answered request to `tap` from now on."""
