from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvguard.cli.record import app
from kvguard.record.build import RecordInput, build_record
from kvguard.record.store import write_record
from kvguard.vocabulary import CheckResult, Source, Stage, UsageError
from record_samples import claim, layer, sample

run = CliRunner()


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    directory = tmp_path / "kvguard" / "records"
    fp8 = write_record(build_record(sample()), directory, "2025-11-29T15:00:00Z")
    sixteen = build_record(sample(dtype="bfloat16", result=CheckResult.FAIL))
    return fp8, write_record(sixteen, directory, "2025-11-29T16:00:00Z")


def test_show_fits_one_screen_and_has_every_account(records: tuple[Path, Path]) -> None:
    result = run.invoke(app, ["show", str(records[0])])
    assert result.exit_code == 0
    for part in (
        "fp8_e4m3 proven",
        "scales checkpoint proven",
        "93,184 tokens",
        "requested",
        "declared",
        "predicted",
        "observed",
    ):
        assert part in result.output
    for part in (
        "— (auto: no information)",
        "vllm serve trap",
        "pass",
        "sha256:",
        "engine log",
        "version 0.32.0",
        "11,522.8 bytes a token",
    ):
        assert part in result.output
    assert len(result.output.splitlines()) < 50


def real_size() -> RecordInput:
    """30 layers, and as many claims about them."""
    layers = [{**layer(number), "tensor_dtype": "torch.uint8"} for number in range(30)]
    told = [
        claim(
            Stage.OBSERVED,
            Source.TENSORS,
            "layer_kv_cache",
            {name: item[name] for name in ("kv_cache_dtype", "tensor_dtype", "backend", "k_scale", "v_scale")},
            f"rank 0 layer {item['name']}",
        )
        for item in layers
    ]
    start = sample(layers=layers)
    effective = start.effective.model_copy(update={"supported_by": tuple(told)})
    return start.model_copy(update={"observed": (*told, *start.observed), "effective": effective})


def test_thirty_layers_are_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = str(write_record(build_record(real_size()), tmp_path, "2025-11-29T15:00:00Z"))
    output = " ".join(run.invoke(app, ["show", path]).output.split())
    assert "30 layers on 1 rank: fp8_e4m3, torch.uint8, cache tensors (--layers lists them) CPU_ATTN" in output
    assert "model.layers.7." not in output
    assert len(run.invoke(app, ["show", path]).output.splitlines()) < 50
    listed = run.invoke(app, ["show", path, "--layers"]).output.splitlines()
    rows = [line.split() for line in listed if "self_attn.attn" in line and line.startswith("0 ")]
    assert [row[1].split(".")[2] for row in rows] == [str(number) for number in range(30)]
    assert rows[0][2:] == ["fp8_e4m3", "torch.uint8", "CPU_ATTN", "[0.05]", "[0.02]", "[728,3,128,128]"]


def test_layers_that_differ_have_rows_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    start = real_size()
    first = start.observed[0]
    wide = first.model_copy(update={"value": {**first.value, "kv_cache_dtype": "bfloat16"}, "note": "odd"})
    record = build_record(start.model_copy(update={"observed": (wide, *start.observed[1:])}))
    output = run.invoke(app, ["show", str(write_record(record, tmp_path, "2025-11-29T15:00:00Z"))]).output
    assert "29 layers on 1 rank: fp8_e4m3, torch.uint8" in output
    assert "1 layer on 1 rank: bfloat16, torch.uint8, CPU_ATTN, odd" in output


def test_what_is_wrong_is_shown_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = "all forty words of the person on call " * 2
    check = (
        sample()
        .checks[0]
        .model_copy(
            update={
                "result": CheckResult.FAIL,
                "required": words,
                "where": words,
                "found": words,
                "action": "change the policy",
            }
        )
    )
    record = build_record(sample().model_copy(update={"checks": (check,)}))
    output = run.invoke(app, ["show", str(write_record(record, tmp_path, "2025-11-29T15:00:00Z"))]).output
    assert output.count("call") == 6
    assert "change the policy" in output


def test_many_values_of_one_field_share_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    scales = tuple(
        claim(Stage.OBSERVED, Source.TENSORS, "k_scale", 0.01 * number, f"rank 0 layer model.layers.{number}")
        for number in range(1, 31)
    )
    record = build_record(sample().model_copy(update={"observed": scales}))
    result = run.invoke(app, ["show", str(write_record(record, tmp_path, "2025-11-29T15:00:00Z"))])
    assert "30 different: 0.01" in result.output
    assert "model.layers.1 and 29 more" in result.output
    assert result.output.count("k_scale") == 1


def test_show_takes_the_newest_record(records: tuple[Path, Path]) -> None:
    assert "bfloat16 proven" in run.invoke(app, ["show"]).output
    shown = json.loads(run.invoke(app, ["show", "--json"]).output)
    assert shown == json.loads(records[1].read_text())


def test_show_is_not_moved_by_what_a_record_holds(tmp_path: Path) -> None:
    path = write_record(build_record(sample(version="[red]\x1b[2J\n")), tmp_path, "2025-11-29T15:00:00Z")
    result = run.invoke(app, ["show", str(path)])
    assert "\x1b[2J" not in result.output
    assert "[red]" in result.output


def test_diff_exits_as_diff_does(records: tuple[Path, Path]) -> None:
    fp8, sixteen = map(str, records)
    same = run.invoke(app, ["diff", fp8, fp8])
    assert (same.exit_code, same.output) == (0, "no difference: both starts established the same\n")
    other = run.invoke(app, ["diff", fp8, sixteen])
    assert other.exit_code == 1
    assert "effective.dtype" in other.output
    assert "bfloat16" in other.output
    report = json.loads(run.invoke(app, ["diff", fp8, sixteen, "--json"]).output)
    assert report["equal"] is False
    assert {"path": "effective.dtype", "a": "fp8_e4m3", "b": "bfloat16"} in report["differences"]


def test_bad_input_is_a_usage_error(records: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for arguments in (["show", str(tmp_path / "bad.json")], ["diff", str(records[0]), str(tmp_path / "missing.json")]):
        error = run.invoke(app, arguments).exception
        assert isinstance(error, UsageError)
        assert error.exit_code == 2
