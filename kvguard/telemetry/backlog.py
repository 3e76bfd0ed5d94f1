"""A thread of its own for what can wait, so that no request and no loop waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST_WAITING = 10_000


class Backlog(Generic[T]):
    """`put` from any thread; `work` is called on the backlog's own, from `start` to `close`, and must not raise."""

    def __init__(self, name: str, work: Callable[[T], None]) -> None:
        self._work = work
        self._waiting: deque[T] = deque()
        self._something = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, item: T, *, always: bool = False) -> bool:
        """Hand over one item, at once; False when the thread is too far behind to take it, unless it takes it `always`."""
        if len(self._waiting) >= _MOST_WAITING and not always:
            return False
        self._waiting.append(item)
        if not self._something.is_set():
            self._something.set()
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Do what is left, for so long at most."""
        self._closed = True
        self._something.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._something.wait()
            self._something.clear()
            while self._waiting:
                self._work(self._waiting.popleft())
            if self._closed:
                return
