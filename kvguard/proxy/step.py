"""Start a coroutine without a task or a timer: most sends and receives never wait, and either would cost more than they do."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Rest(Generic[T]):
    """A coroutine that has begun and waits; await it, once, to finish it."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], waiting: Any) -> None:
        self._coroutine = coroutine
        self._waiting = waiting

    def __await__(self) -> Generator[Any, Any, T]:
        """What `yield from` does, from the second step on."""
        coroutine, waiting = self._coroutine, self._waiting
        while True:
            thrown: BaseException | None = None
            sent: Any = None
            try:
                sent = yield waiting
            except BaseException as error:  # a cancellation among them: the coroutine's to handle
                thrown = error
            try:
                waiting = coroutine.send(sent) if thrown is None else coroutine.throw(thrown)
            except StopIteration as done:
                return cast(T, done.value)


def begun(awaitable: Awaitable[T]) -> T | Rest[T]:
    """Run a coroutine as far as it goes at once: its result, or what is left of it. What it raises is raised here."""
    coroutine = cast(Coroutine[Any, Any, T], awaitable)
    try:
        waiting = coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    return Rest(coroutine, waiting)
