"""One verification of a running engine: as tables for people, as JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvguard.checkpoint.models import Declared
from kvguard.cli.sizes import human_bytes
from kvguard.evidence.prediction import Prediction
from kvguard.files import printable
from kvguard.guard.verify import Evidence
from kvguard.verdict.checks import violates
from kvguard.vocabulary import Check, CheckResult, Claim, Frozen, Source, Stage

_SHOWN_CHARACTERS = 600
_STYLES = {
    CheckResult.PASS: "green",
    CheckResult.FAIL: "bold red",
    CheckResult.WARN: "yellow",
    CheckResult.UNVERIFIED: "bold yellow",
}
_SHOWN_FIELDS = {
    "kv_cache_dtype",
    "draft_kv_cache_dtype",
    "layer_kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "kv_cache_quant_algo_ignored",
    "calculate_kv_scales",
    "scales_warning",
    "attention_backend",
    "kv_tokens",
    "kv_memory_bytes",
    "kv_scheme",
    "kv_scales",
}


class Verification(Frozen):
    """One verification of a running engine, all of it. `notes` say what could not be read, and why."""

    target: str
    engine_version: str | None
    checkpoint: str | None
    declared: Declared | None
    prediction: Prediction | None
    evidence: Evidence
    checks: tuple[Check, ...]
    notes: tuple[str, ...]


def as_document(result: Verification) -> dict[str, Any]:
    """The verification as JSON data."""
    evidence = result.evidence
    claims = (*(result.declared.claims if result.declared else ()), *_predicted(result), *evidence.claims)
    return {
        "target": result.target,
        "engine_version": result.engine_version,
        "checkpoint": result.checkpoint,
        "effective": evidence.effective.model_dump(mode="json"),
        "capacity": evidence.capacity.model_dump(mode="json"),
        "claims": [claim.model_dump(mode="json") for claim in claims],
        "checks": [check.model_dump(mode="json") for check in result.checks],
        "violated": violates(result.checks),
        "notes": list(result.notes),
    }


def show(result: Verification, console: Console) -> None:
    """The verification as tables. What engine and checkpoint say is shown as text, never read as markup."""
    effective = result.evidence.effective
    version = f"vLLM {result.engine_version}" if result.engine_version else "vLLM, version unknown"
    _line(console, f"{result.target}: {version}; checkpoint {result.checkpoint or 'not found'}", "bold")
    table = Table(box=SIMPLE_HEAD)
    for heading, least in (("source", 7), ("field", 15), ("says", 20), ("where", 20)):
        table.add_column(heading, min_width=least)
    for row in _rows(result):
        table.add_row(*map(_cell, row))
    console.print(table)
    _line(console, f"effective KV cache: {effective.dtype}, {effective.confidence}", "bold")
    _line(console, f"scales: {effective.scales} ({effective.scales_detail})")
    if effective.bytes_per_token is not None and effective.kv_bytes is not None:
        per_token = f"{effective.bytes_per_token:,.0f} bytes per token"
        _line(console, f"{human_bytes(effective.kv_bytes)} for {effective.kv_tokens:,} tokens: {per_token}")
    checks = Table("check", "result", "required", "found", "what to do", box=SIMPLE_HEAD)
    for check in result.checks:
        outcome = Text(check.result if check.enforced else f"{check.result} (not required)", _STYLES[check.result])
        checks.add_row(_cell(check.name), outcome, *map(_cell, (check.required, check.found, check.action)))
    console.print(checks)
    for note in result.notes:
        _line(console, f"note: {note}", "yellow")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text, _SHOWN_CHARACTERS), style), soft_wrap=True)


def _cell(text: str) -> Text:
    return Text(printable(text, _SHOWN_CHARACTERS))


def _rows(result: Verification) -> Iterable[tuple[str, str, str, str]]:
    declared, evidence = result.declared, result.evidence
    if declared is None:
        yield "declared", "", "not read", "the checkpoint was not found: give --checkpoint"
    for claim in (*(declared.claims if declared else ()), *_predicted(result)):
        yield _row(claim)
    yield "tensors", "", "not read", "only kvguard serve can read the workers"
    yield _row(evidence.capacity.claim)
    for source, absent in ((Source.METRICS, "no vllm:cache_config_info"), (Source.LOG, "give --engine-log")):
        found = [claim for claim in evidence.claims if claim.source is source and claim.field in _SHOWN_FIELDS]
        if not found:
            yield str(source), "", "no information", absent
        for claim in found:
            yield _row(claim)


def _row(claim: Claim) -> tuple[str, str, str, str]:
    if claim.value is None:
        says = claim.note.split(";")[0] or "no information"
    elif claim.field == "kv_memory_bytes":
        says = f"{claim.value:,}"
    else:
        says = claim.value if isinstance(claim.value, str) else json.dumps(claim.value, default=str)
    where = claim.where if claim.value is None or not claim.note else f"{claim.where} ({claim.note})"
    stage = f"{claim.source} ({claim.stage})" if claim.stage in (Stage.REQUESTED, Stage.DECLARED) else str(claim.source)
    return stage, claim.field, says, where


def _predicted(result: Verification) -> tuple[Claim, ...]:
    return result.prediction.claims if result.prediction is not None else ()
