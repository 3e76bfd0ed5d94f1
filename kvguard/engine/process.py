"""The engine as a child process: its own process group, its log relayed and read, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvguard.engine.relay import Relay
from kvguard.engine.run_directory import process_group_members
from kvguard.vocabulary import EngineFailed

_PR_SET_CHILD_SUBREAPER = 36
_TRACKER_ROUNDS = 75  # of 20 ms: how long the engine's resource tracker may take to clean up by itself
_CLEAR_ROUNDS = 1000  # of 20 ms: a killed process gives back its gigabytes first, which takes seconds on a busy machine
_STARTED: set[int] = set()  # children that we started ourselves and wait for
_LIVE: set[int] = set()  # engines that were started and are not cleared yet
_ADOPTS = threading.Event()  # set once every other child of ours is an orphan of the engine

# Runs for 20 ms before it becomes the engine: ask the kernel to send the engine SIGTERM when kvguard dies
# (vLLM then ends its own workers), and stop if kvguard has died already.
_BECOME_ENGINE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def become_subreaper() -> None:
    """Orphans of the engine become our children, so that they can be found and reaped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _ADOPTS.set()


def ending(code: int) -> str:
    """How a process ended, in words: "exit code 1", "signal SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class EngineProcess:
    """A started engine. Its standard output and error pass through unchanged, and to `on_bytes` for reading.

    `on_bytes(stream, data)` is called on reader threads with what was relayed; `secrets` are values that must
    not be printed (vLLM 0.27.1 prints the API key). `prefix` is put before each line that is passed on.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        on_bytes: Callable[[str, bytes], None],
        secrets: Sequence[str],
        outputs: tuple[int, int] = (1, 2),
        prefix: bytes = b"",
    ) -> None:
        command = [sys.executable, "-I", "-S", "-c", _BECOME_ENGINE, str(os.getpid()), *argv]
        try:
            self._child = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                process_group=0,
            )
        except OSError as error:
            raise EngineFailed(f"engine {argv[0]}: could not be started: {error.strerror}") from error
        self.pid = self._child.pid
        _STARTED.add(self.pid)
        _LIVE.add(self.pid)
        self._relays = [
            Relay(name, pipe, output, on_bytes, secrets, prefix)
            for name, pipe, output in zip(("stdout", "stderr"), (self._child.stdout, self._child.stderr), outputs, strict=True)
            if pipe is not None
        ]
        self._ended = threading.Event()
        self._cleared = False
        threading.Thread(target=self._wait, name="engine-wait", daemon=True).start()

    def _wait(self) -> None:
        self._child.wait()
        self._ended.set()

    @property
    def exit_code(self) -> int | None:
        """The API server's exit code (negative: signal), None while it runs."""
        return self._child.returncode if self._ended.is_set() else None

    async def wait(self) -> int:
        """Wait until the API server has ended; returns its exit code."""
        while not self._ended.is_set():
            await asyncio.sleep(0.05)
        return int(self._child.returncode)

    async def stop(self, grace: float) -> int:
        """SIGTERM, then after `grace` seconds SIGKILL, then everything the engine left. Returns the exit code."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), max(grace, 0.1))
        await self.clear()
        return await self.wait()

    async def clear(self) -> None:
        """Kill and reap every process of the engine that still exists, and finish relaying its log.

        multiprocessing's resource tracker is left to end by itself first: it unlinks the shared memory of those killed.
        Once done it is not done again: the engine's process id may be another program's by then.
        """
        if self._cleared:
            return
        for round_ in range(_CLEAR_ROUNDS):
            left = self._left()
            for pid in left if round_ >= _TRACKER_ROUNDS else (pid for pid in left if not _is_resource_tracker(pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            reap_adopted()
            if not left and self._ended.is_set():
                self._cleared = True
                break
            await asyncio.sleep(0.02)
        _LIVE.discard(self.pid)
        for relay in self._relays:
            await asyncio.to_thread(relay.finish, 2.0)

    def _left(self) -> list[int]:
        """Processes of the engine: members of its group, and orphans that we adopted, whatever their group.

        An orphan cannot be told by its environment: vLLM's process titles overwrite it (setproctitle). While another
        engine of ours lives, one outside this group may be that engine's, and is left to the last engine's end.
        """
        orphans = [] if _LIVE - {self.pid} else _adopted()
        descendants = [child for pid in orphans for child in _tree(pid)]
        return sorted(set(process_group_members(self.pid)) | {pid for pid in descendants if _lives(pid)})


def children_of(pid: int) -> list[int]:
    """Direct children of a process, zombies included (from every process's stat: not all kernels list children)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(entry.name))
    return found


def _adopted() -> list[int]:
    """Orphans that became our children; none while we are no subreaper, whose children are all its own."""
    return [pid for pid in children_of(os.getpid()) if pid not in _STARTED] if _ADOPTS.is_set() else []


def _tree(pid: int) -> list[int]:
    return [pid, *(grandchild for child in children_of(pid) for grandchild in _tree(child))]


def _is_resource_tracker(pid: int) -> bool:
    """Whether this is multiprocessing's tracker, which unlinks shared memory once everybody else is gone."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _lives(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def reap_adopted() -> None:
    """Collect zombies among our children that no one else waits for."""
    for pid in _adopted():
        if not _lives(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
