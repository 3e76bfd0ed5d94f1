"""Passes one of the engine's output streams on, byte for byte and at once, and shows it to a reader.

Two threads a stream: one reads the pipe, so that the engine never waits for us; one writes, so that a blocked
terminal or log collector stalls nothing but itself. Beyond a bounded backlog the oldest output is dropped and
counted. Values known to be secret are masked even when they arrive in pieces.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

MASK = b"[redacted]"
_LONGEST_LINE = 1 << 16  # bytes of a line that has no end yet, when lines are prefixed
_BACKLOG = 8 << 20  # bytes held while our own output is blocked


class Redactor:
    """Masks secrets in a byte stream; holds back only a tail that may be the beginning of one."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = sorted({secret.encode() for secret in secrets if len(secret) >= 4}, key=len, reverse=True)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """`data` with secrets masked, as far as it is certain."""
        if not self._secrets:
            return data
        text = self._held + data
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        keep = max((self._overlap(text, secret) for secret in self._secrets), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> bytes:
        """What was held back, at the stream's end."""
        held, self._held = self._held, b""
        return held

    @staticmethod
    def _overlap(text: bytes, secret: bytes) -> int:
        for length in range(min(len(secret) - 1, len(text)), 0, -1):
            if text.endswith(secret[:length]):
                return length
        return 0


class Prefixer:
    """Puts `prefix` before each line; what has no end yet is held back, so that two streams may share one output."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes."""
        if not self._prefix:
            return data
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > _LONGEST_LINE:
            lines, self._held = [*lines, self._held], b""
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def flush(self) -> bytes:
        """What was held back, at the stream's end."""
        held, self._held = self._held, b""
        return self._prefix + held + b"\n" if held else b""


class Relay:
    """Relays `pipe` to the file descriptor `output`, each line behind `prefix` when there is one; `on_bytes(name, data)`
    sees each piece first, without it."""

    def __init__(
        self,
        name: str,
        pipe: IO[bytes],
        output: int,
        on_bytes: Callable[[str, bytes], None],
        secrets: Sequence[str],
        prefix: bytes = b"",
    ) -> None:
        self._name = name
        self._pipe = pipe
        self._output = output
        self._on_bytes = on_bytes
        self._redactor = Redactor(secrets)
        self._prefixer = Prefixer(prefix)
        self._backlog: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._closed = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"engine-{name}-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"engine-{name}-write", daemon=True)
        self._reader.start()
        self._writer.start()

    def _read(self) -> None:
        descriptor = self._pipe.fileno()
        try:
            while data := os.read(descriptor, 65536):
                self._take(self._redactor.feed(data))
        except OSError:
            pass
        self._take(self._redactor.flush())
        self._pass_on(self._prefixer.flush())
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._pipe.close()

    def _take(self, data: bytes) -> None:
        if not data:
            return
        with contextlib.suppress(Exception):  # a reader that fails must not stop the engine's output
            self._on_bytes(self._name, data)
        self._pass_on(self._prefixer.feed(data))

    def _pass_on(self, data: bytes) -> None:
        if not data:
            return
        with self._changed:
            self._backlog.append(data)
            self._size += len(data)
            while self._size > _BACKLOG and len(self._backlog) > 1:
                gone = len(self._backlog.popleft())
                self._size -= gone
                self._dropped += gone
            self._changed.notify()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._backlog and not self._closed:
                    self._changed.wait()
                if not self._backlog:
                    return
                data = self._backlog.popleft()
                self._size -= len(data)
                dropped, self._dropped = self._dropped, 0
            if dropped:
                data = b"\n[kvguard: %d bytes of engine output dropped, our output was blocked]\n" % dropped + data
            try:
                _write_all(self._output, data)
            except OSError:
                with self._changed:  # nobody reads our output any more; keep draining the engine's
                    self._backlog.clear()
                    self._size = 0

    def finish(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the rest of the stream to be read and written."""
        self._reader.join(timeout)
        with contextlib.suppress(RuntimeError):
            self._writer.join(timeout)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        view = view[written:]
