"""A whole `kvguard compare` against an engine in miniature: the arms in turn, what is refused, and going on after a kill."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_fakes import SMOLLM2, write
from compare_fakes import install_lm_eval
from fake_engine import install
from guarded import KVGUARD
from kvguard.compare.models import AGAIN, REFERENCE
from kvguard.compare.outcome import Outcome
from kvguard.compare.results import read_arm
from kvguard.vocabulary import ExitCode

OPTIONS = ("--tasks", "arithmetic", "--items", "6", "--quick", "--concurrency", "1")


class Place:
    """A model, an engine and a results directory."""

    def __init__(self, directory: Path) -> None:
        self.vllm = install(directory / "engine")
        self.model = write(directory / "model", SMOLLM2, {}, tokenizer_config__json='{"chat_template": "{{ messages }}"}')
        self.out = directory / "out"
        self.run_base = Path(f"/tmp/kvgt-{secrets.token_hex(4)}")
        self.notes = directory / "notes"
        self.notes.mkdir()
        self.env = {
            **os.environ,
            "PYTHONPATH": str(directory / "engine/site"),
            "FAKE_VLLM_NOTES": str(directory / "notes"),
            "KVGUARD_RUN_DIR": str(self.run_base),
        }

    def words(self, *options: str) -> list[str]:
        return [KVGUARD, "compare", str(self.model), "--engine", str(self.vllm), "--out", str(self.out), *OPTIONS, *options]

    def run(self, *options: str, faults: str = "") -> subprocess.CompletedProcess[str]:
        env = {**self.env, "FAKE_VLLM_FAULTS": faults}
        return subprocess.run(self.words(*options), env=env, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(tmp_path)
    yield one
    shutil.rmtree(one.run_base, ignore_errors=True)


def test_every_arm_is_started_in_turn_and_reported(place: Place) -> None:
    done = place.run()
    assert done.returncode == ExitCode.CLEAN, done.stderr
    outcome = Outcome.model_validate_json((place.out / "report.json").read_text())
    assert [arm.arm for arm in outcome.arms] == [REFERENCE, "fp8_e4m3", AGAIN]
    assert [arm.capacity.kv_tokens for arm in outcome.arms] == [46592, 93184, 46592]
    assert outcome.arms[1].verdict == "cannot tell"
    assert any("no weak arm, so that no task can say free win" in note for note in outcome.notes)
    assert "Traceback" not in done.stderr
    assert not place.run_base.exists()
    assert len(read_arm(place.out / "arms/fp8_e4m3.json").answers) == 6


def test_prefill_and_decode_are_timed_in_the_judged_arms(place: Place) -> None:
    done = place.run("--tasks", "arithmetic,throughput")
    assert done.returncode == ExitCode.CLEAN, done.stderr
    outcome = Outcome.model_validate_json((place.out / "report.json").read_text())
    sixteen, quantized, again = outcome.arms
    assert [len(arm.speed.phases) for arm in (sixteen, quantized, again)] == [2, 2, 0], "a short and a long prompt"
    assert all(phase.prefill and phase.prompt_tokens == 3 for phase in quantized.speed.phases)
    assert "prefill" in quantized.speed.changes[0]
    assert len(read_arm(place.out / "arms/fp8_e4m3.json").streamed) == 4
    assert quantized.speed.changes[0] in done.stdout


def test_a_killed_comparison_goes_on_where_it_was(place: Place) -> None:
    rows = place.out / "arms/fp8_e4m3.jsonl"
    process = subprocess.Popen(
        place.words("--tasks", "arithmetic,strings,conversation"),
        env=place.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not rows.exists() or rows.read_text().count('"answered"') < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first, before = (place.out / "arms/16bit.json").read_bytes(), rows.read_text().splitlines()[:3]
    done = place.run("--tasks", "arithmetic,strings,conversation")
    assert done.returncode == ExitCode.CLEAN, done.stderr
    assert (place.out / "arms/16bit.json").read_bytes() == first
    assert rows.read_text().splitlines()[:3] == before
    answers = read_arm(place.out / "arms/fp8_e4m3.json").answers
    assert len({(row.task, row.item) for row in answers}) == len(answers) == 18


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_comparison_says_so_and_goes_on(place: Place, number: signal.Signals) -> None:
    """No exit code 0 without a verdict, no engine left, and nothing asked twice."""
    rows, started = place.out / "arms/fp8_e4m3.jsonl", place.notes / "started"
    words = place.words("--tasks", "arithmetic,strings,conversation")
    process = subprocess.Popen(words, env=place.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not rows.exists() or rows.read_text().count('"answered"') < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine = int(started.read_text().split()[0])
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"kvguard: stopped; the same command with --out {place.out} goes on from here"
    assert "Traceback" not in err
    assert not Path(f"/proc/{engine}").exists()
    assert not place.run_base.exists()
    before = rows.read_text().splitlines()
    done = place.run("--tasks", "arithmetic,strings,conversation")
    assert done.returncode == ExitCode.CLEAN, done.stderr
    assert rows.read_text().splitlines()[: len(before)] == before
    assert len(read_arm(place.out / "arms/fp8_e4m3.json").answers) == 18


def test_secrets_of_the_command_are_in_no_file(place: Place) -> None:
    done = place.run("--", "--api-key", "sesame-4711-open")
    assert done.returncode == ExitCode.CLEAN, done.stderr
    told = {path.name for path in place.out.rglob("*") if path.is_file() and "sesame-4711-open" in path.read_text()}
    assert told == set()
    assert "sesame" not in done.stdout + done.stderr


def test_tasks_of_lm_eval_are_asked_of_every_arm_and_once(place: Place, tmp_path: Path) -> None:
    options = (
        "--tasks",
        "lm-eval,arithmetic",
        "--lm-eval",
        "gsm8k",
        "--lm-eval-command",
        str(install_lm_eval(tmp_path / "bin")),
    )
    done = place.run(*options)
    assert done.returncode == ExitCode.CLEAN, done.stderr
    outcome = Outcome.model_validate_json((place.out / "report.json").read_text())
    assert [task.task for task in outcome.arms[1].tasks] == ["arithmetic", "lm-eval:gsm8k"]
    assert outcome.scores["lm-eval:gsm8k"][REFERENCE] == (0.5, pytest.approx(0.2887, abs=1e-4), 4)
    logs = sorted(path.parent.name for path in place.out.glob("lm-eval/*/log"))
    assert logs == ["16bit", "16bit-again", "fp8_e4m3"]
    before = {path: path.stat().st_mtime_ns for path in place.out.glob("lm-eval/*/log")}
    assert place.run(*options).returncode == ExitCode.CLEAN
    assert {path: path.stat().st_mtime_ns for path in place.out.glob("lm-eval/*/log")} == before


def test_two_arms_secretly_equal_are_refused(place: Place) -> None:
    """An engine that runs FP8 whatever its command says: the 16-bit arm is not what it must be."""
    done = place.run(faults="quantized")
    assert done.returncode == ExitCode.POLICY_VIOLATION
    assert "arm 16bit" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place.out / "report.json").exists()


def test_an_engine_that_does_not_start_ends_it(place: Place) -> None:
    done = place.run(faults="exits")
    assert done.returncode == ExitCode.ENGINE_FAILED_TO_START
    assert "arm 16bit: the engine failed to start" in done.stderr
    assert not place.run_base.exists()
