"""`kvguard check` and `kvguard inspect` in this process."""

from __future__ import annotations

import typer
from click.testing import Result
from typer.testing import CliRunner

from kvguard.cli.check import check
from kvguard.cli.inspect import inspect

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": False}
app = typer.Typer()
app.command(context_settings=EXTRA)(check)
app.command(context_settings=EXTRA)(inspect)


def run(*arguments: object) -> Result:
    """What the command of these arguments gives."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
