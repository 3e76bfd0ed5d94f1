"""A run record as tables for a terminal: one screen, however many layers and ranks the engine has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvguard.canonical import canonical_json
from kvguard.evidence.tensors import extent, is_layer
from kvguard.files import printable
from kvguard.record.statement import STAGES, Statement
from kvguard.vocabulary import CheckResult, Claim, Effective, ScaleState

_ROWS_A_FIELD = 3
_SHARES = {"required": 4, "value": 4, "found": 4, "read at": 5}
_NUMBER = re.compile(r"(\d{1,9})")
_STYLES = {"pass": "green", "serve": "green", "fail": "red", "refuse": "red", "hold": "red"}


def summary(statement: Statement, file: Path) -> Table:
    """The verdict, the effective cache, and what identifies this start."""
    predicate, effective = statement.predicate, statement.effective
    table = Table.grid(padding=(0, 2))
    rows = {
        "record": str(file),
        "verdict": predicate.verdict,
        "effective": _effective(effective),
        "memory": _memory(effective),
        "backend": ", ".join(effective.attention_backends) or "unknown",
        "engine": ", ".join(f"{name} {_cell(value)}" for name, value in predicate.engine.items()),
        "subjects": _subjects(statement),
        "command": " ".join(predicate.plan.argv) or "not started by kvguard",
        "changes": "; ".join(f"{change.what} ({change.why})" for change in predicate.plan.changes) or "none",
        "refusal": predicate.plan.refusal or "",
        "contradictions": "; ".join(effective.contradictions),
        "scales digest": predicate.scales_digest or _no_scales(effective),
        "calibration": _calibration(predicate.calibration),
        "drift": "; ".join(f"{one.get('field')}: {one.get('before')} before, {one.get('after')}" for one in predicate.drift),
        "connectors": "; ".join(json.dumps(one) for one in predicate.connectors),
        "policy digest": predicate.policy_digest or "no policy",
        "content digest": predicate.content_digest,
    }
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, style="bold"), text(value, limit=400, style=_STYLES.get(value, "")))
    return table


def _effective(effective: Effective) -> str:
    detail = f" ({effective.scales_detail})" if effective.scales_detail else ""
    left = f", 16-bit layers: {', '.join(effective.sixteen_bit_layers)}" if effective.sixteen_bit_layers else ""
    scales = f"scales {effective.scales.value} {effective.scales_confidence.value}{detail}"
    return f"{effective.dtype} {effective.confidence.value}, {scales}{left}"


def _no_scales(effective: Effective) -> str:
    return "" if effective.scales is ScaleState.NOT_QUANTIZED else "scales not read"


def _calibration(calibration: Mapping[str, Any] | None) -> str:
    """The way, the artefact and the prompt set of runtime scales, "" without them."""
    if calibration is None:
        return ""
    parts = (f"{name} {calibration[name]}" for name in ("artefact", "prompts") if name in calibration)
    return ", ".join((str(calibration.get("way", "unknown way")), *parts))


def _memory(effective: Effective) -> str:
    parts = [
        (effective.kv_bytes, "{:,} bytes"),
        (effective.kv_tokens, "{:,} tokens"),
        (effective.bytes_per_token, "{:,.6g} bytes a token"),
    ]
    return ", ".join(form.format(value) for value, form in parts if value is not None) or "unknown"


def _subjects(statement: Statement) -> str:
    named = [f"{subject.name} {subject.digest.sha256[:12]}" for subject in statement.subject]
    return ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "") or "none"


def accounts(statement: Statement) -> Table:
    """What each account says; sources that say the same share a row, with the first one's place."""
    table = _table("account", "source", "field", "value", "read at", title="what was said")
    for stage in STAGES:
        claims = statement.claims(stage)
        said: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for source, field, value, where in chain(_summed(claims), _folded(claims)):
            said.setdefault((field, value), []).append((source, where))
        for number, ((field, value), told) in enumerate(said.items()):
            sources = ", ".join(source for source, _ in told)
            table.add_row("" if number else stage, *map(text, (sources, field, value)), _line(told[0][1]))
    return table


def _summed(claims: Sequence[Claim]) -> Iterator[tuple[str, str, str, str]]:
    """One row for all layers whose cache is alike, however many there are: dtype, tensor, backend."""
    alike: dict[str, list[Claim]] = {}
    for claim in filter(is_layer, claims):
        told = claim.value if isinstance(claim.value, dict) else {}
        names = [_cell(told[name]) for name in ("kv_cache_dtype", "tensor_dtype", "backend") if told.get(name) is not None]
        alike.setdefault(", ".join((*names, *filter(None, [claim.note]))), []).append(claim)
    for value, group in alike.items():
        yield "tensors", "layer_kv_cache", f"{extent(group)}: {value}", "cache tensors (--layers lists them)"


def _folded(claims: Sequence[Claim]) -> Iterator[tuple[str, str, str, str]]:
    """One row for each other source, field and value with its first place; many values of one field share a row."""
    said: dict[tuple[str, str], dict[str, list[str]]] = {}
    for claim in claims:
        if is_layer(claim):
            continue
        value = f"— ({claim.note})" if claim.value is None and claim.note else _cell(claim.value)
        said.setdefault((claim.source.value, claim.field), {}).setdefault(value, []).append(claim.where)
    for (source, field), values in said.items():
        if len(values) > _ROWS_A_FIELD:
            first, *_, last = values
            yield (
                source,
                field,
                f"{len(values)} different: {first} … {last}",
                _places([*chain.from_iterable(values.values())]),
            )
        else:
            for value, where in values.items():
                yield source, field, value, _places(where)


def _places(where: Sequence[str]) -> str:
    return where[0] + (f" and {len(where) - 1} more" if len(where) > 1 else "")


def checks(statement: Statement) -> Table:
    """Policy against evidence, with what to do below each check that asks for it."""
    table = _table("check", "result", "required", "found", "read at", title="checks")
    for check in statement.checks:
        result = check.result.value if check.enforced else f"{check.result.value} (not enforced)"
        style = _STYLES.get(check.result.value, "yellow")
        place = _line if check.result is CheckResult.PASS else text
        found = text(check.found)
        table.add_row(text(check.name), Text(result, style=style), place(check.required), found, place(check.where))
        if check.action:
            table.add_row("", "", Text("to do", style="bold"), text(check.action, limit=400), "")
    return table


def layer_table(statement: Statement) -> Table:
    """What was read in each rank and layer, one row each."""
    members = ("rank", "name", "kv_cache_dtype", "tensor_dtype", "backend", "k_scale", "v_scale", "shape")
    table = _table("rank", "layer", "dtype", "tensor", "backend", "k scale", "v scale", "shape", title="layers")
    for layer in sorted(statement.layers, key=_by_number):
        table.add_row(*(text(layer.get(member)) for member in members))
    return table


def _by_number(layer: Mapping[str, Any]) -> list[str | int]:
    """Layer 10 after layer 9."""
    parts = _NUMBER.split(f"{layer.get('rank')} {layer.get('name')}")
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _table(*columns: str, title: str) -> Table:
    """Names keep their width and the rest shares what is left."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge, table.pad_edge, table.expand = False, False, True
    for column in columns:
        table.add_column(column, ratio=_SHARES.get(column))
    return table


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value).decode()


def text(value: Any, limit: int = 120, style: str = "") -> Text:
    """A value for a table: what a file put into a record cannot move the cursor or become markup."""
    return Text("—" if value is None else printable(_cell(value), limit), style=style)


def _line(value: str) -> Text:
    """A value that is cut to one line of its column; `--json` has it whole."""
    line = text(value)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
