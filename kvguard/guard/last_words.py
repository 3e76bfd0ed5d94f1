"""The one line that an orchestrator keeps of a container that ended."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import structlog

log = structlog.get_logger("kvguard")
_MOST = 2000


def write_last_words(path: Path | None, line: str) -> None:
    """Write `line` to the termination log; a place that cannot be written is reported, and nothing else."""
    if path is None:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:  # a FIFO without a reader, say: nobody will read it
        log.warning("termination log cannot be written", path=str(path), error=error.strerror)
        return
    with contextlib.suppress(OSError), os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(line[:_MOST] + "\n")
