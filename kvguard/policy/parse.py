"""From a policy file's bytes to a `Policy`, or to errors that name the file, the line, the key and the cure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from kvguard.files import printable, read_regular_file
from kvguard.policy.models import (
    POLICY_DTYPES,
    DriftPolicy,
    EnginePolicy,
    KVCachePolicy,
    OnDrift,
    OnRegression,
    OnViolation,
    Policy,
    ScalesRule,
    ShadowPolicy,
    contradiction,
)
from kvguard.vocabulary import UsageError, canonical_dtype

MAX_BYTES = 1 << 20
_MAX_DEPTH = 8
_MAX_EVENTS = 5000
_MAX_ERRORS = 20

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
"""Characters that YAML forbids, that it counts as line breaks, or that make a line read differently than it is."""

_Path = tuple[str | int, ...]

_ALLOWED: dict[_Path, tuple[str, ...]] = {
    ("kv_cache", "dtype"): POLICY_DTYPES,
    ("kv_cache", "scales"): tuple(rule.value for rule in ScalesRule),
    ("kv_cache", "min_confidence"): ("proven", "corroborated", "echoed"),
    ("shadow", "on_regression"): tuple(action.value for action in OnRegression),
    ("drift", "action"): tuple(action.value for action in OnDrift),
    ("drift", "min_confidence"): ("proven", "corroborated"),
    ("on_violation",): tuple(action.value for action in OnViolation),
}
_SECTIONS: dict[_Path, type[BaseModel]] = {
    (): Policy,
    ("kv_cache",): KVCachePolicy,
    ("engine",): EnginePolicy,
    ("shadow",): ShadowPolicy,
    ("drift",): DriftPolicy,
}
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_KIND = {
    "tag:yaml.org,2002:bool": "a YAML boolean",
    "tag:yaml.org,2002:int": "a YAML number",
    "tag:yaml.org,2002:float": "a YAML number",
    "tag:yaml.org,2002:timestamp": "a YAML date",
}
_WORDED = {
    "string_pattern_mismatch": "not a backend's name (such as FLASH_ATTN)",
    "string_too_long": "longer than a version range",
}
_REPORTED = object()


def load_policy(path: Path) -> Policy:
    """The policy in a file of at most 1 MiB. Raises UsageError for what cannot be read, and as `parse_policy`."""
    return parse_policy(read_regular_file(path, MAX_BYTES, "policy"), str(path))


def parse_policy(text: bytes, name: str) -> Policy:
    """The policy that YAML `text` states; `name` is what errors call the file.

    Raises UsageError, one line for each error found: "policy.yaml line 4: kv_cache.scale: unknown key; did
    you mean 'scales'?". Refused beyond wrong keys and values: files that are empty, above 1 MiB, not UTF-8
    or several documents, control characters, anchors, aliases, tags, repeated keys and deep nesting.
    """
    reading = _Reading(printable(name))
    root = _compose(text, reading)
    data = _plain(root, (), reading)
    policy = _validated(data, reading)
    if policy is not None and (reason := contradiction(policy)):
        reading.error(("kv_cache", "scales"), reason)
    if reading.errors or policy is None:
        raise UsageError(reading.report())
    return policy


@dataclass
class _Reading:
    """What is known while one file is read: where each path stands and what is wrong."""

    name: str
    lines: dict[_Path, int] = field(default_factory=dict)
    errors: list[tuple[int, str]] = field(default_factory=list)

    def error(self, path: _Path, message: str, line: int | None = None) -> None:
        """Note an error; without a line it is placed at the longest part of `path` that stands in the file."""
        if line is None:
            while path and path not in self.lines:
                path = path[:-1]
            line = self.lines[path]
        self.errors.append((line, f"{_dotted(path)}: {message}" if path else message))

    def report(self) -> str:
        """All errors by line, one line each, the first 20."""
        ordered = list(dict.fromkeys(sorted(self.errors)))
        lines = [f"{self.name} line {line}: {message}" for line, message in ordered[:_MAX_ERRORS]]
        if len(ordered) > _MAX_ERRORS:
            lines.append(f"{self.name}: and {len(ordered) - _MAX_ERRORS} more errors")
        return "\n".join(lines)


def _compose(text: bytes, reading: _Reading) -> yaml.Node:
    """The one document's root node; raises UsageError for what is not plain YAML."""
    name = reading.name
    if len(text) > MAX_BYTES:
        raise UsageError(f"{name}: larger than {MAX_BYTES:,} bytes, the most that is read")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name} line {line}: not UTF-8 text") from None
    if found := _CONTROL.search(decoded):
        line = decoded.count("\n", 0, found.start()) + 1
        raise UsageError(f"{name} line {line}: control character U+{ord(found[0]):04X}; remove it")
    try:
        _refuse_features(yaml.parse(decoded, Loader=yaml.SafeLoader), name)
        root = yaml.compose(decoded, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name} line {mark.line + 1}" if mark else name
        quote = '; write a version range in quotes, ">=0.27"' if error.context == "while scanning a block scalar" else ""
        raise UsageError(f"{place}: not YAML: {printable(error.problem or error.context or 'malformed')}{quote}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML 6.0 hands the number of an escape such as "\\U99999999" to chr() unchecked.
        raise UsageError(f"{name}: not YAML: {printable(str(error).partition(chr(10))[0])}") from None
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value and root.tag.endswith(":null")):
        raise UsageError(f"{name}: policy is empty; `kvguard policy example fp8-calibrated` prints one to start from")
    return root


