"""The upgrade preview of `kvguard inspect --across`: one command and checkpoint on several vLLM versions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import typer
from rich.console import Console
from rich.table import Table

from kvguard.cli.check import read_config
from kvguard.engine.command import parse_command, split_words
from kvguard.engine.hub import locate
from kvguard.engine.preview import Outcome, differences, full_version, preview
from kvguard.facts.devices import Device
from kvguard.files import printable, shown
from kvguard.vocabulary import UsageError


def show_across(
    model: str,
    across: str,
    argv: tuple[str, ...],
    given: Mapping[str, str | None],
    device: Device | None,
    revision: str | None = None,
    *,
    as_json: bool,
) -> None:
    """Print what each version of a comma-separated list makes of the command, and what changes in between.

    Without a command, the model alone is served. UsageError for an empty list, and for options of `given` (name to value)
    that a command has to say for itself.
    """
    versions = [full_version(text.strip()) for text in across.split(",") if text.strip()]
    if not versions:
        raise UsageError("inspect: a command after `--` is previewed on versions: give --across, such as 0.16,0.22,0.32")
    said = [name for name, value in given.items() if value is not None and not (name == "--engine-version" and value == across)]
    if said:
        raise UsageError(f"inspect --across: {', '.join(said)}: say it in the command after `--` instead")
    _check_command(model, argv, versions)
    found = locate(model, os.environ, revision)
    outcomes = [preview(argv or ("vllm", "serve", model), version, found.files, read_config, device) for version in versions]
    changes = differences(outcomes)
    if as_json:
        document = {
            "versions": [outcome.model_dump(mode="json") for outcome in outcomes],
            "changes": list(changes),
            "hub": found.published and found.published.model_dump(mode="json"),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False, markup=False, width=200)
    table = Table("vLLM", "KV cache", "scales", "bytes/token", "log and metrics show", "does not start", box=None)
    for outcome in outcomes:
        table.add_row(*(shown(cell) for cell in _row(outcome)))
    console.print(table)
    for change in changes or ("nothing changes between these versions",) * (len(outcomes) > 1):
        console.print(shown(change))


def _check_command(model: str, argv: tuple[str, ...], versions: list[str]) -> None:
    """Raise UsageError for a command that does not serve this model. What one version's parser refuses is left to its row."""
    if not argv:
        return
    words = split_words(argv)
    if words.subcommand != "serve":
        raise UsageError(f"`vllm {printable(words.subcommand)}`: required is `vllm serve MODEL …`")
    for version in versions:
        try:
            served = parse_command(words, version, read_config).model
        except UsageError:
            continue
        if served != model and os.path.realpath(served) != os.path.realpath(model):
            raise UsageError(
                f"inspect {printable(model)}: the command after `--` serves {printable(served)}; name one model in both places"
            )
        return


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.problem:
        return outcome.version, "-", "-", "-", "-", outcome.problem
    dtype = outcome.dtype + (" (not as typed)" if outcome.honoured is False else "")
    size = "unknown" if outcome.bytes_per_token is None else f"{outcome.bytes_per_token:,.0f}"
    return outcome.version, dtype, outcome.scales, size, outcome.echo or "unknown", ""
