"""The run record of an external reference: a file, or the management port of the kvguard that guards it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvguard.engine.client import EngineClient
from kvguard.record.store import latest, parse_record, read_record
from kvguard.vocabulary import UsageError


async def read_their_record(source: str) -> tuple[Mapping[str, Any] | None, str]:
    """The record at `source`, or None and why it cannot be had.

    A file; a directory, of which the newest record counts; or a URL, whose path is /record when it has none.
    """
    try:
        if source.startswith(("http://", "https://")):
            return await _fetched(source)
        return await asyncio.to_thread(_read, Path(source)), ""
    except UsageError as error:
        return None, str(error)
    except ValueError as error:
        return None, f"{source!r}: not a URL ({error})"


def _read(path: Path) -> Mapping[str, Any]:
    return read_record(latest(path) if path.is_dir() else path)


async def _fetched(url: str) -> tuple[Mapping[str, Any] | None, str]:
    parts = urlsplit(url)
    async with EngineClient(f"{parts.scheme}://{parts.netloc}") as client:
        answer = await client.get_json(parts.path.rstrip("/") or "/record")
    if not answer.ok:
        return None, f"its run record at {url} cannot be read: {answer.problem}"
    return parse_record(json.dumps(answer.body).encode(), url), ""
