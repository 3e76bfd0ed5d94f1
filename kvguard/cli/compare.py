"""`kvguard compare`: is a quantized KV cache free for this model and workload? Arms, controls, statistics, a verdict."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvguard.cli.engine_log import engine_log as open_engine_log
from kvguard.compare.arms import arm_of, chosen_arms
from kvguard.compare.finished import read_arms
from kvguard.compare.gate import Gate, below, load_gate
from kvguard.compare.harness import COMMAND, chosen_harness, harness_command
from kvguard.compare.judge import judge
from kvguard.compare.models import ArmFile
from kvguard.compare.outcome import Outcome
from kvguard.compare.own_tasks import own_items
from kvguard.compare.planning import OWN, TASKS, chosen_tasks
from kvguard.compare.production import DIRECTORY as PRODUCTION
from kvguard.compare.production import with_production
from kvguard.compare.reports import write_reports
from kvguard.compare.run import Comparison, Wish
from kvguard.compare.table import HEADINGS, TASK_HEADINGS, aside, decision_rows, task_rows
from kvguard.engine.process import become_subreaper
from kvguard.files import printable
from kvguard.guard.prepare import raise_file_limit
from kvguard.guard.settings import Settings
from kvguard.telemetry.logging import configure
from kvguard.vocabulary import PolicyRefusal, UsageError

_Compared = tuple[tuple[ArmFile, ...], list[str]]
"""Finished arms of one mode, and what to note about them."""
_STOPPED = 130
_HARNESS = "lm-eval"
_RUNNING = (
    "arms",
    "tasks",
    "own",
    "quick",
    "items",
    "samples",
    "max_tokens",
    "seed",
    "concurrency",
    "production",
    "engine",
    "engine_log",
    "lm_eval",
    "lm_eval_args",
    "lm_eval_command",
)
_WIDE = 120
"""Columns of a terminal that the tables need; on a narrower one the arms stand side by side."""
_TABLE = 64
"""Columns below which no table is drawn, since its words would be cut."""

_FEW = (0, 1, 2, 3, 4, 8, 10)
"""Columns of the tasks' table that a narrow terminal gets."""


