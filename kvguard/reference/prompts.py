"""The texts that a calibration sees: our own small set, or a user's file, and the set's digest."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from kvguard.canonical import sha256_of
from kvguard.files import printable, read_regular_file
from kvguard.vocabulary import Frozen, Json, UsageError

FILE_LIMIT = 16 << 20
MAX_PROMPTS = 100_000
_OURS = "calibration_prompts.jsonl"
_JSON_LINES = (".jsonl", ".ndjson")


class Turn(Frozen):
    """One message of a chat."""

    role: str
    content: str


class Prompt(Frozen):
    """A text as it is, or a chat that goes through the model's template."""

    text: str = ""
    messages: tuple[Turn, ...] = ()

    def as_json(self) -> Json:
        """The text, or the list of messages."""
        return [turn.model_dump() for turn in self.messages] if self.messages else self.text

    @property
    def plain(self) -> str:
        """The words alone, for a model without a chat template."""
        return self.text or "\n\n".join(turn.content for turn in self.messages)


class PromptSet(Frozen):
    """Prompts in order; `digest` is over their words and roles, not over how a file wrote them."""

    prompts: tuple[Prompt, ...]
    digest: str
    origin: str


def default_prompts() -> PromptSet:
    """The set we wrote: prose, code, numbers, several scripts, chat turns; about 4,200 tokens with SmolLM2's tokenizer."""
    data = (resources.files("kvguard.reference") / "data" / _OURS).read_text("utf-8")
    return _set(parse_prompts(data, _OURS), "kvguard's own prompt set")


def load_prompts(path: Path | None) -> PromptSet:
    """The prompts of a file, ours without one. Raises UsageError naming file and line."""
    if path is None:
        return default_prompts()
    name = printable(str(path))
    try:
        text = read_regular_file(path, FILE_LIMIT, "prompt file").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"prompt file {name}: not UTF-8 at byte {error.start}") from None
    return _set(parse_prompts(text, name), name)


def parse_prompts(text: str, name: str) -> tuple[Prompt, ...]:
    """Prompts of a file's text.

    JSON lines when the first line that is not blank begins with `{`, or `name` ends as such files do: each holds `text`
    or `prompt` (a string) or `messages` (a chat). Else plain text: blocks separated by blank lines, or, where there is no
    blank line, one prompt a line. Raises UsageError naming the line, also of a NUL, which no text file holds.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    first = next((line for line in lines if line.strip()), "")
    if nul := next((number for number, line in enumerate(lines, 1) if "\0" in line), 0):
        raise UsageError(f"prompt file {name} line {nul}: holds a NUL byte: this is no text file")
    if first.lstrip().startswith("{") or name.lower().endswith(_JSON_LINES):
        found = [_from_json(line, f"prompt file {name} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    else:
        body = "\n".join(lines).strip("\n")
        blocks = re.split(r"\n[ \t]*\n", body) if re.search(r"\n[ \t]*\n", body) else body.split("\n")
        found = [Prompt(text=block.strip()) for block in blocks if block.strip()]
    if not found:
        raise UsageError(f"prompt file {name}: no prompt in it")
    if len(found) > MAX_PROMPTS:
        raise UsageError(f"prompt file {name}: {len(found)} prompts, more than {MAX_PROMPTS}")
    return tuple(found)


def _from_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    text = value.get("text", value.get("prompt")) if isinstance(value, dict) else None
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list) and messages and text is None:
        return Prompt(messages=tuple(_turn(message, where) for message in messages))
    if messages is None and isinstance(text, str) and text.strip():
        return Prompt(text=_valid(text, where))
    raise UsageError(f"{where}: required is an object with `text` (or `prompt`), a string, or `messages`, a list of turns")


def _turn(message: Any, where: str) -> Turn:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise UsageError(f"{where}: messages: each needs a role (system, user or assistant) and content, a string")
    return Turn(role=role, content=_valid(content, where))


def _valid(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # an escaped lone surrogate is JSON, and no text
        raise UsageError(f"{where}: holds a lone surrogate, which is no text") from None
    return text


def _set(prompts: tuple[Prompt, ...], origin: str) -> PromptSet:
    return PromptSet(prompts=prompts, digest=sha256_of([prompt.as_json() for prompt in prompts]), origin=origin)
