"""`kvguard compare` on the real engine: what it measures, what it says, and that it goes on after a kill."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compare_fakes import wait_answered
from guarded import KVGUARD, SMALL, engine_environment
from kvguard.compare.models import AGAIN, EAGER, REFERENCE, WEAK, ArmFile
from kvguard.compare.outcome import ArmResult, Outcome
from kvguard.compare.results import read_arm
from kvguard.record.statement import Statement
from kvguard.record.store import read_record
from kvguard.vocabulary import ExitCode

LITTLE = ("--tasks", "retrieval,conversation,divergence,throughput", "--items", "5", "--quick")
LIMIT = 1500.0


def command(model: Path, vllm: Path, out: Path, *options: str) -> list[str]:
    return [KVGUARD, "compare", str(model), "--engine", str(vllm), "--out", str(out), *options, "--", *SMALL]


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """A run directory of its own, which must be empty afterwards."""
    base = Path(f"/tmp/kvgt-{secrets.token_hex(4)}")
    try:
        yield engine_environment(KVGUARD_RUN_DIR=str(base))
        assert not base.exists(), list(base.iterdir())
    finally:
        shutil.rmtree(base, ignore_errors=True)


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    with environment() as env:
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=LIMIT)


def outcome_of(out: Path) -> Outcome:
    return Outcome.model_validate_json((out / "report.json").read_text())


def arm_of(outcome: Outcome, name: str) -> ArmResult:
    return next(one for one in outcome.arms if one.arm == name)


@pytest.fixture(scope="module")
def out(model: Path, engine_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison of 16-bit and fp8_e4m3 with both controls, on a few items."""
    directory = tmp_path_factory.mktemp("compare") / "out"
    done = run(command(model, engine_bin, directory, *LITTLE))
    print(done.stdout)
    assert done.returncode == ExitCode.CLEAN, done.stderr[-3000:]
    return directory


@pytest.fixture(scope="module")
def outcome(out: Path) -> Outcome:
    return outcome_of(out)


def test_bytes_and_tokens_are_measured(outcome: Outcome) -> None:
    sixteen, eight = arm_of(outcome, REFERENCE), arm_of(outcome, "fp8_e4m3")
    assert (sixteen.dtype, eight.dtype) == ("bfloat16", "fp8_e4m3")
    assert sixteen.confidence == eight.confidence == "proven"
    assert (sixteen.capacity.bytes_per_token, eight.capacity.bytes_per_token) == (23040, 11520)
    assert (sixteen.capacity.kv_tokens, eight.capacity.kv_tokens) == (46592, 93184)
    assert (sixteen.capacity.batch_8k, eight.capacity.batch_8k) == (5, 11)
    assert eight.capacity.ratio == pytest.approx(2.0)


@pytest.mark.parametrize(("name", "width"), [("16bit", 2), ("fp8_e4m3", 1)])
def test_bytes_and_tokens_are_those_of_the_tensors(outcome: Outcome, out: Path, name: str, width: int) -> None:
    """Each layer's tensor has blocks × heads × 128 tokens × keys and values; nothing is taken from what was asked for."""
    shapes = [layer["shape"] for layer in Statement.model_validate(read_arm(out / f"arms/{name}.json").record).layers]
    capacity = arm_of(outcome, name).capacity
    assert len(shapes) == 30
    assert sum(math.prod(shape) * width for shape in shapes) == capacity.kv_bytes
    assert {shape[0] * 128 for shape in shapes} == {capacity.kv_tokens}


def test_the_verdict_is_no_accident(outcome: Outcome) -> None:
    """Five items tell nothing, and no weak loss would be seen on them."""
    eight = arm_of(outcome, "fp8_e4m3")
    assert eight.verdict in ("cannot tell", "keep 16-bit")
    assert {task.task for task in eight.tasks} == {"retrieval", "conversation"}
    assert not any(task.weak.seen for task in eight.tasks)
    assert not any(task.verdict == "free win" for task in eight.tasks)
    assert all(task.failed == 0 for task in eight.tasks)