def compare(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model directory, or a name in the local hub cache.")
    ] = None,
    *,
    arms: Annotated[str, typer.Option(help="The caches: 16bit and quantized dtypes, each DTYPE[@BACKEND][=CALIBRATION].")] = (
        "16bit,fp8_e4m3"
    ),
    tasks: Annotated[str, typer.Option(help=f"Some of {', '.join(TASKS)}, own, lm-eval; default: all.")] = "",
    own: Annotated[Path | None, typer.Option("--own-tasks", help="Your own items: JSON lines with prompt and answer.")] = None,
    quick: Annotated[bool, typer.Option(help="Few items: says keep 16-bit or cannot tell, never free win.")] = False,
    items: Annotated[int | None, typer.Option(help="Items of each generated task.", min=1, max=100_000)] = None,
    samples: Annotated[
        int, typer.Option(help="Answers for each reasoning item; above 1 drawn at the model's own temperature.", min=1, max=64)
    ] = 1,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer of every item, in tokens.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the items and of the engines.", min=0)] = 0,
    concurrency: Annotated[int, typer.Option(help="Requests in flight while items are asked.", min=1, max=256)] = 4,
    production: Annotated[bool, typer.Option(help="Compare with graphs and compilation on as well, as served.")] = False,
    lm_eval: Annotated[
        str, typer.Option("--lm-eval", help="Tasks of the lm-eval package, asked besides, separated by commas.")
    ] = "",
    lm_eval_args: Annotated[
        str, typer.Option(help="More words of lm-eval's command, as one: '--num_fewshot 5 --limit 100'.")
    ] = "",
    lm_eval_command: Annotated[str, typer.Option(help="lm-eval's command: a name or a path.")] = COMMAND,
    gate: Annotated[
        Path | None, typer.Option(help="A gate's YAML file: exit 3 when the verdict is not the required one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go; the same directory goes on after a kill.")] = None,
    from_files: Annotated[
        list[Path] | None, typer.Option("--from", help="Finished arms (arms/*.json): report on them, run nothing.")
    ] = None,
    engine: Annotated[str, typer.Option(help="The vLLM to run: a name or a path.")] = "vllm",
    engine_log: Annotated[Path | None, typer.Option(help="Where the engines' logs go; default: nowhere.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say whether a quantized KV cache is free for this model: `free win`, `keep 16-bit` or `cannot tell`.

    Each arm is started as `serve` would, with its cache proven, and everything else equal. A 16-bit arm is run twice and one
    is ruined on purpose, so that no verdict rests on tasks that show nothing. vLLM's own flags go after `--`; leave the KV
    flags out.

    Example: kvguard compare MODEL --arms 16bit,fp8_e4m3 --quick --out results -- --max-model-len 8192
    """
    # A comparison that was stopped has no verdict: never exit code 0, which a pipeline would take for one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rules = load_gate(gate) if gate is not None else Gate()
    extra = list(context.args)
    compared: Iterable[_Compared]
    outcome: Outcome | None
    paths: tuple[Path, ...]
    if from_files:
        _only_reporting(context)
        files = [*from_files, *map(Path, filter(None, [model])), *map(Path, extra)]
        compared = [(each, []) for each in read_arms(files)]
        place = out
    else:
        if model is None:
            raise UsageError("MODEL: required is a model to compare on, or --from with finished arms")
        if extra and not extra[0].startswith("-"):
            raise UsageError(f"{extra[0]!r}: only vLLM's flags go after `--`; name another vLLM with --engine")
        chosen = chosen_arms(arms)
        rules.check_arms(chosen[1:])
        harness = chosen_harness(lm_eval, _words(lm_eval_args))
        wish = Wish(
            base=(engine, "serve", model, *extra),
            arms=chosen,
            tasks=_tasks(tasks, own, harness is not None),
            own=own_items(own) if own is not None else (),
            seed=seed,
            quick=quick,
            production=False,
            samples=samples,
            items=items,
            max_tokens=max_tokens,
            concurrency=concurrency,
            harness=harness,
            harness_command=harness_command(lm_eval_command, os.environ) if harness is not None else "",
        )
        place = out if out is not None else Path(f"kvguard-compare-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
        if production:
            arm_of(chosen[0], wish.base, os.environ, seed=seed, production=True)  # refused before any engine time
        compared = _run(wish, production, place, engine_log)
    outcome, paths = None, ()
    for finished, notes in compared:  # the report of the first mode is there before the second is begun
        found = judge(finished, rules.rules, notes)
        outcome = with_production(outcome, found) if outcome is not None else found
        paths = write_reports(outcome, place) if place is not None else ()
    assert outcome is not None  # noqa: S101 (one mode is always there)
    if as_json:
        typer.echo(outcome.model_dump_json(indent=2))
    else:
        show(outcome, Console())
        for path in paths:
            print(f"written   {path}")
    if gate is not None and (missed := below(rules, outcome)):
        raise PolicyRefusal(f"gate {gate}: {'; '.join(missed)}")


def _run(wish: Wish, production: bool, out: Path, engine_log: Path | None) -> Iterator[_Compared]:
    """Run the eager arms, and then those with graphs and compilation; ends kvguard with 130 when it was stopped before."""
    for one, place in ((wish, out), (replace(wish, production=True), out / PRODUCTION))[: 1 + production]:
        finished, notes = run_with_progress(one, place, engine_log)
        if finished is None:
            print(f"kvguard: stopped; the same command with --out {printable(str(out))} goes on from here", file=sys.stderr)
            raise typer.Exit(_STOPPED)
        yield finished, notes


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"--lm-eval-args {printable(line)!r}: {error}") from None


def _only_reporting(context: typer.Context) -> None:
    """Raises UsageError for an option that decides how arms are run, where none is run."""
    for name in _RUNNING:
        source = context.get_parameter_source(name)  # an enumeration of typer's own copy of click
        if source is not None and source.name == "COMMANDLINE":
            flag = {"own": "own-tasks"}.get(name, name.replace("_", "-"))
            raise UsageError(f"--{flag}: has no part in a report of finished arms (--from); leave it out")


def _tasks(named: str, own: Path | None, harness: bool) -> tuple[str, ...]:
    """The generated tasks. `own` and `lm-eval` among the names stand for what is asked in any case."""
    names = [name.strip() for name in named.split(",") if name.strip()]
    generated = [name for name in names if name not in (OWN, _HARNESS)]
    if _HARNESS in names and not harness:
        raise UsageError("--tasks lm-eval: name its tasks with --lm-eval")
    if OWN in names and own is None:
        raise UsageError("--tasks own: name their file with --own-tasks")
    return () if names and not generated else chosen_tasks(",".join(generated))


def run_with_progress(wish: Wish, out: Path, engine_log: Path | None) -> tuple[tuple[ArmFile, ...] | None, list[str]]:
    """Run, and show on standard error what is done, how far it is and how long it may take. None: stopped before the end."""
    configure("warning")
    raise_file_limit()
    become_subreaper()
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        open_engine_log(engine_log) as descriptor,
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar,
    ):
        of_arms, within = bar.add_task("arms", total=None), bar.add_task("preparing", total=None)

        def told(what: str, done: int, total: int) -> None:
            nonlocal within
            if bar.tasks[-1].description != what:  # a step of its own, with an estimate of its own
                bar.remove_task(within)
                within = bar.add_task(what, total=total or None)
            bar.update(within, completed=done)

        def arm_told(name: str, done: int, total: int) -> None:
            label = f"arm {name}{' with graphs and compilation' if wish.production else ''}" if name else "arms"
            bar.update(of_arms, description=label, completed=done, total=total)
            if name and not console.is_terminal:
                console.print(f"kvguard: {label}, {done + 1} of {total}", markup=False, highlight=False, soft_wrap=True)

        comparison = Comparison(
            wish,
            out,
            os.environ,
            settings=Settings(record_directory=out / "records"),
            outputs=(descriptor, descriptor),
            told=told,
            arm_told=arm_told,
        )
        with closing(comparison):
            try:
                return comparison.run(), comparison.notes
            except KeyboardInterrupt:
                return None, []


def show(outcome: Outcome, console: Console) -> None:
    """The decision table, the tasks, and each verdict with its reasons."""
    _show_tables(outcome, console)
    if outcome.production is not None:
        console.print("With graphs and compilation, as served in production:", markup=False, highlight=False)
        _show_tables(outcome.production, console)
    for arm in outcome.arms:
        if arm.verdict is not None:
            console.print(f"{arm.arm}: {arm.verdict}", style="bold", markup=False, highlight=False)
            for reason in (*arm.why, *aside(arm)):
                console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)
    for note in outcome.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _show_tables(outcome: Outcome, console: Console) -> None:
    # Names and verdicts alone fit a terminal; what they stand on follows as lines.
    decisions = [(arm.arm, *row[1:]) for arm, row in zip(outcome.arms, decision_rows(outcome), strict=True)]
    tasks = [(*row[:-1], row[-1].partition(":")[0]) for row in task_rows(outcome)]
    if console.width >= _WIDE:
        _print(HEADINGS, decisions, console)
        _print(TASK_HEADINGS, tasks, console)
    elif console.width < _TABLE:
        _list(HEADINGS, decisions, console)
        _list([TASK_HEADINGS[place] for place in _FEW], [[row[place] for place in _FEW] for row in tasks], console)
    else:
        columns = list(zip(HEADINGS, *decisions, strict=True))
        _print(columns[0], columns[1:], console)
        _print([TASK_HEADINGS[place] for place in _FEW], [[row[place] for place in _FEW] for row in tasks], console)
    for arm in outcome.arms:
        words = f"{arm.arm}: {arm.dtype}, scales {arm.scales}, {arm.confidence}, record {arm.record_digest[:19]}"
        console.print(words, markup=False, highlight=False, soft_wrap=True)


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(_plain(heading), overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    console.print(table)


def _list(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Each row as lines, where no table fits."""
    for row in rows:
        console.print(f"{headings[0]} {row[0]}", style="bold", markup=False, highlight=False)
        for heading, cell in zip(headings[1:], row[1:], strict=True):
            console.print(f"  {heading}: {cell}", markup=False, highlight=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
