"""Changes of a checkpoint's files while an engine runs that was started from them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

import structlog

log = structlog.get_logger("kvguard")

_WATCHED = (".json", ".jinja")
Fingerprints = Mapping[str, tuple[int, int, int]]


def fingerprints(directory: str) -> Fingerprints | None:
    """Modification time, size and inode of a checkpoint's small files, by name; None when it cannot be listed."""
    found: dict[str, tuple[int, int, int]] = {}
    try:
        for name in sorted(os.listdir(directory)):
            if name.endswith(_WATCHED):
                status = os.stat(os.path.join(directory, name))
                found[name] = (status.st_mtime_ns, status.st_size, status.st_ino)
    except (OSError, ValueError):
        return None
    return found


def changed_files(before: Fingerprints, now: Fingerprints) -> tuple[str, ...]:
    """Names that are new, gone, or of another content."""
    return tuple(sorted(name for name in {*before, *now} if before.get(name) != now.get(name)))


async def watch_files(
    directory: str,
    before: Fingerprints | None,
    changed: Callable[[str], None],
    every: float,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Call `changed` with a sentence when files of the checkpoint change, until cancelled. Looks each `every` seconds.

    `before` are the files as they were when the engine was started from them.
    """
    while True:
        await pause(every)
        now = await asyncio.to_thread(fingerprints, directory)
        if now is None:  # a mount that went away says nothing about the engine
            continue
        names = changed_files(before, now) if before is not None else ()
        before = now
        if names:
            log.warning("the checkpoint's files changed; the engine runs what it loaded, its next start will not", files=names)
            changed(f"{', '.join(names[:4])} changed on disk")