def test_the_controls_are_what_they_should_be(outcome: Outcome) -> None:
    """16-bit equals itself; FP8 diverges by more than that; ruined scales diverge by far more."""
    for task in arm_of(outcome, "fp8_e4m3").tasks:
        assert task.again is not None
        assert task.again.low <= 0.0 <= task.again.high
    found = {name: arm_of(outcome, name).divergence.decode.value for name in (REFERENCE, AGAIN, "fp8_e4m3", WEAK)}
    print(found)
    assert None not in found.values()
    again, eight, weak = (float(found[name] or 0) for name in (AGAIN, "fp8_e4m3", WEAK))
    assert again < eight < weak / 5
    assert arm_of(outcome, WEAK).scales == "runtime_once"


def test_outputs_differ_and_the_records_differ_in_the_cache_alone(outcome: Outcome, out: Path) -> None:
    eight = arm_of(outcome, "fp8_e4m3")
    same, total = eight.identical
    assert 0 <= same < total
    assert "effective.dtype" in {found["path"] for found in eight.differences}
    written = {read_record(path)["predicate"]["content_digest"] for path in (out / "records").glob("*.json")}
    assert {arm.record_digest for arm in outcome.arms} <= written


def test_throughput_is_measured_and_pages_are_written(outcome: Outcome, out: Path) -> None:
    for name in (REFERENCE, "fp8_e4m3"):
        speed = arm_of(outcome, name).speed
        assert (len(speed.runs), speed.requests) == (2, 16)
        assert all(value > 0 for value in speed.runs)
    assert "<svg" in (out / "report.html").read_text()
    assert "| config | KV bytes/token |" in (out / "report.md").read_text()


def test_again_in_the_same_directory_starts_no_engine(out: Path, outcome: Outcome, model: Path, engine_bin: Path) -> None:
    records = sorted(path.name for path in (out / "records").iterdir())
    done = run(command(model, engine_bin, out, *LITTLE))
    assert done.returncode == ExitCode.CLEAN, done.stderr[-3000:]
    assert sorted(path.name for path in (out / "records").iterdir()) == records
    assert outcome_of(out) == outcome


