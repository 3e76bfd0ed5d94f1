"""The file that `--engine-log` names, as a descriptor for an engine that a command starts for itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvguard.vocabulary import UsageError


@contextmanager
def engine_log(path: Path | None) -> Iterator[int]:
    """Append to `path`, which only its owner may read; nowhere without one. Raises UsageError for a file that cannot be had."""
    sys.stdout.flush()
    try:
        descriptor = os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--engine-log {path}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
