"""A whole `kvguard compare` against an engine in miniature: the arms in turn, what is refused, and going on after a kill."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_fakes import SMOLLM2, write
from compare_fakes import install_lm_eval, wait_answered
from fake_engine import install
from guarded import KVGUARD
from kvguard.compare.models import AGAIN, EAGER, REFERENCE
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
    wait_answered(process, rows, 2)
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
    wait_answered(process, rows, 2)
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


MOVED = ["16bit@FLASHINFER", "fp8_e4m3", REFERENCE, AGAIN]


def test_where_fp8_moves_the_backend_sixteen_bit_is_run_there_too(place: Place) -> None:
    """The cache is compared on one backend; 16-bit on its own stands beside, and so does the loss of both moves together."""
    done = place.run("--json", faults="fp8_moves_backend")
    assert done.returncode == ExitCode.CLEAN, done.stderr
    outcome = Outcome.model_validate_json(done.stdout)
    assert [arm.arm for arm in outcome.arms] == MOVED
    assert [arm.backends for arm in outcome.arms] == [("FLASHINFER",), ("FLASHINFER",), ("CPU_ATTN",), ("FLASHINFER",)]
    assert [arm.verdict for arm in outcome.arms] == [None, "cannot tell", None, None]
    assert outcome.arms[1].tasks[0].moved is not None
    assert any("moves the attention backend from CPU_ATTN to FLASHINFER" in note for note in outcome.notes)
    files = sorted(str(path) for path in place.out.glob("arms/*.json"))
    again = subprocess.run([KVGUARD, "compare", "--json", "--from", *files], capture_output=True, text=True, check=False)
    assert [arm["arm"] for arm in json.loads(again.stdout)["arms"]] == MOVED


def test_a_killed_one_goes_on_on_the_backend_that_fp8_moved_to(place: Place) -> None:
    rows = place.out / "arms/16bit@FLASHINFER.jsonl"
    env = {**place.env, "FAKE_VLLM_FAULTS": "fp8_moves_backend"}
    process = subprocess.Popen(place.words(), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_answered(process, rows, 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = rows.read_text().splitlines()[:3]
    done = place.run("--json", faults="fp8_moves_backend")
    assert done.returncode == ExitCode.CLEAN, done.stderr
    assert [arm.arm for arm in Outcome.model_validate_json(done.stdout).arms] == MOVED
    assert rows.read_text().splitlines()[:3] == before
    assert done.stderr.count("kvguard: arm fp8_e4m3") == 1, "which backend it moves to was known"


@pytest.mark.parametrize(
    ("arms", "faults", "said"),
    [
        ("16bit@CPU_ATTN,fp8_e4m3", "fp8_moves_backend", "--arms 16bit@FLASHINFER,fp8_e4m3@FLASHINFER"),
        (
            "16bit,fp8_e4m3",
            "fp8_moves_backend,ignores_backend",
            "arm 16bit@FLASHINFER: required is attention backend FLASHINFER, its record shows CPU_ATTN",
        ),
    ],
)
def test_a_backend_that_cannot_be_followed_is_refused(place: Place, arms: str, faults: str, said: str) -> None:
    done = place.run("--arms", arms, faults=faults)
    assert done.returncode == ExitCode.POLICY_VIOLATION
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_production_adds_a_pair_with_graphs_and_compilation(place: Place) -> None:
    """The verdict is the worse one of both, which a gate is held against."""
    done = place.run("--production")
    assert done.returncode == ExitCode.CLEAN, done.stderr
    outcome = Outcome.model_validate_json((place.out / "report.json").read_text())
    assert outcome.production is not None
    for one, eager in ((outcome, True), (outcome.production, False)):
        assert [arm.arm for arm in one.arms] == [REFERENCE, "fp8_e4m3", AGAIN]
        assert [EAGER in arm.command for arm in one.arms] == [eager] * 3
    assert [reason.partition(":")[0] for reason in outcome.arms[1].why] == ["eager", "graphs and compilation"]
    assert not any("--production" in note for note in outcome.notes)
    assert "With graphs and compilation, as served in production" in done.stdout
    assert "kvguard: arm fp8_e4m3, 2 of 3\n" in done.stderr
    assert "kvguard: arm fp8_e4m3 with graphs and compilation, 2 of 3\n" in done.stderr
    files = sorted(str(path) for path in place.out.glob("**/arms/*.json"))
    again = subprocess.run([KVGUARD, "compare", "--json", "--from", *files], capture_output=True, text=True, check=False)
    assert json.loads(again.stdout)["production"]["plan_digest"] == outcome.plan_digest


def test_production_can_be_added_to_a_finished_comparison(place: Place) -> None:
    assert place.run().returncode == ExitCode.CLEAN
    first = {path: path.stat().st_mtime_ns for path in place.out.glob("arms/*.json")}
    assert place.run("--production").returncode == ExitCode.CLEAN
    assert {path: path.stat().st_mtime_ns for path in place.out.glob("arms/*.json")} == first
    assert len(list(place.out.glob("production/arms/*.json"))) == 3


def test_stopped_in_its_second_half_it_has_the_report_of_the_first_and_goes_on(place: Place) -> None:
    rows = place.out / "production/arms/16bit.jsonl"
    words = place.words("--production")
    process = subprocess.Popen(words, env=place.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_answered(process, rows, 2, 240)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"kvguard: stopped; the same command with --out {place.out} goes on from here"
    assert Outcome.model_validate_json((place.out / "report.json").read_text()).production is None
    before = rows.read_text().splitlines()
    assert place.run("--production").returncode == ExitCode.CLEAN
    assert rows.read_text().splitlines()[: len(before)] == before
    assert Outcome.model_validate_json((place.out / "report.json").read_text()).production is not None


def test_an_eager_command_has_no_production_pair(place: Place) -> None:
    done = place.run("--production", "--", "--enforce-eager")
    assert done.returncode == ExitCode.USAGE
    assert "--enforce-eager: with --production the other pair would be eager too" in done.stderr
    assert not place.out.exists()


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
