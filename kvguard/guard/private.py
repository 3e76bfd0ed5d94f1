"""A guarded engine that serves nobody: started and proven as any, then asked by us over its private socket, and stopped."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from kvguard.engine.client import EngineClient
from kvguard.engine.run_directory import RunDirectory
from kvguard.evidence.replies import Limits
from kvguard.guard.board import Board
from kvguard.guard.lifecycle import Guard
from kvguard.guard.prepare import Prepared, plan_for
from kvguard.guard.settings import Settings
from kvguard.guard.surface import Tap
from kvguard.policy.models import Policy

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Work = Callable[[EngineClient, str, Limits], Coroutine[Any, Any, None]]
"""What is done once the engine is proven: its client, the secret of the reader inside, and its limits."""


class NoSurface:
    """The data plane of an engine that serves nobody."""

    alive, in_flight = True, 0

    def stop_accepting(self) -> None:
        """Nothing is accepted."""

    def wait_idle(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Nothing is in flight."""
        return True

    def set_tap(self, tap: Tap | None) -> None:
        """There is no traffic."""


def run_privately(
    prepared: Prepared,
    policy: Policy | None,
    argv: Sequence[str],
    env: Mapping[str, str],
    settings: Settings,
    board: Board,
    work: Work,
    outputs: tuple[int, int],
) -> int:
    """Live this engine's life until `work` is done or a signal comes; returns the guard's exit code.

    The engine's own output goes to the two descriptors of `outputs`. A signal stops the engine; signal handlers are then put
    back as they were and get that signal, so that it also stops what would come next, whenever it came. (asyncio alone would
    leave SIGTERM deadly while the rest is cleared away.)
    """
    came: list[int] = []

    async def live(run_directory: RunDirectory) -> int:
        plan = plan_for(prepared, run_directory, env, colour=False)
        for name, content in plan.files.items():
            run_directory.write(name, content)
        guard = Guard(
            prepared,
            plan,
            policy,
            settings,
            board,
            NoSurface(),
            run_directory,
            argv=tuple(argv),
            started=time.monotonic(),
            work=work,
            outputs=outputs,
        )
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            came.append(number)
            guard.request_stop()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            return await guard.run()
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, lambda number, _: came.append(number))

    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with RunDirectory(env) as run_directory:
            return asyncio.run(live(run_directory))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
