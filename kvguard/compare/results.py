"""Per-item results on disk, one JSON line each as they come, so that a killed comparison goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from kvguard.compare.checked import check_arm
from kvguard.compare.models import (
    CONTROLS,
    FORMAT,
    Answered,
    ArmFile,
    Forced,
    Generated,
    Harnessed,
    Plan,
    Scored,
    Streamed,
    Throughput,
)
from kvguard.files import printable, read_regular_file
from kvguard.vocabulary import Frozen, UsageError

FILE_LIMIT = 1 << 30
_SMALL = 1 << 20
Row = Answered | Generated | Forced | Scored | Streamed | Throughput | Harnessed
_KINDS: Mapping[str, type[Row]] = {
    "answered": Answered,
    "generated": Generated,
    "forced": Forced,
    "scored": Scored,
    "streamed": Streamed,
    "throughput": Throughput,
    "harnessed": Harnessed,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Start(Frozen):
    """The first line of an arm's results: which engine start, by its record, and which plan they belong to."""

    format: int = FORMAT
    record_digest: str
    plan_digest: str


class Rows:
    """What an arm has answered so far. Lines are appended and flushed; a torn last line is dropped on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start: Start | None = None
        self.rows: list[Row] = []
        self._file: BinaryIO | None = None
        if path.exists():
            self._read()

    def begin(self, start: Start) -> None:
        """Continue, or begin, the results of this start. Raises UsageError where the rows are of another one."""
        if self.start is not None and self.start != start:
            raise UsageError(
                f"{printable(str(self.path))}: its results are of another engine start or plan (record "
                f"{self.start.record_digest[:19]}, now {start.record_digest[:19]}); give a new --out directory"
            )
        lines = [_line("start", start), *(_line(_NAMES[type(row)], row) for row in self.rows)]
        write_whole(self.path, "".join(lines))
        self.start = start
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise _not_written(self.path, error) from error

    def add(self, row: Row) -> None:
        """One more result, in the file before this returns. Raises UsageError where it cannot be written."""
        assert self._file is not None  # noqa: S101 (begin comes first)
        line = _line(_NAMES[type(row)], row).encode()
        try:
            written = self._file.write(line)
        except OSError as error:
            raise _not_written(self.path, error) from error
        if written != len(line):  # the disk became full within the line: it is dropped on opening, as after a kill
            raise UsageError(f"{printable(str(self.path))}: cannot be written: No space left on device")
        self.rows.append(row)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> None:
        text = read_regular_file(self.path, FILE_LIMIT, "results").decode("utf-8", "replace")
        whole = text[: text.rfind("\n") + 1]
        for number, line in enumerate(whole.split("\n")[:-1], 1):
            where = f"results {printable(str(self.path))} line {number}"
            try:
                document = json.loads(line)
                kind = document.pop("kind")
                if kind == "start":
                    self.start = Start.model_validate(document)
                else:
                    self.rows.append(_KINDS[kind].model_validate(document))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise UsageError(f"{where}: not a result of this kvguard ({type(error).__name__}); give a new --out") from None


def _line(kind: str, row: Frozen) -> str:
    return json.dumps({"kind": kind, **row.model_dump(mode="json")}) + "\n"


def write_whole(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file whole or not at all; only its owner reads it, since it may hold prompts. UsageError where that fails."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _not_written(path, error) from error
        raise


def _not_written(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{printable(str(path))}: cannot be written: {error.strerror or error}")


def file_stem(arm: str) -> str:
    """An arm's name as a file's; a name that no file can have gets a digest, so that two arms never share one."""
    plain = re.sub(r"[^A-Za-z0-9_.@-]", "-", arm)
    if plain == arm or arm in CONTROLS:
        return plain
    return f"{plain[:60]}-{hashlib.sha256(arm.encode()).hexdigest()[:8]}"


def read_model(path: Path, model: type[Any], what: str) -> Any:
    """A JSON file as a model. Raises UsageError naming file and key."""
    name = printable(str(path))
    content = read_regular_file(path, FILE_LIMIT, what)
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{what} {name}{f': {printable(place)}' if place else ''}: {first['msg']}") from None


def read_json(path: Path) -> Any:
    """A small JSON file of ours; None for what is none, which is then not ours."""
    try:
        return json.loads(read_regular_file(path, _SMALL, "comparison"))
    except (ValueError, RecursionError):
        return None


def read_arm(path: Path) -> ArmFile:
    """A finished arm, held against itself. Raises UsageError for any other file."""
    arm: ArmFile = read_model(path, ArmFile, "arm file")
    if arm.format != FORMAT:
        raise UsageError(f"arm file {printable(str(path))}: format {arm.format}, this kvguard reads {FORMAT}")
    check_arm(arm, printable(str(path)))
    return arm


def read_plan(path: Path) -> Plan:
    """The plan of a comparison that was begun."""
    plan: Plan = read_model(path, Plan, "plan")
    return plan
