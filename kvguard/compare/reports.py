"""The three files of a report, written beside the results."""

from __future__ import annotations

from pathlib import Path

from kvguard.compare.directory import refuse_foreign
from kvguard.compare.markdown import markdown
from kvguard.compare.outcome import Outcome
from kvguard.compare.page import page
from kvguard.compare.results import write_whole

NAMES = ("report.json", "report.md", "report.html")


def write_reports(outcome: Outcome, directory: Path) -> tuple[Path, ...]:
    """Write all three; returns their paths. Raises UsageError where that is not possible, or something else stands there."""
    refuse_foreign(directory, NAMES)
    texts = (outcome.model_dump_json(indent=1) + "\n", markdown(outcome), page(outcome))
    paths = tuple(directory / name for name in NAMES)
    for path, text in zip(paths, texts, strict=True):
        write_whole(path, text, 0o644)  # no prompt and no answer is in a report
    return paths
