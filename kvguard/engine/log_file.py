"""The log file of an engine that somebody else started, read as it grows."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvguard.evidence.log import LogReader
from kvguard.evidence.log_text import messages
from kvguard.facts.log_lines import LogLine, log_lines
from kvguard.files import printable
from kvguard.vocabulary import UsageError

_CHUNK = 1 << 20
_MOST = 512 << 20  # bytes read at one time; the beginning of a larger file is what says how the engine started
_STREAM = "file"
_WORD = b"version "


class LogFile:
    """Feeds a `LogReader` from a file. A file that was truncated or replaced is another start's and read from its beginning."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a file that cannot be read."""
        self.path = path
        self.reader = LogReader()
        self._offset = 0
        self._inode = 0
        self._mark = 0
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise UsageError(f"engine log {printable(str(path))}: not a regular file; check --log")
            self._read()
        except OSError as error:
            raise UsageError(f"engine log {path}: cannot be read: {error.strerror or error}; check --log") from error

    def poll(self) -> str:
        """Read what was written since; returns why that was not possible, "" when it was."""
        try:
            self._read()
        except OSError as error:
            return f"engine log {self.path}: cannot be read: {error.strerror or error}"
        return ""

    def mark(self) -> None:
        """The engine that wrote this far is alive: an engine started later writes behind this place."""
        self._mark = self._offset

    def start_again(self) -> None:
        """Another engine writes now: forget what stood before the mark."""
        self.reader = LogReader()
        self._offset = self._mark

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._offset = self._mark = 0
                self._inode = status.st_ino
                self.reader = LogReader()
            file.seek(self._offset)
            left = _MOST
            while left > 0 and (piece := file.read(min(_CHUNK, left))):
                end = piece.rfind(b"\n") + 1 or (len(piece) if len(piece) == _CHUNK else 0)
                if not end:
                    return  # a line that is being written
                self._feed(piece[:end])
                self._offset += end
                left -= end
                file.seek(self._offset)

    def _feed(self, piece: bytes) -> None:
        start = 0
        for line, place in _candidates(piece):
            if any(_is_banner(message.text) for message in messages(line)):
                self.reader, start = LogReader(), place  # what stands before is another start's
        self.reader.feed(_STREAM, piece[start:])


def _candidates(piece: bytes) -> Iterator[tuple[bytes, int]]:
    """Lines that may be the first of a start, with where they begin."""
    at = 0
    while (at := piece.find(_WORD, at)) >= 0:
        begin, end = piece.rfind(b"\n", 0, at) + 1, piece.find(b"\n", at)
        end = len(piece) if end < 0 else end
        yield piece[begin:end], begin
        at = end


def _is_banner(text: str) -> bool:
    return any(template.literal in text and template.pattern.match(text) for template in _banners())


@cache
def _banners() -> tuple[LogLine, ...]:
    """What an API server prints first: its version. The engine's own line with the version comes once for each rank."""
    return tuple(line for line in log_lines() if line.field == "engine_version" and "version" in line.literal)
