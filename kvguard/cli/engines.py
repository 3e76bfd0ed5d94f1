"""`kvguard engines`: what is known about each vLLM version's KV cache, with where it was read."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvguard.facts.engines import EngineFacts, all_engine_facts, engine_facts, summary_row
from kvguard.facts.versions import KNOWN, OLDEST_GUARDED

_COLUMNS = {
    "version": "vLLM",
    "dtypes": "dtypes",
    "typed_16_bit": "16 bit can be typed",
    "compressed_tensors": "auto: compressed-tensors scheme",
    "modelopt_fp8": "auto: ModelOpt FP8",
    "modelopt_nvfp4": "auto: ModelOpt NVFP4",
    "calculate_kv_scales": "--calculate-kv-scales",
    "skip_layers": "skip-layers",
    "guarded": "kvguard serve",
}


def engines(
    versions: Annotated[list[str] | None, typer.Argument(help="Versions to show in full (default: a table of all).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every fact, with its source.")] = False,
) -> None:
    """Show what each vLLM version does with the KV cache: values, defaults, precedence, scales, log and metrics.

    Example: kvguard engines 0.16.0 0.32.0
    """
    facts = tuple(engine_facts(version) for version in versions) if versions else all_engine_facts()
    if as_json:
        typer.echo(json.dumps({"known": KNOWN, "engines": [one.model_dump(mode="json") for one in facts]}, indent=2))
    elif versions:
        for one in facts:
            _print_one(one)
    else:
        _print_table(facts)


def _print_table(facts: tuple[EngineFacts, ...]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False, width=220)
    table = Table(*_COLUMNS.values(), box=None)
    for one in facts:
        row = summary_row(one)
        table.add_row(*(_cell(row[key]) for key in _COLUMNS))
    console.print(table)
    console.print(
        f"\nOther versions are recognised, and everything about them is unknown. `kvguard serve` needs {OLDEST_GUARDED}."
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value)


def _print_one(facts: EngineFacts) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)

    def line(topic: str, text: str) -> None:
        console.print(f"{topic + ':':<26} {text}")

    line("vLLM", facts.version)
    if not facts.examined:
        line("facts", facts.note)
        console.print()
        return
    line("--kv-cache-dtype takes", ", ".join(facts.dtypes or ()))
    line("--calculate-kv-scales", facts.calculate_kv_scales or "unknown")
    for state, wanted in (("has", True), ("has not", False), ("not read", None)):
        names = [flag for flag, present in facts.flags.items() if present is wanted]
        if names:
            line(f"flags it {state}" if wanted is not None else "flags not read", ", ".join(names))
    for name, ruling in facts.auto.items():
        line(f"auto with {name}", f"{ruling.effect}{f' ({ruling.reason})' if ruling.reason else ''}")
    for text in facts.precedence:
        line("precedence", text)
    for name, methods in facts.scale_names.items():
        line(f"scales named {name}", "loaded" if methods == ("any",) else f"loaded for {', '.join(methods)}")
    owners = [method for method, layers in facts.scale_owners.items() if layers["mla"]]
    line("methods that load scales", ", ".join(facts.scale_owners))
    line("of those, for MLA too", ", ".join(owners) or "none")
    for echo in facts.echo:
        worth = "true" if echo.true else "not what runs"
        line("log and metrics show", f"{echo.shows} (decided by {echo.what}): {worth}")
    for label, reason in facts.stale_labels.items():
        line(f"label {label}", reason)
    if facts.log_prefix:
        line("log prefix", f"{facts.log_prefix.engine}; {facts.log_prefix.worker}")
    line("cache usage series", ", ".join(facts.series["kv_pinned_ratio"]) or "none")
    console.print()
