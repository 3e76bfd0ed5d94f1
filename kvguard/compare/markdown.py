"""The report as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvguard.compare.outcome import Outcome
from kvguard.compare.table import HEADINGS, TASK_HEADINGS, aside, decision_rows, task_rows


def markdown(outcome: Outcome) -> str:
    """One page: the decision table, the tasks, why, what differs between the records, what was not covered."""
    parts = [
        f"# KV cache comparison: {_text(outcome.model)}",
        f"vLLM {_text(outcome.engine)}, seed {outcome.seed}{', quick' if outcome.quick else ''}. Margin "
        f"{100 * outcome.rules.margin:g} points, capacity ratio {outcome.rules.capacity_ratio:g}.",
        _table(HEADINGS, decision_rows(outcome)),
        "## Tasks",
        "Losses in points of 100, paired by item; the interval holds both one-sided 95 % bounds.",
        _table(TASK_HEADINGS, task_rows(outcome)),
    ]
    if outcome.production is not None:
        parts += [
            "## With graphs and compilation, as served in production",
            _table(HEADINGS, decision_rows(outcome.production)),
            _table(TASK_HEADINGS, task_rows(outcome.production)),
        ]
    for arm in outcome.arms:
        if arm.verdict is not None:
            parts.append(f"## {_text(arm.arm)}: {arm.verdict}")
            parts.append("\n".join(f"* {_text(reason)}" for reason in arm.why))
            if beside := aside(arm):
                parts.append("Beside it:\n\n" + "\n".join(f"* {_text(told)}" for told in beside))
            parts.append(f"{arm.identical[0]} of {arm.identical[1]} outputs are identical to the 16-bit arm's.")
            rows = [(found["path"], found["reference"], found["arm"]) for found in arm.differences]
            parts += ["What differs between the two records:", _table(("where", "16-bit", arm.arm), rows)]
    parts += ["## Not covered", "\n".join(f"* {_text(note)}" for note in outcome.notes), "## Records and commands"]
    arms = (*outcome.arms, *(outcome.production.arms if outcome.production else ()))
    commands = [f"* {_text(arm.arm)}: record `{arm.record_digest}`, `{_code(shlex.join(arm.command))}`" for arm in arms]
    parts.append("\n".join(commands))
    return "\n\n".join(parts) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(headings), ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_text(cell) if cell != "---" else cell for cell in line) + " |" for line in lines)


def _text(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#&" else char for char in line)


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())
