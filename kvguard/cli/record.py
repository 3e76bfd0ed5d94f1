"""`kvguard record`: what was established about one start, and what differed between two."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvguard.canonical import canonical_json
from kvguard.files import printable
from kvguard.record.diff import diff_records
from kvguard.record.statement import STAGES, Statement
from kvguard.record.store import default_directory, latest, read_record
from kvguard.vocabulary import Claim, Effective

app = typer.Typer(no_args_is_help=True, help="Show a run record, or what differed between two.")

DIFFERENT = 1
"""Exit code of `diff` when the records differ, as of diff(1)."""

_ROWS_A_FIELD = 3
_STYLES = {"pass": "green", "serve": "green", "fail": "red", "refuse": "red", "hold": "red"}


@app.command()
def show(
    path: Annotated[Path | None, typer.Argument(help="The record's file; the newest one if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record itself.")] = False,
) -> None:
    """Show what was requested, declared, predicted and observed, what that proves, and the verdict.

    Example: kvguard record show
    """
    file = path or latest(default_directory(os.environ))
    record = read_record(file)
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    statement = Statement.model_validate(record)
    console = Console()
    console.print(_summary(statement, file))
    console.print(_accounts(statement))
    if statement.checks:
        console.print(_checks(statement))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="One record's file.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="The other's.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what differed between two starts. Exit 0 when nothing did, 1 when something did, 2 on bad input.

    Example: kvguard record diff monday.json tuesday.json
    """
    differences = diff_records(read_record(a), read_record(b))
    if as_json:
        report = {"equal": not differences, "differences": [item.model_dump(mode="json") for item in differences]}
        typer.echo(json.dumps(report, indent=2))
    elif differences:
        table = Table("what", escape(printable(a.name)), escape(printable(b.name)))
        for item in differences:
            table.add_row(_text(item.path), _text(item.a), _text(item.b))
        Console().print(table)
    else:
        typer.echo("no difference: both starts established the same")
    if differences:
        raise typer.Exit(DIFFERENT)


def _summary(statement: Statement, file: Path) -> Table:
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
        "scales digest": predicate.scales_digest or "scales not read",
        "policy digest": predicate.policy_digest or "no policy",
        "content digest": predicate.content_digest,
    }
    for name, value in rows.items():
        if value:
            table.add_row(Text(name, style="bold"), _text(value, limit=400, style=_STYLES.get(value, "")))
    return table


def _effective(effective: Effective) -> str:
    detail = f" ({effective.scales_detail})" if effective.scales_detail else ""
    left = f", 16-bit layers: {', '.join(effective.sixteen_bit_layers)}" if effective.sixteen_bit_layers else ""
    scales = f"scales {effective.scales.value} {effective.scales_confidence.value}{detail}"
    return f"{effective.dtype} {effective.confidence.value}, {scales}{left}"


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


def _accounts(statement: Statement) -> Table:
    table = Table("account", "source", "field", "value", "read at", title="what was said", title_justify="left")
    for stage in STAGES:
        for row in _folded(statement.claims(stage)):
            table.add_row(stage, *map(_text, row))
        table.add_section()
    return table


def _folded(claims: Sequence[Claim]) -> Iterator[tuple[str, str, str, str]]:
    """One row for each source, field and value with its first place; many values of one field share a row."""
    said: dict[tuple[str, str], dict[str, list[str]]] = {}
    for claim in claims:
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


def _checks(statement: Statement) -> Table:
    table = Table("check", "result", "required", "found", "read at", "to do", title="checks", title_justify="left")
    for check in statement.checks:
        result = check.result.value if check.enforced else f"{check.result.value} (not enforced)"
        style = _STYLES.get(check.result.value, "yellow")
        texts = (check.required, check.found, check.where, check.action)
        table.add_row(_text(check.name), Text(result, style=style), *map(_text, texts))
    return table


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value).decode()


def _text(value: Any, limit: int = 120, style: str = "") -> Text:
    """A value for a table: what a file put into a record cannot move the cursor or become markup."""
    return Text("—" if value is None else printable(_cell(value), limit), style=style)
