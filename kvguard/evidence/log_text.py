"""One line of engine output taken apart: process, level, source file, message, and whether it is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from kvguard.facts.log_lines import log_lines

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_PROCESS = re.compile(r"\((?P<name>[A-Za-z][\w ]{0,60}?)(?: rank=\d+)? pid=\d+\) ?")
_HEADER = re.compile(
    r"\b(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) {1,4}(?:\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,9})? )?"
    r"\[?(?P<file>[\w./\-]{1,200}):\d+\] ?"
)
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.){0,8}[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit)(?::\s.*)?$")
_PARSER = re.compile(r"[\w .\-/]{1,80}: error: (?P<text>.+)$")
_FRAME = re.compile(r'\s|Traceback \(most recent call last\)|File "|\^+$|During handling of|The above exception')
_HEADER_REACH = 512
_MAX_ERROR = 2000


@dataclass(frozen=True, slots=True)
class Message:
    """`process` is "" when the line names none; `error` is the text worth showing to a person, or ""."""

    process: str
    file: str
    text: str
    error: str


@cache
def _literals() -> re.Pattern[bytes]:
    words = {line.literal for line in log_lines()} | {"ERROR", "CRITICAL", "Error", "Exception", "error:", "Exit"}
    return re.compile(b"|".join(re.escape(word.encode()) for word in sorted(words)))


def interesting(raw: bytes) -> bool:
    """A cheap test that spares the rest of the work for most of what an engine prints."""
    return _literals().search(raw) is not None


def messages(raw: bytes) -> Iterator[Message]:
    """The messages of one line, usually one: a JSON record (0.31.0+, or a dictConfig) may hold several."""
    text = _ANSI.sub("", raw.decode("utf-8", "replace")).rstrip()
    record = _json_record(text)
    if record is None:
        yield _split(text)
        return
    level = str(record.get("levelname") or record.get("level") or "").upper()
    process = str(record.get("processName") or "")
    file = str(record.get("filename") or "")
    body = record.get("message") or record.get("msg") or record.get("event")
    for part in body.splitlines() if isinstance(body, str) else ():
        yield Message(process, file, part, _error(part, level))


def _json_record(text: str) -> dict[str, object] | None:
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _split(text: str) -> Message:
    header = _HEADER.search(text[:_HEADER_REACH])
    process = _PROCESS.search(text, 0, header.start()) if header else _PROCESS.match(text)
    name = process["name"].strip() if process else ""
    if header:
        body = text[header.end() :]
        return Message(name, header["file"].rsplit("/", 1)[-1], body, _error(body, header["level"]))
    body = text[process.end() :] if process else text
    return Message(name, "", body, _error(body, ""))


def _error(body: str, level: str) -> str:
    if parser := _PARSER.match(body):
        return parser["text"].strip()[:_MAX_ERROR]
    if not body or _FRAME.match(body):
        return ""
    if level in ("ERROR", "CRITICAL") or _EXCEPTION.match(body):
        return body.strip()[:_MAX_ERROR]
    return ""
