"""The `kvguard` command."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from typing import Annotated

import typer

from kvguard import __version__
from kvguard.cli import demo, fleet, policy, record
from kvguard.cli.attach import attach
from kvguard.cli.calibrate import calibrate
from kvguard.cli.check import check
from kvguard.cli.compare import compare
from kvguard.cli.engines import engines
from kvguard.cli.inspect import inspect
from kvguard.cli.overlay import overlay
from kvguard.cli.probe import probe, whatif
from kvguard.cli.serve import serve
from kvguard.cli.verify import verify
from kvguard.files import shown
from kvguard.telemetry.logging import flush
from kvguard.vocabulary import ExitCode, KvguardError

app = typer.Typer(
    name="kvguard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Establish, enforce and record the KV cache that a vLLM engine really runs.",
)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(serve)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(inspect)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(calibrate)
app.command()(overlay)
app.command()(engines)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(check)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(compare)
app.command()(verify)
app.command()(attach)
app.command()(probe)
app.command()(whatif)
app.add_typer(fleet.app, name="fleet", help="Compare the replicas of a fleet.")
app.add_typer(record.app, name="record", help="Show and compare run records.")
app.add_typer(policy.app, name="policy", help="Check policy files and print their schema.")
app.add_typer(demo.app, name="demo", help="The CPU engine, the small model, and the main job on them.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvguard {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Establish, enforce and record the KV cache that a vLLM engine really runs."""


def main() -> None:
    """Run the command line; every error a person must act on is one line and an exit code."""
    _open_standard_streams()
    # Until `serve` listens itself, a stop is clean: nothing has been started (as PID 1 it would be ignored otherwise).
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.CLEAN))
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
            flush()
    except KvguardError as error:
        print(f"kvguard: {shown(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(0)
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _drop_output()
        print(f"kvguard: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)


_FULL = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)


def _drop_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter does not fail on it again."""
    with contextlib.suppress(OSError, ValueError):
        opened = os.open(os.devnull, os.O_WRONLY)
        os.dup2(opened, sys.stdout.fileno())
        os.close(opened)


def _open_standard_streams() -> None:
    """Give closed standard streams /dev/null, so that no file of ours takes their number and gets the engine's output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (for the life of the process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
