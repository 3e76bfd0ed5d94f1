"""`kvguard check` on `scales: runtime`: the calibration that `serve` would find, looked up and not written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvguard.cli.check import check
from kvguard.reference.artefact import Calibration, Options, overlays_directory, save_calibration
from kvguard.reference.prompts import default_prompts
from kvguard.vocabulary import ExitCode, UsageError
from overlay_fakes import checkpoint, reread, scales

app = typer.Typer()
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": False})(check)


class Place:
    """A checkpoint, a policy that wants runtime scales, and an empty cache."""

    def __init__(self, directory: Path) -> None:
        self.model, self.policy = directory / "model", directory / "policy.yaml"
        checkpoint(self.model)
        self.policy.write_text("kv_cache: {dtype: fp8_e4m3, scales: runtime}\n")

    def check(self, *options: str, version: str = "0.32.0", flags: tuple[str, ...] = ()) -> Result:
        words = ["--policy", str(self.policy), "--engine-version", version, *options]
        return CliRunner().invoke(app, [*words, "--", "vllm", "serve", str(self.model), *flags])

    def calibrate(self, version: str = "0.32.0", k: float = 0.05, out: Path | None = None) -> Calibration:
        files, declared, digests = reread(self.model)
        return save_calibration(
            files=files,
            declared=declared,
            digests=digests,
            engine=version,
            prompts=default_prompts().digest,
            options=Options(headroom=2.0, model_dtype="bfloat16"),
            scales=scales(k=k),
            report={},
            directory=overlays_directory(os.environ),
            out=out,
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Place(tmp_path)


def test_without_a_calibration_it_is_refused_as_serve_would(place: Place) -> None:
    result = place.check()
    assert result.exit_code == ExitCode.POLICY_VIOLATION
    assert "no calibration of this checkpoint for vLLM 0.32.0" in result.stdout
    assert "kvguard calibrate" in result.stdout


def test_the_one_that_fits_allows_it_and_nothing_is_written(place: Place, tmp_path: Path) -> None:
    made = place.calibrate()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    result = place.check("--json")
    assert result.exit_code == ExitCode.CLEAN, result.stdout
    report = json.loads(result.stdout)
    assert report["scales"] == "runtime_once"
    found = {one["name"]: one for one in report["checks"]}["kv_scales"]
    assert (found["result"], made.digest[:19] in found["found"]) == ("pass", True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_another_versions_calibration_and_two_of_them_do_not_fit(place: Place) -> None:
    place.calibrate(version="0.27.1")
    assert place.check().exit_code == ExitCode.POLICY_VIOLATION
    place.calibrate()
    assert place.check().exit_code == ExitCode.CLEAN
    place.calibrate(k=0.07)
    result = place.check()
    assert result.exit_code == ExitCode.POLICY_VIOLATION
    assert "2 calibrations of this checkpoint" in result.stdout


def test_a_named_calibration_counts_where_it_lies(place: Place, tmp_path: Path) -> None:
    """From another machine: its links lead nowhere here, and it is not written again."""
    named = Path(place.calibrate(out=tmp_path / "named").path)
    assert place.check("--scales", str(named)).exit_code == ExitCode.CLEAN
    assert not overlays_directory(os.environ).exists()
    (place.model / "config.json").write_text((place.model / "config.json").read_text() + "\n")
    stale = place.check("--scales", str(named))
    assert stale.exit_code == ExitCode.POLICY_VIOLATION
    assert "config.json has changed since it was calibrated" in stale.stdout
    assert isinstance(place.check("--scales", str(tmp_path / "none")).exception, UsageError)


def test_the_flag_where_it_calibrates_on_real_tokens(place: Place) -> None:
    result = place.check("--device", "cpu", version="0.27.1", flags=("--enforce-eager",))
    assert result.exit_code == ExitCode.CLEAN, result.stdout
    assert "the engine calibrates on its first batch" in result.stdout
    assert place.check("--device", "h100", version="0.27.1").exit_code == ExitCode.POLICY_VIOLATION


def test_other_policies_look_nothing_up(place: Place) -> None:
    place.policy.write_text("kv_cache: {dtype: fp8_e4m3, scales: unit}\n")
    assert place.check().exit_code == ExitCode.CLEAN
    place.policy.write_text("kv_cache: {dtype: int8_per_token_head, scales: runtime}\n")
    assert place.check().exit_code == ExitCode.CLEAN
