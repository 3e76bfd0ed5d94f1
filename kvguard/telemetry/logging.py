"""kvguard's own log: to stderr, never stdout, which belongs to the engine. Prompts and answers are never logged.

The engine's stderr goes to the same place, so each line of ours begins with `kvguard`, or is JSON that says so.
Lines are written by a thread of their own: a standard error that nobody reads holds up no request and no loop.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import threading

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kvguard.telemetry.backlog import Backlog
from kvguard.vocabulary import UsageError

LEVELS = ("debug", "info", "warning", "error")

NAME = "kvguard"
"""What each line begins with, or is the `logger` of."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
# Local variables stay out of tracebacks: they can be keys, and prompts.
_TRACEBACKS = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
_PAIRS = structlog.processors.LogfmtRenderer(bool_as_flag=False)

_FLUSH_S = 5.0

# Libraries whose routine messages say nothing about the guarded engine.
_QUIET = ("uvicorn", "uvicorn.error", "aiohttp", "asyncio", "httpx", "httpcore")


def configure(level: str = "info", json: bool | None = None) -> None:
    """Send structlog's and the standard library's records to stderr.

    `json` True gives JSON lines with `"logger": "kvguard"`, False lines such as `kvguard 2025-11-29T15:32:43Z info
    serving  kv_tokens=93184`; None decides by the terminal: coloured lines on one, plain lines elsewhere. May be
    called again. UsageError for an unknown level.
    """
    if level not in LEVELS:
        raise UsageError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if json else "%Y-%m-%dT%H:%M:%SZ", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderer(json)],
    )
    handler = _StderrHandler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for existing in [old for old in root.handlers if isinstance(old, _StderrHandler)]:
        root.removeHandler(existing)
        existing.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def flush(timeout_s: float = _FLUSH_S) -> None:
    """Wait until all lines so far are written, for so long at most; once that was in vain, no more."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _StderrHandler):
            handler.wait(timeout_s)


class _StderrHandler(logging.Handler):
    """Hands lines to a thread that writes them. What it is too far behind to take is dropped and counted in a later line.

    The thread writes to the descriptor, so that it never stands there with a lock of `sys.stderr`'s.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stderr
        self._dropped = 0
        self._waited_in_vain = False
        self._backlog: Backlog[str | threading.Event] = Backlog("log-writer", self._write)
        self._backlog.start()

    def emit(self, record: logging.LogRecord) -> None:
        """logging's call, one at a time."""
        try:
            line = self.format(record)
        except Exception:  # whoever logs goes on
            self.handleError(record)
            return
        if self._dropped and self._backlog.put(self.format(_dropped_before(self._dropped))):
            self._dropped = 0
        if not self._backlog.put(line):
            self._dropped += 1

    def wait(self, timeout_s: float) -> None:
        """Until all so far is written."""
        if not self._waited_in_vain:
            written = threading.Event()
            self._backlog.put(written, always=True)
            self._waited_in_vain = not written.wait(timeout_s)

    def flush(self) -> None:
        """logging's call, at the process's end too."""
        self.wait(_FLUSH_S)

    def close(self) -> None:
        """logging's call: what is left is written, unless nobody reads it."""
        self.flush()
        self._backlog.close(0)
        super().close()

    def _write(self, item: str | threading.Event) -> None:
        if isinstance(item, threading.Event):
            item.set()
            return
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            try:
                descriptor = self._stream.fileno()
            except io.UnsupportedOperation:  # put in place of it by whoever runs us in their own process
                self._stream.write(item + "\n")
                self._stream.flush()
                return
            line = (item + "\n").encode(errors="backslashreplace")
            while line:
                line = line[os.write(descriptor, line) :]


def _dropped_before(number: int) -> logging.LogRecord:
    message = f"standard error was not read: {number} lines before this one are missing"
    return logging.LogRecord(NAME, logging.WARNING, __file__, 0, message, None, None)


def _renderer(json: bool | None) -> list[Processor]:
    if json:
        return [_named, structlog.processors.ExceptionRenderer(_TRACEBACKS), structlog.processors.JSONRenderer()]
    if json is None and sys.stderr.isatty():
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=plain), _prefixed]
    return [structlog.processors.format_exc_info, _plain]


def _named(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {"logger": NAME, **event}


def _prefixed(_: WrappedLogger, __: str, event: object) -> str:
    """Rendered lines, a traceback's among them, each with our name."""
    return "\n".join(f"{NAME} {line}" for line in str(event).split("\n"))


def _plain(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """One line: our name, time, level and message, then key=value pairs."""
    head = f"{NAME} {event.pop('timestamp')} {event.pop('level'):<5} {event.pop('event')}"
    pairs = _PAIRS(logger, method, event)
    line = f"{head}  {pairs}" if pairs else head
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], str(line))
