"""`kvguard record`: what was established about one start, and what differed between two."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvguard.cli.record_tables import accounts, checks, layer_table, summary, text
from kvguard.files import printable
from kvguard.record.diff import diff_records
from kvguard.record.statement import Statement
from kvguard.record.store import default_directory, latest, read_record

app = typer.Typer(no_args_is_help=True, help="Show a run record, or what differed between two.")

DIFFERENT = 1
"""Exit code of `diff` when the records differ, as of diff(1)."""


@app.command()
def show(
    path: Annotated[Path | None, typer.Argument(help="The record's file; the newest one if left out.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="List what was read in each layer.")] = False,
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
    console.print(summary(statement, file))
    console.print(accounts(statement))
    if statement.checks:
        console.print(checks(statement))
    if layers:
        console.print(layer_table(statement))


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
            table.add_row(text(item.path), text(item.a), text(item.b))
        Console().print(table)
    else:
        typer.echo("no difference: both starts established the same")
    if differences:
        raise typer.Exit(DIFFERENT)
