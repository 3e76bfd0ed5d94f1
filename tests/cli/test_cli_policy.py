from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvguard.cli.policy import app, example_names
from kvguard.policy.parse import parse_policy
from kvguard.policy.schema import policy_schema
from kvguard.vocabulary import UsageError

run = CliRunner()


def test_schema_prints_the_schema() -> None:
    assert json.loads(run.invoke(app, ["schema"]).output) == policy_schema()


def test_check_says_what_is_required_in_words(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("kv_cache: {dtype: [fp8, 16bit], scales: unit}\non_violation: hold\n")
    result = run.invoke(app, ["check", str(path)])
    assert result.exit_code == 0
    assert "fp8_e4m3 or the model's own dtype" in result.output
    assert "exactly 1.0 in every layer" in result.output
    assert "stay up, unready" in result.output
    assert "digest:" in result.output


def test_check_json(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("kv_cache: {dtype: fp8}")
    result = run.invoke(app, ["check", str(path), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output)["policy"]["kv_cache"]["dtype"] == ["fp8_e4m3"]


def test_errors_go_to_the_caller_or_into_the_json(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("dtype: fp8\nscale: x\n")
    plain = run.invoke(app, ["check", str(path)])
    assert isinstance(plain.exception, UsageError)
    assert plain.exception.exit_code == 2
    result = run.invoke(app, ["check", str(path), "--json"])
    assert result.exit_code == 2
    report = json.loads(result.output)
    assert report["ok"] is False
    assert [error.split(": ")[0] for error in report["errors"]] == [f"{path} line 1", f"{path} line 2"]


@pytest.mark.parametrize("name", ["fp8-calibrated", "fp8-unit-scales", "sixteen-bit"])
def test_examples_are_printed_whole(name: str) -> None:
    assert name in example_names()
    result = run.invoke(app, ["example", name])
    assert result.exit_code == 0
    parse_policy(result.output.encode(), name)


def test_an_unknown_example_names_those_there_are() -> None:
    result = run.invoke(app, ["example", "../models"])
    assert isinstance(result.exception, UsageError)
    assert "fp8-calibrated, fp8-unit-scales, sixteen-bit" in str(result.exception)
