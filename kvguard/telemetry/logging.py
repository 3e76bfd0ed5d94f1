"""kvguard's own log: to stderr, never stdout, which belongs to the engine. Prompts and answers are never logged.

The engine's stderr goes to the same place, so each line of ours begins with `kvguard`, or is JSON that says so.
"""

from __future__ import annotations

import logging
import re
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kvguard.vocabulary import UsageError

LEVELS = ("debug", "info", "warning", "error")

NAME = "kvguard"
"""What each line begins with, or is the `logger` of."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
# Local variables stay out of tracebacks: they can be keys, and prompts.
_TRACEBACKS = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
_PAIRS = structlog.processors.LogfmtRenderer(bool_as_flag=False)

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
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler of ours, recognizable when `configure` is called again."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)


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
