"""kvguard's own log: to stderr, never stdout, which belongs to the engine. Prompts and answers are never logged."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from kvguard.vocabulary import UsageError

LEVELS = ("debug", "info", "warning", "error")

# Libraries whose routine messages say nothing about the guarded engine.
_QUIET = ("uvicorn", "uvicorn.error", "aiohttp", "asyncio", "httpx", "httpcore")


def configure(level: str = "info", json: bool | None = None) -> None:
    """Send structlog's and the standard library's records to stderr.

    `json` True gives JSON lines, False key=value lines; None decides by the terminal: coloured lines on one,
    key=value lines elsewhere. May be called again. UsageError for an unknown level.
    """
    if level not in LEVELS:
        raise UsageError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
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
        return [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    if json is None and sys.stderr.isatty():
        return [structlog.dev.ConsoleRenderer(colors=True)]
    return [
        structlog.processors.format_exc_info,
        structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
    ]
