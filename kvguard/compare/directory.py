"""The directory of a comparison: of this one only, and of one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvguard.compare.results import read_json, write_whole
from kvguard.files import printable
from kvguard.vocabulary import UsageError

_WISH = "wish.json"
_UNASKED = frozenset({_WISH, "records", "weak"})
"""What stands there before the first question: other options may still take its place."""


def claim(out: Path, options: Mapping[str, Any]) -> int:
    """Take the directory, made where it is missing, for the comparison of these options (JSON values, by option's name).

    Returns a descriptor that holds a lock until it is closed or the process ends. Raises UsageError for a directory of
    another comparison, of something else, or in which another process works.
    """
    name = printable(str(out))
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"--out {name}: cannot be used: {error.strerror or error}") from None
    try:
        _lock(descriptor, name)
        _same(out, name, options)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_foreign(out: Path, reports: Collection[str]) -> None:
    """Raises UsageError where a report (files of these names) would stand among, or replace, what is no comparison's."""
    try:
        found = set(os.listdir(out))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--out {printable(str(out))}: cannot be used: {error.strerror or error}") from None
    if found and _WISH not in found and found != set(reports):
        raise UsageError(f"--out {printable(str(out))}: neither empty nor of a comparison; give another")


def _lock(descriptor: int, name: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"--out {name}: another kvguard compare is working in it; wait for it, or give another") from None
    except OSError:
        pass  # a file system without locks


def _same(out: Path, name: str, options: Mapping[str, Any]) -> None:
    try:
        found = os.listdir(out)
    except OSError as error:
        raise UsageError(f"--out {name}: cannot be used: {error.strerror or error}") from None
    if found and _WISH not in found:
        raise UsageError(f"--out {name}: neither empty nor of a comparison; give another")
    if set(found) <= _UNASKED:
        write_whole(out / _WISH, json.dumps({"options": options}) + "\n")
        return
    document = read_json(out / _WISH)
    told = document.get("options") if isinstance(document, dict) else None
    if told != options:
        raise UsageError(f"--out {name}: holds another comparison{_difference(told, options)}; give a new directory")


def _difference(told: Any, options: Mapping[str, Any]) -> str:
    if not isinstance(told, dict):
        return ""
    key = next(key for key in (*options, *told) if told.get(key) != options.get(key))
    before, now = told.get(key), options.get(key)
    if isinstance(before, list) and isinstance(now, list):  # from the first word that differs
        same = next((place for place, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(before), len(now)) if same is None else same
        before, now = before[same:], now[same:]
    return f" ({printable(str(key))}: {_brief(before)}, now {_brief(now)})"


def _brief(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return printable(text, 80) if value is not None and text else "nothing"
