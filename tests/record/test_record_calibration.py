"""What a run record says about runtime scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvguard.cli.record import app
from kvguard.record.build import build_record
from kvguard.record.diff import diff_records
from kvguard.record.statement import Statement
from kvguard.record.store import read_record, write_record
from record_samples import sample

CALIBRATION = {
    "way": "overlay",
    "artefact": "sha256:" + "a" * 64,
    "prompts": "sha256:" + "b" * 64,
    "engine": "0.32.0",
    "options": {"format": "fp8_e4m3", "headroom": 2.0, "model_dtype": "bfloat16"},
}


def record(**changes: object) -> dict[str, Any]:
    return build_record(sample().model_copy(update={"calibration": {**CALIBRATION, **changes}}))


def test_it_is_digested_and_read_back(tmp_path: Path) -> None:
    path = write_record(record(), tmp_path, "2025-11-29T15:00:00Z")
    assert Statement.model_validate(read_record(path)).predicate.calibration == CALIBRATION
    made = (record(), record(), record(prompts="sha256:x"), build_record(sample()))
    digests = [one["predicate"]["content_digest"] for one in made]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_difference_is_told_by_name() -> None:
    told = [(found.path, found.b) for found in diff_records(record(), record(prompts="sha256:c", way="flag"))]
    assert told == [("calibration.way", "flag"), ("calibration.prompts", "sha256:c")]
    paths = {found.path for found in diff_records(record(), build_record(sample()))}
    assert {path.partition(".")[0] for path in paths} == {"calibration"}


def test_show_names_artefact_and_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    path = write_record(record(), tmp_path, "2025-11-29T15:00:00Z")
    shown = " ".join(CliRunner().invoke(app, ["show", str(path)]).output.split())
    assert f"calibration overlay, artefact {CALIBRATION['artefact']}, prompts {CALIBRATION['prompts']}" in shown
    plain = write_record(build_record(sample()), tmp_path, "2025-11-29T16:00:00Z")
    assert "calibration overlay" not in CliRunner().invoke(app, ["show", str(plain)]).output