def _refuse_features(events: Iterator[yaml.Event], name: str) -> None:
    """Walk the parser's events, before anything is built of them, up to the first that a policy has no use for."""
    depth = documents = 0
    for count, event in enumerate(events):
        problem = None
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            problem = "a second document; a policy is one" if documents > 1 else None
        elif isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            problem = "anchors and aliases (& and *) are not allowed; write the value out, or quote it"
        elif getattr(event, "tag", None) is not None:
            problem = "tags (!) are not allowed; write the plain value, or quote it"
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            problem = f"nested deeper than {_MAX_DEPTH} levels" if depth > _MAX_DEPTH else None
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if count > _MAX_EVENTS:
            problem = f"more than {_MAX_EVENTS} entries; a policy has a few dozen"
        if problem:
            line = f" line {event.start_mark.line + 1}" if event.start_mark else ""
            raise UsageError(f"{name}{line}: {problem}")


def _plain(node: yaml.Node, path: _Path, reading: _Reading) -> Any:
    """The node as Python data, with `_REPORTED` in the place of what is wrong and noted; None: an empty section."""
    reading.lines.setdefault(path, node.start_mark.line + 1)
    match node:
        case yaml.MappingNode() if path in _SECTIONS:
            return _section(node, path, reading)
        case yaml.MappingNode():
            reading.error(path, "must be a value or a list of values, found a section")
        case yaml.SequenceNode() if path not in _SECTIONS:
            return [_plain(item, (*path, index), reading) for index, item in enumerate(node.value)]
        case yaml.ScalarNode() if path not in _SECTIONS:
            return _scalar(node, path, reading)
        case yaml.ScalarNode(tag="tag:yaml.org,2002:null"):
            return None  # its entries are all commented out
        case _:
            reading.error(path, f"must be a section with the keys {', '.join(_SECTIONS[path].model_fields)}")
    return _REPORTED


def _section(node: yaml.MappingNode, path: _Path, reading: _Reading) -> dict[str, Any]:
    section = _SECTIONS[path]
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode):
            reading.error(path, "a key must be one word", line)
        elif key not in section.model_fields:
            reading.error((*path, key), f"unknown key; {_right_key(key, path)}", line)
        elif (*path, key) in reading.lines:
            reading.error((*path, key), f"stands twice, first on line {reading.lines[(*path, key)]}; keep one", line)
        else:
            reading.lines[(*path, key)] = line
            value = _plain(value_node, (*path, key), reading)
            if value is not None:
                data[key] = value
    return data


def _takes(path: _Path, kind: type) -> bool:
    """Whether the key at this path holds a number (float) or a yes or no (bool)."""
    model: Any = Policy
    for key in path:
        field = getattr(model, "model_fields", {}).get(key)
        if field is None:
            return False
        model = field.annotation
    return kind is model or kind in get_args(model)


def _scalar(node: yaml.ScalarNode, path: _Path, reading: _Reading) -> Any:
    if node.tag == "tag:yaml.org,2002:null":
        reading.error(path, "has no value; give one, or remove the key")
        return _REPORTED
    if node.tag == "tag:yaml.org,2002:int" and path[:2] == ("kv_cache", "skip_layers"):
        return str(node.value)
    if node.tag in _NUMBERS and _takes(path, float):
        try:
            return float(node.value)
        except ValueError:  # YAML has more ways to write a number than anybody needs
            reading.error(path, f"must be a decimal number, found {printable(node.value, 60)}")
            return _REPORTED
    if node.tag == "tag:yaml.org,2002:bool" and _takes(path, bool):
        return node.value.lower() in ("true", "yes", "on")
    if kind := _KIND.get(node.tag):
        reading.error(path, f"must be text, found {kind}, {printable(node.value, 60)}; {_right_value(node.value, path)}")
        return _REPORTED
    return str(node.value)


def _validated(data: Any, reading: _Reading) -> Policy | None:
    try:
        return Policy.model_validate(data)
    except ValidationError as problems:
        for problem in problems.errors(include_url=False):
            path, value = problem["loc"], problem["input"]
            if value is _REPORTED:
                continue
            if isinstance(value, list | dict):
                reading.error(path, "takes one value, found a list")
            elif path[:2] in _ALLOWED or path[:1] in _ALLOWED:
                reading.error(path, f"'{printable(str(value), 60)}' is not allowed; {_right_value(str(value), path)}")
            else:
                reason = str(problem.get("ctx", {}).get("error", "")) or _WORDED.get(problem["type"], problem["msg"])
                reading.error(path, f"'{printable(str(value), 60)}' is {reason}")
        return None


def _right_key(key: str, path: _Path) -> str:
    """What was probably meant by an unknown key: one of another section, one spelled alike, or the whole list."""
    for other, section in _SECTIONS.items():
        if other != path and key in section.model_fields:
            return f"did you mean '{_dotted((*other, key))}'?"
    keys = list(_SECTIONS[path].model_fields)
    close = difflib.get_close_matches(key[:60].lower().replace("-", "_"), keys, 1)
    return f"did you mean '{close[0]}'?" if close else f"allowed: {', '.join(keys)}"


def _right_value(value: str, path: _Path) -> str:
    allowed = _ALLOWED.get(path[:2]) or _ALLOWED.get(path[:1])
    if allowed is None:
        return "write it in quotes"
    name = canonical_dtype(value[:60].lower().replace("-", "_"))
    close = [name] if name in allowed else difflib.get_close_matches(name, allowed, 1)
    return (f"did you mean '{close[0]}'? " if close else "") + f"allowed: {', '.join(allowed)}"


def _dotted(path: _Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return printable(text.removeprefix("."), 80)
