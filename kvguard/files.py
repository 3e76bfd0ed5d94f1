"""Reading one small file that somebody named, without being hung or flooded by what it turns out to be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvguard.vocabulary import UsageError


def read_regular_file(path: Path, limit: int, what: str) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; symbolic links are followed.

    `what` names the file in errors ("policy"). Raises UsageError, one line, when the file is missing,
    unreadable, too large, or a directory, FIFO, socket or device (a FIFO is opened without waiting for its writer).
    """
    name = printable(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError(f"{what} {name}: no such file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} {name}: cannot be read: {_reason(error)}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError(f"{what} {name}: not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{what} {name}: cannot be read: {_reason(error)}") from None
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise UsageError(f"{what} {name}: larger than {limit:,} bytes, the most that is read")
    return content


def printable(text: str, limit: int = 200) -> str:
    """`text` on one line for a message: control and other unprintable characters as U+FFFD, long text cut."""
    line = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shown(text: str) -> str:
    """`text` for a terminal, at any length: what is not printable as U+FFFD, but for the ends of its lines."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
