"""Reads helm/kvguard/values.yaml with its comments: each key's documentation stands directly above it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_MARK = "@schema "


@dataclass(frozen=True, slots=True)
class Entry:
    """One key: its path from the root, documentation, default, additions to its schema, and the keys below it."""

    path: tuple[str, ...]
    doc: str
    default: Any
    schema: dict[str, Any]
    below: tuple[Entry, ...] = field(default=())

    @property
    def name(self) -> str:
        """`model.cache.size`."""
        return ".".join(self.path)


def read_values(path: Path) -> tuple[Entry, ...]:
    """The file's keys in their order."""
    text = path.read_text("utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise TypeError(f"{path}: not a mapping")
    return _entries(root, (), text.splitlines())


def leaves(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The keys that hold values."""
    return tuple(leaf for entry in entries for leaf in (leaves(entry.below) or (entry,)))


def needed(entries: tuple[Entry, ...]) -> tuple[str, ...]:
    """Sections, and keys whose default says something: templates read them. Any other may be null, which is no key to Helm."""
    return tuple(name for entry in entries if entry.below or entry.default for name in (entry.name, *needed(entry.below)))


def _entries(node: yaml.MappingNode, path: tuple[str, ...], lines: list[str]) -> tuple[Entry, ...]:
    return tuple(_entry(key, value, path, lines) for key, value in node.value)


def _entry(key: yaml.Node, value: yaml.Node, path: tuple[str, ...], lines: list[str]) -> Entry:
    here = (*path, str(key.value))
    doc, schema = _comments(lines, key.start_mark.line, key.start_mark.column)
    # A mapping is a section, unless its keys are the user's to choose.
    section = isinstance(value, yaml.MappingNode) and value.value and not schema
    below = _entries(value, here, lines) if section and isinstance(value, yaml.MappingNode) else ()
    default = yaml.SafeLoader("").construct_object(value, deep=True)  # type: ignore[no-untyped-call]
    return Entry(here, doc, default, schema, below)


def _comments(lines: list[str], line: int, column: int) -> tuple[str, dict[str, Any]]:
    """The comment lines directly above `line` with its indentation: prose, and what @schema lines add."""
    start = line
    while start > 0 and lines[start - 1].startswith(" " * column + "# "):
        start -= 1
    words: list[str] = []
    schema: dict[str, Any] = {}
    for comment in (text.strip().removeprefix("# ") for text in lines[start:line]):
        if comment.startswith(_MARK):
            schema.update(yaml.safe_load(comment.removeprefix(_MARK)))
        else:
            words.append(comment)
    return " ".join(words), schema
