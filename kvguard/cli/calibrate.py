"""`kvguard calibrate`: measure what keys and values span, and write the scales as an overlay of the checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvguard.cli.engine_log import engine_log as open_engine_log
from kvguard.engine.process import become_subreaper
from kvguard.files import printable
from kvguard.guard.calibrating import Calibrated, Traffic, calibrate_from_traffic
from kvguard.guard.calibrating import calibrate as run_calibration
from kvguard.guard.prepare import Prepared, raise_file_limit
from kvguard.guard.settings import Settings
from kvguard.record.store import default_directory
from kvguard.reference.prompts import PromptSet, load_prompts
from kvguard.reference.ranges import Spanned
from kvguard.reference.scales import DEFAULT_HEADROOM, MAX_HEADROOM
from kvguard.telemetry.logging import configure
from kvguard.vocabulary import UsageError

_PERCENT = 100.0
_TIMEOUT = 30.0
_STOPPED = 130  # as a shell reports SIGINT: nothing was written


def calibrate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, or a name in the local hub cache.")],
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your texts: blocks separated by blank lines, or JSON lines (`text` or `messages`); default: ours."),
    ] = None,
    from_traffic: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Management port of a guarded engine of this model whose policy lets probes measure clients' requests: "
            "what those spanned, in place of texts. No engine is started.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write; default: $XDG_CACHE_HOME/kvguard/overlays/<digest>.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(help="How far later values may exceed these before they saturate.", min=1.0, max=MAX_HEADROOM)
    ] = DEFAULT_HEADROOM,
    engine: Annotated[str, typer.Option(help="The vLLM to run: a name or a path.")] = "vllm",
    engine_log: Annotated[Path | None, typer.Option(help="Where the engine's log goes; default: nowhere.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Calibrate FP8 KV scales on text that you chose: max |K| and max |V| per layer, measured in a guarded 16-bit engine.

    vLLM's own flags go after `--`; leave the KV flags out. Start the calibrated model with
    `kvguard serve --scales PATH`, or let `serve` find it.

    Example: kvguard calibrate MODEL --prompts prompts.txt -- --max-model-len 8192
    """
    # A calibration that was stopped has no result: never exit code 0, which a script would take for one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    configure()
    flags = list(context.args)
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r}: only vLLM's flags go after `--`; name another vLLM with --engine")
    argv = [engine, "serve", model, *flags]
    if from_traffic is not None:
        if prompts is not None:
            raise UsageError("--from-traffic is about clients' requests, --prompts about texts: give one of them")
        measured = calibrate_from_traffic(argv, read_traffic(from_traffic), os.environ, headroom=headroom, out=out)
        _tell(measured, as_json=as_json)
        return
    chosen = load_prompts(prompts)
    raise_file_limit()
    become_subreaper()
    settings = Settings(record_directory=default_directory(os.environ))
    with open_engine_log(engine_log) as descriptor:
        outputs = (descriptor, descriptor)
        done = run_with_progress(argv, chosen, headroom=headroom, outputs=outputs, settings=settings, out=out)
    if isinstance(done, int):
        raise typer.Exit(done or _STOPPED)
    _tell(done, as_json=as_json)


def _tell(done: Calibrated, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(as_document(done), indent=2, ensure_ascii=False))
    else:
        show(done, Console())


def read_traffic(url: str) -> Traffic:
    """What a management port measured on clients' requests. Raises UsageError with its own words."""
    pages = {}
    for path in ("/shadow/ranges", "/record"):
        try:
            answer = httpx.get(url.rstrip("/") + path, timeout=_TIMEOUT, trust_env=False)
            document = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            said = printable(str(error))
            raise UsageError(f"{printable(url)}: no management port of kvguard answers there ({said})") from error
        if answer.status_code != httpx.codes.OK or not isinstance(document, dict):
            detail = document.get("detail") if isinstance(document, dict) else None
            raise UsageError(f"{printable(url)}{path}: HTTP {answer.status_code}: {printable(str(detail or 'no document'))}")
        pages[path] = document
    try:
        spanned = Spanned.model_validate({key: pages["/shadow/ranges"][key] for key in Spanned.model_fields})
        files = {subject["name"]: str(subject["digest"]["sha256"]) for subject in pages["/record"]["subject"]}
        return Traffic(origin=printable(url), engine=str(pages["/shadow/ranges"]["engine"]), spanned=spanned, files=files)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{printable(url)}: its documents were not understood ({type(error).__name__})") from error


def run_with_progress(
    argv: Sequence[str],
    prompts: PromptSet,
    *,
    headroom: float,
    outputs: tuple[int, int],
    settings: Settings,
    out: Path | None = None,
) -> Calibrated | int:
    """Calibrate, and show on standard error what is done and how far it is. An int is the exit code of a failed start."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting the engine in 16 bit", total=None)

        def told(prepared: Prepared) -> None:
            console.print(
                f"kvguard: calibrating {prepared.declared.directory} on {len(prompts.prompts)} texts "
                f"({prompts.origin}) with vLLM {prepared.engine.full_version}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

        def moved(done: int, total: int) -> None:
            bar.update(task, description="measuring", completed=done, total=total)

        return run_calibration(
            argv,
            prompts,
            os.environ,
            headroom=headroom,
            settings=settings,
            out=out,
            outputs=outputs,
            told=told,
            progress=moved,
        )


def as_document(done: Calibrated) -> dict[str, Any]:
    """The calibration's report with its place and digest."""
    return {"path": done.calibration.path, "digest": done.calibration.digest, **done.report}


def show(done: Calibrated, console: Console) -> None:
    """The report as a table, then where the calibration is and how to use it."""
    report = done.report
    table = Table(box=SIMPLE_HEAD)
    for heading in ("layer", "max |K|", "k scale", "lost at 1.0", "max |V|", "v scale", "lost at 1.0"):
        table.add_column(heading, justify="right")
    for row in report["layers"]:
        cells = [str(row["layer"])]
        for side in (row["k"], row["v"]):
            lost = side["at_scale_one"]["saturated"] + side["at_scale_one"]["underflowed"]
            cells += [
                f"{side['amax']:.4g}",
                f"{side['scale']:.3g}",
                f"{_PERCENT * lost:.2g} %",
            ]
        table.add_row(*cells)
    console.print(table)
    prompts = report["prompts"]
    console.print(
        f"{report['formula']}; {prompts['tokens']} tokens of {prompts['texts']} {prompts['of']}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"prompts   {prompts['digest']}", highlight=False, soft_wrap=True)
    console.print(f"artefact  {done.calibration.digest}", highlight=False, soft_wrap=True)
    console.print(f"written   {done.calibration.path}", highlight=False, soft_wrap=True, markup=False)