def test_arms_can_be_reported_from_their_files(out: Path, outcome: Outcome, tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("require: free win\n")
    files = sorted(map(str, (out / "arms").glob("*.json")))
    done = run([KVGUARD, "compare", "--from", *files, "--json", "--gate", str(tmp_path / "gate.yaml")])
    assert done.returncode == ExitCode.POLICY_VIOLATION
    found = json.loads(done.stdout)
    assert [one["verdict"] for one in found["arms"]] == [one.verdict for one in outcome.arms]


FORCING = """\
import sys

if __name__ == "__main__":
    sys.argv = ["auto" if before == "--kv-cache-dtype" else word for before, word in zip([""] + sys.argv, sys.argv)]
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
"""
"""An engine as 0.15 to 0.21 are: a checkpoint's scheme makes the cache FP8, whatever the command asks for."""


def test_two_arms_secretly_equal_are_refused(
    variant: Callable[[str], Path], engine_bin: Path, engine_python: Path, tmp_path: Path
) -> None:
    """The 16-bit arm runs FP8 too, by its tensors: refused before it is asked anything."""
    vllm = tmp_path / "vllm"
    vllm.write_text(f"#!{engine_python}\n{FORCING}")
    vllm.chmod(0o755)
    done = run(command(variant("kv_scheme_scales"), vllm, tmp_path / "out", *LITTLE))
    assert done.returncode == ExitCode.POLICY_VIOLATION, done.stderr[-3000:]
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith("kvguard: arm 16bit: ")
    assert "fp8_e4m3" in told
    assert not (tmp_path / "out/arms").exists()
    record = read_record(next((tmp_path / "out/records").glob("*.json")))
    assert record["predicate"]["verdict"] == "refuse"


# --- in full ---


def answers(file: ArmFile) -> list[tuple[str, str]]:
    return [(row.item, row.text) for row in file.answers]


@pytest.mark.long
def test_a_killed_comparison_goes_on(model: Path, engine_bin: Path, tmp_path: Path) -> None:
    words = command(model, engine_bin, tmp_path / "out", "--tasks", "conversation", "--items", "12", "--quick")
    rows = tmp_path / "out/arms/fp8_e4m3.jsonl"
    with environment() as env:
        process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        wait_answered(process, rows, 3, LIMIT)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        before = rows.read_text().splitlines()[:4]
        first = (tmp_path / "out/arms/16bit.json").read_bytes()
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == ExitCode.CLEAN, done.stderr[-3000:]
    assert rows.read_text().splitlines()[:4] == before
    assert (tmp_path / "out/arms/16bit.json").read_bytes() == first
    assert len(answers(read_arm(tmp_path / "out/arms/fp8_e4m3.json"))) == 12


@pytest.mark.long
def test_quick_in_full(model: Path, engine_bin: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = run(command(model, engine_bin, tmp_path / "out", "--quick"))
    took = time.monotonic() - begun
    print(f"{took:.0f} s", done.stdout)
    assert done.returncode == ExitCode.CLEAN, done.stderr[-3000:]
    assert took < 1200
    eight = arm_of(outcome_of(tmp_path / "out"), "fp8_e4m3")
    assert len(eight.tasks) == 4
    assert eight.verdict in ("cannot tell", "keep 16-bit")


@pytest.mark.long
def test_ruined_scales_keep_sixteen_bit(variant: Callable[[str], Path], engine_bin: Path, tmp_path: Path) -> None:
    ruined = variant("kv_scheme_ruined_scales")
    done = run(command(ruined, engine_bin, tmp_path / "out", "--quick", "--tasks", "conversation,divergence", "--items", "40"))
    print(done.stdout)
    assert done.returncode == ExitCode.CLEAN, done.stderr[-3000:]
    assert arm_of(outcome_of(tmp_path / "out"), "fp8_e4m3").verdict == "keep 16-bit"


@pytest.mark.long
def test_too_small_a_limit_is_truncation(model: Path, engine_bin: Path, tmp_path: Path) -> None:
    options = ("--quick", "--tasks", "strings", "--items", "12", "--max-tokens", "4")
    done = run(command(model, engine_bin, tmp_path / "out", *options))
    assert done.returncode == ExitCode.CLEAN, done.stderr[-3000:]
    eight: Any = arm_of(outcome_of(tmp_path / "out"), "fp8_e4m3")
    assert eight.verdict == "cannot tell"
    assert "truncation, not loss" in eight.tasks[0].void


@pytest.mark.long
def test_production_adds_a_pair_with_graphs_and_compilation(model: Path, engine_bin: Path, tmp_path: Path) -> None:
    options = ("--quick", "--production", "--tasks", "conversation,divergence", "--items", "4")
    words = [word for word in command(model, engine_bin, tmp_path / "out", *options) if word != EAGER]
    done = run(words)
    print(done.stdout)
    assert done.returncode == ExitCode.CLEAN, done.stderr[-3000:]
    outcome = outcome_of(tmp_path / "out")
    assert outcome.production is not None
    for one, eager in ((outcome, True), (outcome.production, False)):
        assert [EAGER in arm.command for arm in one.arms] == [eager] * 4
        assert [arm.capacity.kv_tokens for arm in one.arms] == [46592, 93184, 93184, 46592]
        weak, eight = (arm_of(one, name).divergence.decode.value for name in (WEAK, "fp8_e4m3"))
        assert weak is not None
        assert eight is not None
        assert 0 < eight < weak / 5
