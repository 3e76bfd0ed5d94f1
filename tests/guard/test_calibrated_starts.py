"""`kvguard serve` and `kvguard calibrate` with runtime scales, on the fake engine: what is served, refused and recorded."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_engine import install
from guarded import KVGUARD, Guarded, engine_environment
from kvguard.record.diff import diff_records
from kvguard.reference.artefact import Options, overlays_directory, save_calibration
from kvguard.reference.prompts import default_prompts
from kvguard.vocabulary import ExitCode
from overlay_fakes import CONFIG, checkpoint, scales, weights

LAYERS = 30
RUNTIME = "kv_cache: {dtype: fp8_e4m3, scales: runtime, min_confidence: proven}\n"


class Setting:
    """A fake engine, a checkpoint of 30 layers, a cache, and environments for processes that use them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.vllm = install(directory / "engine")
        self.model = directory / "model"
        template = '{"chat_template": "{{ messages }}"}'
        config = {**CONFIG, "num_hidden_layers": LAYERS}
        self.read = checkpoint(self.model, config, weights(layers=LAYERS), tokenizer_config__json=template)
        (directory / "notes").mkdir()
        self.cache = directory / "cache"
        self.started: list[Guarded] = []

    def env(self, *faults: str) -> dict[str, str]:
        paths = (str(self.vllm.parent.parent / "site"), os.environ.get("PYTHONPATH"))
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "FAKE_VLLM_FAULTS": ",".join(faults),
            "FAKE_VLLM_NOTES": str(self.directory / "notes"),
            "XDG_CACHE_HOME": str(self.cache),
            "XDG_STATE_HOME": str(self.directory / "state"),
        }

    def calibration(self, scale: float = 1.0) -> Path:
        files, declared, digests = self.read
        saved = save_calibration(
            files=files,
            declared=declared,
            digests=digests,
            engine="0.32.0",
            prompts=default_prompts().digest,
            options=Options(headroom=2.0, model_dtype="bfloat16"),
            scales=scales(LAYERS, scale, scale),
            report={},
            directory=overlays_directory({"XDG_CACHE_HOME": str(self.cache)}),
        )
        return Path(saved.path)

    def serve(self, *options: str, faults: tuple[str, ...] = (), policy: str = RUNTIME) -> Guarded:
        directory = self.directory / f"run-{len(self.started)}"
        directory.mkdir()
        flags = ("--settle", "0", *options)
        run = Guarded(directory, self.model, vllm=str(self.vllm), policy=policy, options=flags, env=self.env(*faults))
        run.start_limit = 60.0
        self.started.append(run)
        return run

    def calibrate(self, *options: str, faults: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [KVGUARD, "calibrate", str(self.model), "--engine", str(self.vllm), *options]
        with tempfile.TemporaryDirectory(prefix="kvgt-", dir="/tmp") as run_base:
            env = engine_environment(**self.env(*faults), KVGUARD_RUN_DIR=run_base)
            return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    for run in made.started:
        run.close()


def test_a_calibration_is_served_recorded_and_read_back(setting: Setting) -> None:
    path = setting.calibration()
    run = setting.serve().wait_ready()
    effective = run.effective()
    assert (effective.dtype, effective.confidence, effective.scales) == ("fp8_e4m3", "proven", "runtime_once")
    assert effective.contradictions == ()
    predicate = run.record()["predicate"]
    assert predicate["calibration"]["artefact"] == "sha256:" + path.name
    assert predicate["calibration"]["prompts"] == default_prompts().digest
    assert {subject["name"] for subject in run.record()["subject"]} == {
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
    }
    assert run.chat().headers["x-kvguard-kv-scales"] == "runtime_once"
    assert run.api("/v1/models").json()["data"][0]["id"] == str(path), "the fake engine has no --served-model-name"
    command = next(line for line in run.err.splitlines() if line.startswith("kvguard: command"))
    assert f"--served-model-name {setting.model}" in command


def test_equal_starts_have_equal_digests_and_another_artefact_differs(setting: Setting) -> None:
    first_path = setting.calibration()
    first = setting.serve("--scales", str(first_path)).wait_ready()
    assert first.stop() == ExitCode.CLEAN
    second = setting.serve("--scales", str(first_path)).wait_ready()
    a, b = first.record(), second.record()
    assert a["predicate"]["content_digest"] == b["predicate"]["content_digest"]
    other = {**b, "predicate": {**b["predicate"], "calibration": {**b["predicate"]["calibration"], "artefact": "sha256:x"}}}
    assert [difference.path for difference in diff_records(a, other)] == ["calibration.artefact"]


@pytest.mark.parametrize(
    ("scale", "faults", "words"),
    [
        (0.05, (), "the checkpoint has scales, the engine did not load them"),
        (1.0, ("broken_scales",), "found invalid: rank 0 layer model.layers.0.self_attn.attn: k_scale is nan"),
    ],
)
def test_scales_that_are_not_the_files_refuse_the_start(
    setting: Setting, scale: float, faults: tuple[str, ...], words: str
) -> None:
    """A loader that drops them, and 0.26-style NaN."""
    setting.calibration(scale)
    run = setting.serve(faults=faults)
    assert run.wait_exit(60) == ExitCode.POLICY_VIOLATION
    assert "kv_scales fail: required runtime scales" in run.termination_log.read_text()
    assert words in run.err
    assert run.record()["predicate"]["calibration"]["way"] == "overlay"


def test_without_a_calibration_no_engine_is_started_and_the_way_is_said(setting: Setting) -> None:
    run = setting.serve()
    assert run.wait_exit(60) == ExitCode.POLICY_VIOLATION
    assert f"run `kvguard calibrate {setting.model}`" in run.termination_log.read_text()
    assert not (setting.directory / "notes/started").exists()


def test_a_model_that_the_pass_does_not_reproduce_is_refused_by_layer_and_reason(setting: Setting) -> None:
    done = setting.calibrate()
    assert done.returncode == ExitCode.POLICY_VIOLATION, done.stderr
    assert "cannot be calibrated: model.layers.0.self_attn.attn: Attention is not plain attention" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(overlays_directory({"XDG_CACHE_HOME": str(setting.cache)}).glob("*"))


def test_serve_with_calibrate_refuses_such_a_model_as_well(setting: Setting) -> None:
    run = setting.serve("--calibrate")
    assert run.wait_exit(60) == ExitCode.POLICY_VIOLATION
    assert "cannot be calibrated: model.layers.0.self_attn.attn" in run.err


def test_the_measuring_engine_must_be_proven_sixteen_bit(setting: Setting) -> None:
    done = setting.calibrate(faults=("quantized",))
    assert done.returncode == ExitCode.POLICY_VIOLATION
    assert "required 16bit (bfloat16); found fp8_e4m3" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--", "vllm", "serve"), "only vLLM's flags go after `--`"),
        (("--prompts", "/none"), "no such file"),
        (("--", "--no-such-flag"), "has no such flag"),
        (("--engine-log", "/none/x"), "--engine-log /none/x"),
    ],
)
def test_calibrate_names_what_is_wrong_with_its_command(setting: Setting, options: tuple[str, ...], words: str) -> None:
    done = setting.calibrate(*options)
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data-parallel-size", "2"), "--data-parallel-size 2 cannot be calibrated: data parallel"),
        (("-dp=2",), "--data-parallel-size 2 cannot be calibrated"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size 2 cannot be calibrated: pipeline parallel"),
        (("--enable-lora",), "LoRA cannot be calibrated"),
        (("--model", "foo"), "leave --model out"),
        (("--seed", "1", "--model=foo"), "leave --model out"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_the_start(setting: Setting, flags: tuple[str, ...], words: str) -> None:
    done = setting.calibrate("--", *flags)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (setting.directory / "notes/started").exists()


@pytest.mark.parametrize("place", ["file", "file/out", "model"])
def test_a_place_that_cannot_be_written_is_refused_before_the_start(setting: Setting, place: str) -> None:
    (setting.directory / "file").write_text("x")
    done = setting.calibrate("--out", str(setting.directory / place))
    assert done.returncode == ExitCode.USAGE, done.stderr
    [line] = done.stderr.strip().splitlines()
    assert f"{setting.directory / place}: " in line
    assert not (setting.directory / "notes/started").exists()


def test_a_cache_that_is_a_file_is_named(setting: Setting) -> None:
    setting.cache.mkdir()
    (setting.cache / "kvguard").write_text("x")
    done = setting.calibrate()
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert f"{setting.cache}/kvguard/overlays/<digest>: cannot be written: " in done.stderr
    run = setting.serve("--calibrate")
    assert run.wait_exit(60) == ExitCode.USAGE
    assert f"{setting.cache}/kvguard/overlays: calibrations cannot be kept there: " in run.err
    assert "Traceback" not in done.stderr + run.err
    assert not (setting.directory / "notes/started").exists()


def test_a_flag_that_the_version_no_longer_has_is_left_out_by_calibrate_and_explained_by_serve(setting: Setting) -> None:
    done = setting.calibrate("--", "--calculate-kv-scales", "--seed", "1")
    assert "cannot be calibrated: model.layers.0" in done.stderr, "the engine was started and got as far as the pass"
    directory = setting.directory / "run-flag"
    directory.mkdir()
    run = Guarded(
        directory,
        setting.model,
        "--calculate-kv-scales",
        vllm=str(setting.vllm),
        policy=RUNTIME,
        options=("--settle", "0"),
        env=setting.env(),
    )
    setting.started.append(run)
    assert run.wait_exit(60) == ExitCode.USAGE
    assert "run `kvguard calibrate MODEL` once" in run.err


def test_typed_kv_flags_do_not_reach_the_measuring_engine(setting: Setting) -> None:
    log = setting.directory / "engine.log"
    done = setting.calibrate("--engine-log", str(log), "--", "--kv-cache-dtype", "fp8", "--seed", "1")
    assert "cannot be calibrated" in done.stderr, "the engine was proven 16-bit and got as far as the pass"
    assert "the fake engine starts" in log.read_text()
