"""Run records on disk: written whole or not at all, readable by their owner only, the newest 50 kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvguard.files import printable, read_regular_file
from kvguard.record.digest import content_digest
from kvguard.record.statement import Statement
from kvguard.vocabulary import UsageError

KEPT = 50
MAX_BYTES = 32 << 20
ABANDONED_AFTER = timedelta(hours=1)
"""Age from which a temporary file is of a writer that did not live to rename it."""

_TEMPORARY = ".record-"
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{12}\.json")


def default_directory(env: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/kvguard/records`, by default `~/.local/state/kvguard/records`.

    A relative XDG_STATE_HOME is ignored, as the XDG base directory specification (0.8) asks.
    """
    state = Path(env.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        home = env.get("HOME", "")
        state = (Path(home) if home else Path.home()) / ".local" / "state"
    return state / "kvguard" / "records"


def write_record(statement: Mapping[str, Any], directory: Path, now_utc: str) -> Path:
    """Write a record as `<time>-<first 12 digits of its content digest>.json` and drop all but the newest 50,
    and temporary files older than an hour.

    `now_utc` is ISO 8601 in UTC ("2025-11-29T15:03:00Z"); anything else is a ValueError. The directory is made
    with mode 0700 when missing; the file has mode 0600 and appears complete or not at all. Raises UsageError
    when the directory cannot be written.
    """
    now = datetime.fromisoformat(now_utc)
    if now.utcoffset() != timedelta(0):
        raise ValueError(f"{now_utc!r} is not a UTC time")
    digest = str(statement["predicate"]["content_digest"]).removeprefix("sha256:")
    text = json.dumps(statement, indent=2, allow_nan=False) + "\n"
    path = directory / f"{now:%Y%m%dT%H%M%S.%fZ}-{digest[:12]}.json"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_whole(path, text)
        for old in sorted(_records(directory) - {path}, reverse=True)[KEPT - 1 :]:
            old.unlink(missing_ok=True)
        _sweep(directory, now - ABANDONED_AFTER)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"record directory {printable(str(directory))}: cannot be written: {reason}; name another one"
        ) from None
    return path


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file, its shape checked and its content digest verified.

    Raises UsageError, one line, for a file that cannot be read or is above 32 MiB, for what is not a run
    record (naming the member), and for one whose digested part was changed after it was written.
    """
    return parse_record(read_regular_file(path, MAX_BYTES, "record"), str(path))


def parse_record(content: bytes, name: str) -> dict[str, Any]:
    """The record in these bytes, checked as `read_record` does; `name` says in errors where they were read."""
    name = printable(name)
    try:
        Statement.model_validate_json(content)
        statement: dict[str, Any] = json.loads(content, object_pairs_hook=_once, parse_constant=_no_constant)
        digest = content_digest(statement)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise UsageError(f"record {name}: not a run record: {printable(place)}: {printable(first['msg'])}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"record {name}: not a run record: {printable(str(error))}") from None
    written = statement["predicate"]["content_digest"]
    if digest != written:
        raise UsageError(f"record {name}: was changed after it was written: it says {written}, its content is {digest}")
    return statement


def load_statement(path: Path) -> Statement:
    """The record in a file, as `read_record` checks it, with typed access."""
    return Statement.model_validate(read_record(path))


def latest(directory: Path) -> Path:
    """The newest record in a directory. Raises UsageError when there is none."""
    try:
        records = _records(directory)
    except OSError:
        records = set()
    if not records:
        raise UsageError(f"no record in {printable(str(directory))}: `kvguard serve` writes one at each start; or name a file")
    return max(records)


def _records(directory: Path) -> set[Path]:
    return {directory / name for name in os.listdir(directory) if _NAME.fullmatch(name)}


def _sweep(directory: Path, before: datetime) -> None:
    for temporary in directory.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if temporary.lstat().st_mtime < before.timestamp():
                temporary.unlink()


def _write_whole(path: Path, text: str) -> None:
    # mkstemp makes the file 0600 and never opens one that exists.
    descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member stands twice in one object")
    return members


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
