"""The user's own tasks: JSON lines with a prompt or a chat, and the exact answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from kvguard.compare.models import Item
from kvguard.compare.planning import TASKS
from kvguard.files import printable, read_regular_file
from kvguard.reference.prompts import Turn
from kvguard.vocabulary import Frozen, UsageError

FILE_LIMIT = 64 << 20
_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,39}$"


class OwnTurn(Frozen):
    """One message."""

    role: Literal["system", "user", "assistant"]
    content: str


class OwnItem(Frozen):
    """One line. `match` is how the answer is read, see `docs/compare.md`."""

    id: str | None = Field(default=None, max_length=200)
    prompt: str | None = None
    messages: Annotated[tuple[OwnTurn, ...] | None, Field(min_length=1)] = None
    answer: str
    match: Literal["code", "number", "text", "contains"] = "text"
    max_tokens: int = Field(default=256, ge=1, le=65536)
    task: str = Field(default="own", pattern=_NAME)


def own_items(path: Path) -> tuple[Item, ...]:
    """The items of a file. Raises UsageError naming file, line and key."""
    name = printable(str(path))
    try:
        text = read_regular_file(path, FILE_LIMIT, "task file").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"task file {name}: not UTF-8 at byte {error.start}") from None
    found: dict[tuple[str, str], Item] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            item = _item(line, number, f"task file {name} line {number}")
            if (item.task, item.id) in found:
                raise UsageError(f"task file {name} line {number}: id {printable(item.id)!r} stands twice")
            found[(item.task, item.id)] = item
    if not found:
        raise UsageError(f"task file {name}: no item in it")
    return tuple(found.values())


def _item(line: str, number: int, where: str) -> Item:
    try:
        given = OwnItem.model_validate(json.loads(line))
        line.encode()
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the line"
        raise UsageError(f"{where}: {printable(place)}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if given.task in TASKS:
        raise UsageError(f"{where}: task: {given.task!r} is a generated task's name; give another")
    if (given.prompt is None) == (given.messages is None):
        raise UsageError(f"{where}: required is one of `prompt` and `messages`")
    if not given.answer.strip():
        raise UsageError(f"{where}: answer: required is a text")
    turns = given.messages or (OwnTurn(role="user", content=given.prompt or ""),)
    try:
        for turn in turns:
            turn.content.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where}: holds a lone surrogate, which is no text") from None
    return Item(
        task=given.task,
        id=given.id or f"{given.task}-{number:04d}",
        messages=tuple(Turn(role=turn.role, content=turn.content) for turn in turns),
        answer=given.answer,
        match=given.match,
        max_tokens=given.max_tokens,
    )
