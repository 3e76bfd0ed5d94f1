"""Which way a start gets runtime scales, decided before anything is started."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, refusal
from fake_engine import install
from kvguard.engine.run_directory import RunDirectory
from kvguard.guard.prepare import Prepared, plan_for, prepare
from kvguard.policy.models import Policy
from kvguard.reference.artefact import Calibration, Options, overlays_directory, save_calibration
from kvguard.reference.prompts import PromptSet, default_prompts, load_prompts
from kvguard.verdict.checks import describe, violations
from kvguard.vocabulary import ScaleState
from launches import policy
from overlay_fakes import CONFIG, checkpoint, reread, scales

RUNTIME = policy("kv_cache: {dtype: fp8_e4m3, scales: runtime}")
ANY = policy("kv_cache: {dtype: fp8_e4m3}")


class Place:
    """An engine of some version, a checkpoint and a cache."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.vllm = install(directory / "engine")
        self._metadata = directory / "engine/site/vllm-0.32.0.dist-info/METADATA"
        self.model = directory / "model"
        monkeypatch.setenv("PYTHONPATH", str(directory / "engine/site"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        self.version("0.32.0")
        checkpoint(self.model)

    def version(self, text: str) -> None:
        self._metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {text}\n")
        self.public = text.partition("+")[0]

    def prepare(
        self, *flags: str, required: Policy | None = RUNTIME, named: Path | None = None, prompts: PromptSet | None = None
    ) -> Prepared:
        command = (str(self.vllm), "serve", str(self.model), *flags)
        return prepare(command, required, os.environ, scales=named, prompts=prompts or default_prompts())

    def calibrate(self, out: Path | None = None, k: float = 0.05, prompts: str = default_prompts().digest) -> Calibration:
        files, declared, digests = reread(self.model)
        return save_calibration(
            files=files,
            declared=declared,
            digests=digests,
            engine=self.public,
            prompts=prompts,
            options=Options(headroom=2.0, model_dtype="bfloat16"),
            scales=scales(k=k),
            report={},
            directory=overlays_directory(os.environ),
            out=out,
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def refused(prepared: Prepared) -> str:
    return "; ".join(describe(check) for check in violations(prepared.checks))


# --- the flag ---


def test_where_the_flag_calibrates_on_real_tokens_it_is_used(place: Place) -> None:
    place.version("0.27.1+cpu")
    found = place.prepare("--enforce-eager")
    assert found.runtime is not None
    assert (found.runtime.way, found.calculated) == ("flag", True)
    assert refused(found) == ""
    assert found.resolution.prediction.scales is ScaleState.RUNTIME_ONCE
    assert found.calibration == {"way": "flag", "prompts": default_prompts().digest, "engine": "0.27.1"}
    assert found.declared.directory == str(place.model)


@pytest.mark.parametrize(
    ("version", "flags", "why"),
    [
        ("0.27.1+cpu", (), "with compilation the warm-up's dummy batch fixes every scale"),
        ("0.27.1+cpu", ("-O3",), "dummy batch"),
        ("0.27.1", ("--enforce-eager",), "the profiling run's dummy batch"),
        ("0.26.0+cpu", ("--enforce-eager",), "the warm-up's dummy batch"),
        ("0.32.0", (), "the flag is gone"),
    ],
)
def test_where_it_would_not_the_overlay_is_the_way_and_the_reason_is_said(
    place: Place, version: str, flags: tuple[str, ...], why: str
) -> None:
    place.version(version)
    found = place.prepare(*flags)
    assert found.runtime is not None
    assert found.runtime.way == "overlay"
    assert why in found.runtime.reason
    assert found.runtime.missing


@pytest.mark.parametrize(
    "flags", [("--enforce-eager",), ("-O0",), ("-O", "0"), ("--compilation-config", '{"mode": 0}'), ("-cc.mode=NONE",)]
)
def test_all_the_ways_to_turn_compilation_off(place: Place, flags: tuple[str, ...]) -> None:
    place.version("0.27.1+cpu")
    found = place.prepare(*flags)
    assert found.runtime is not None
    assert found.runtime.way == "flag", flags


def test_a_dynamic_format_and_a_sixteen_bit_cache_need_nothing(place: Place) -> None:
    dynamic = policy("kv_cache: {dtype: fp8_per_token_head, scales: runtime}")
    assert place.prepare(required=dynamic).runtime is None
    assert place.prepare(required=policy("kv_cache: {dtype: 16bit}")).runtime is None
    assert place.prepare(required=ANY).runtime is None


# --- the overlay ---


def test_without_a_calibration_the_start_is_refused_and_says_how(place: Place) -> None:
    said = refused(place.prepare())
    assert "required runtime scales; found no calibration of this checkpoint for vLLM 0.32.0" in said
    assert f"run `kvguard calibrate {place.model}` (once for all replicas), or start with --calibrate" in said


def test_the_one_in_the_cache_that_fits_is_loaded(place: Place, tmp_path: Path) -> None:
    calibration = place.calibrate()
    found = place.prepare()
    assert refused(found) == ""
    assert found.runtime is not None
    assert found.runtime.overlay == calibration.path
    assert found.calibration == calibration.summary()
    assert found.resolution.prediction.scales is ScaleState.RUNTIME_ONCE
    assert (found.calculated, found.declared.directory) == (False, calibration.path)
    assert {digest.name for digest in found.digests} == {"config.json", "model.safetensors"}
    with tempfile.TemporaryDirectory(prefix="kvgt-", dir="/tmp") as base, RunDirectory({"KVGUARD_RUN_DIR": base}) as run:
        plan = plan_for(found, run, {}, colour=False)
    assert plan.argv[2] == calibration.path
    assert plan.argv[plan.argv.index("--served-model-name") + 1] == str(place.model)
    assert plan.argv[plan.argv.index("--kv-cache-dtype") + 1] == "fp8_e4m3"


def test_two_that_fit_are_refused_until_one_is_named(place: Place) -> None:
    first, second = place.calibrate(), place.calibrate(k=0.06)
    said = refused(place.prepare())
    assert "2 calibrations of this checkpoint" in said
    assert first.digest[7:19] in said
    named = place.prepare(named=Path(second.path))
    assert refused(named) == ""
    assert named.calibration == second.summary()


def test_one_made_with_other_prompts_than_those_given_is_not_used(place: Place, tmp_path: Path) -> None:
    calibration = place.calibrate()
    (tmp_path / "prompts.txt").write_text("Something else entirely.\n")
    theirs = load_prompts(tmp_path / "prompts.txt")
    found = place.prepare(prompts=theirs)
    assert found.runtime is not None
    assert found.runtime.missing, "so that --calibrate calibrates"
    assert f"no calibration of this checkpoint for vLLM 0.32.0 with prompt set {theirs.digest[:19]}" in refused(found)
    named = refused(place.prepare(prompts=theirs, named=Path(calibration.path)))
    assert f"was made with prompt set {calibration.prompts[:19]}, --calibration-prompts is {theirs.digest[:19]}" in named
    ours = place.calibrate(prompts=theirs.digest)
    assert place.prepare(prompts=theirs).calibration == ours.summary()
    assert refused(place.prepare(prompts=theirs, named=Path(ours.path))) == ""


def test_a_checkpoint_in_another_place_leaves_the_overlay_in_use_alone(place: Place, tmp_path: Path) -> None:
    first = place.calibrate()
    before = os.stat(first.path).st_ino
    shutil.copytree(place.model, tmp_path / "moved")
    at_home, place.model = place.model, tmp_path / "moved"
    for _ in range(2):
        moved = place.prepare().runtime
        assert moved is not None
        assert moved.overlay not in (None, first.path)
        assert os.path.dirname(os.path.realpath(f"{moved.overlay}/model.safetensors")) == str(tmp_path / "moved")
    place.model = at_home
    again = place.prepare().runtime
    assert again is not None
    assert (again.overlay, os.stat(first.path).st_ino) == (first.path, before)


def test_one_that_is_stale_is_named_as_such(place: Place, tmp_path: Path) -> None:
    calibration = place.calibrate()
    checkpoint(place.model, {**CONFIG, "rope_theta": 5})
    assert "found no calibration of this checkpoint" in refused(place.prepare())
    said = refused(place.prepare(named=Path(calibration.path)))
    assert "is stale: the checkpoint's config.json has changed since it was calibrated" in said
    place.version("0.31.0")
    assert "is stale" in refused(place.prepare(named=Path(calibration.path)))


def test_one_that_is_corrupt_is_named_as_such(place: Place) -> None:
    calibration = place.calibrate()
    broken = Path(calibration.path) / "kv_scales.safetensors"
    broken.chmod(0o644)
    broken.write_bytes(broken.read_bytes()[:-1])
    assert "kv_scales.safetensors is corrupt" in refused(place.prepare())
    assert "kv_scales.safetensors is corrupt" in refusal(lambda: place.prepare(named=Path(calibration.path)))


@pytest.mark.parametrize(
    ("flags", "required", "words"),
    [
        ((), policy("kv_cache: {dtype: fp8_e5m2, scales: runtime}"), "kvguard calibrates for fp8_e4m3, the cache is fp8_e5m2"),
        (("--quantization", "fp8"), RUNTIME, "--quantization quantizes the weights at start"),
        (
            ("--hf-overrides", '{"quantization_config": {"quant_method": "fp8"}}'),
            RUNTIME,
            "--hf-overrides replaces quantization_config",
        ),
    ],
)
def test_commands_with_which_an_overlay_could_not_be_loaded(
    place: Place, flags: tuple[str, ...], required: Policy, words: str
) -> None:
    assert words in refused(place.prepare(*flags, required=required))


def test_a_loader_that_would_drop_the_scales_is_named_before_anything_is_measured(place: Place) -> None:
    checkpoint(place.model, {**CONFIG, "architectures": ["OtherForCausalLM"]})
    said = refused(place.prepare())
    assert "under which names OtherForCausalLM loads KV scales was not read" in said
    assert "use a checkpoint with calibrated scales" in said


# --- a calibration that was named without `scales: runtime` ---


def test_a_named_one_is_used_under_any_policy_that_allows_it(place: Place) -> None:
    calibration = place.calibrate()
    free = place.prepare(required=ANY, named=Path(calibration.path))
    assert refused(free) == ""
    assert free.resolution.prediction.scales is ScaleState.RUNTIME_ONCE
    typed = place.prepare("--kv-cache-dtype", "fp8", required=None, named=Path(calibration.path))
    assert refused(typed) == ""
    strict = place.prepare(required=policy("kv_cache: {dtype: fp8_e4m3, scales: checkpoint}"), named=Path(calibration.path))
    assert "required checkpoint scales; found runtime_once" in refused(strict)


def test_a_sixteen_bit_cache_takes_none(place: Place) -> None:
    calibration = place.calibrate()
    said = refusal(lambda: place.prepare(required=None, named=Path(calibration.path)))
    assert "the cache is bfloat16, which has no scales" in said


def test_on_a_version_with_a_real_flag_a_named_one_wins(place: Place) -> None:
    place.version("0.27.1+cpu")
    calibration = place.calibrate()
    found = place.prepare("--enforce-eager", named=Path(calibration.path))
    assert found.runtime is not None
    assert (found.runtime.way, found.calculated) == ("overlay", False)


def test_a_scheme_of_the_checkpoints_own_is_replaced(place: Place, tmp_path: Path) -> None:
    checkpoint(place.model, {**CONFIG, **COMPRESSED_TENSORS})
    calibration = place.calibrate()
    found = place.prepare()
    assert refused(found) == ""
    assert found.calibration == calibration.summary()


def test_prompts_are_ours_unless_others_are_given(place: Place) -> None:
    assert place.prepare().prompts.digest == default_prompts().digest
