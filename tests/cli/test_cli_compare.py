"""`kvguard compare` on finished arms: tables, files, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from compare_fakes import arms, plan
from guarded import KVGUARD
from kvguard.compare.results import file_stem
from kvguard.vocabulary import ExitCode


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [KVGUARD, "compare", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": "240"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("arms")
    paths = []
    for one in arms(plan(items=200), lambda place: float(place % 10 > 0)):
        paths.append(directory / f"{file_stem(one.arm)}.json")
        paths[-1].write_text(one.model_dump_json())
    return paths


def test_a_report_is_rebuilt_without_running(finished: list[Path], tmp_path: Path) -> None:
    done = run("--from", *finished, "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    assert "fp8_e4m3: keep 16-bit" in done.stdout
    assert "arithmetic: a loss of 10.0 points is shown" in done.stdout
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.html", "report.json", "report.md"]


@pytest.mark.parametrize("columns", [24, 60, 80, 240])
def test_every_width_shows_every_number_whole(finished: list[Path], columns: int) -> None:
    env = {**os.environ, "COLUMNS": str(columns)}
    command = [KVGUARD, "compare", "--from", *map(str, finished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    for whole in ("23,040", "11,520", "46,592", "93,184", "90.0 %"):
        assert whole in done.stdout, whole
    assert "\x1b" not in done.stdout, "no terminal, no colours"


def test_json_and_the_gate(finished: list[Path], tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("require: cannot tell\n")
    done = run("--from", *finished, "--json", "--gate", tmp_path / "gate.yaml")
    assert done.returncode == ExitCode.POLICY_VIOLATION
    assert "arm fp8_e4m3: required is 'cannot tell', found 'keep 16-bit'" in done.stderr
    assert "Traceback" not in done.stderr
    verdicts = {one["arm"]: one["verdict"] for one in json.loads(done.stdout)["arms"]}
    assert verdicts == {"16bit": None, "fp8_e4m3": "keep 16-bit", "weak": None, "16bit again": None}


def test_a_wider_margin_in_the_gate_decides(finished: list[Path], tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("margin_points: 20\n")
    done = run("--from", *finished, "--gate", tmp_path / "gate.yaml")
    assert done.returncode == 0, done.stderr
    assert "fp8_e4m3: free win" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "MODEL: required is a model to compare on"),
        (("m", "--arms", "16bit"), "--arms '16bit': required are one 16bit arm"),
        (("m", "--tasks", "mmlu"), "--tasks 'mmlu'"),
        (("m", "--tasks", "own"), "name their file with --own-tasks"),
        (("m", "--", "vllm"), "only vLLM's flags go after `--`"),
        (("m", "--engine", "/nowhere/vllm"), "/nowhere/vllm"),
        (("--from", "/nowhere.json", "--seed", "1"), "--seed: has no part in a report of finished arms"),
        (("--from", "/nowhere.json", "--own-tasks", "x"), "--own-tasks: has no part in a report"),
        (("/nowhere/model",), "'/nowhere/model': no such directory"),
        (("--from", "/nowhere.json"), "arm file /nowhere.json: no such file"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(*arguments, "--out", tmp_path / "out") if "--" not in arguments else run("--out", tmp_path / "out", *arguments)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists(), "a mistake costs no directory"


def test_a_gate_for_an_arm_that_is_not_compared_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("arms: [fp8_e5m2]\n")
    done = run("m", "--gate", tmp_path / "gate.yaml", "--out", tmp_path / "out")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "kvguard: gate: arm 'fp8_e5m2' is not compared; found fp8_e4m3\n"
    assert not (tmp_path / "out").exists()
