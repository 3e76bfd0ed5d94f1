"""`kvguard overlay`: the directories it writes, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, MODELOPT
from guarded import KVGUARD
from kvguard.engine.sealed import open_sealed
from kvguard.vocabulary import ExitCode, ScaleState
from overlay_fakes import CONFIG, checkpoint, reread, scales


@pytest.fixture
def model(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model", {**CONFIG, **COMPRESSED_TENSORS}, tokenizer__json="{}")
    return tmp_path / "model"


def overlay(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [KVGUARD, "overlay", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "COLUMNS": "200"}
    )


def test_none_strips_the_directive(model: Path, tmp_path: Path) -> None:
    done = overlay(model, "--kv", "none", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "removed config.json: quantization_config.kv_cache_scheme" in done.stdout
    _, declared, _ = reread(tmp_path / "out")
    assert declared.kv_scheme is None
    assert os.readlink(tmp_path / "out/model.safetensors") == str(model / "model.safetensors")


def test_unit_and_a_file_attach_scales(model: Path, tmp_path: Path) -> None:
    done = overlay(model, "--kv", "unit", "--out", tmp_path / "unit", "--engine-version", "0.32.0", "--json")
    document = json.loads(done.stdout)
    assert document["digest"] == open_sealed(tmp_path / "unit").digest
    assert reread(tmp_path / "unit")[1].scales.state is ScaleState.UNIT_DECLARED
    (tmp_path / "s.json").write_text(json.dumps(scales().as_document()))
    done = overlay(model, "--kv", tmp_path / "s.json", "--out", tmp_path / "given", "--engine-version", "0.32.0")
    assert done.returncode == 0, done.stderr
    assert reread(tmp_path / "given")[1].scales.k[0] == pytest.approx((0.05,))


def test_it_works_for_other_kinds_and_refuses_what_would_be_dropped(tmp_path: Path) -> None:
    checkpoint(tmp_path / "modelopt", {**CONFIG, **MODELOPT})
    done = overlay(tmp_path / "modelopt", "--kv", "none", "--out", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert reread(tmp_path / "a")[1].kv_scheme is None
    checkpoint(tmp_path / "awq", {**CONFIG, "quantization_config": {"quant_method": "awq"}})
    done = overlay(tmp_path / "awq", "--kv", "unit", "--out", tmp_path / "b", "--engine-version", "0.32.0")
    assert done.returncode == ExitCode.POLICY_VIOLATION
    assert "quantization method awq loads no KV scales, so they would be dropped" in done.stderr
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("kv", "words"),
    [("missing.json", "scales file missing.json: no such file"), ("bad", "not a regular file"), ("broken.json", "broken.json")],
)
def test_bad_input_is_one_line(model: Path, tmp_path: Path, kv: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "broken.json").write_text('{"k": [1.0]')
    done = overlay(model, "--kv", kv, "--out", tmp_path / "out", "--engine-version", "0.32.0")
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("number", ["1e39", "1" + "0" * 400, "1e-50"])
def test_a_scale_that_no_float32_holds_is_one_line(model: Path, tmp_path: Path, number: str) -> None:
    (tmp_path / "s.json").write_text(f'{{"k": [{number}, 1, 1], "v": [1, 1, 1]}}')
    done = overlay(model, "--kv", tmp_path / "s.json", "--out", tmp_path / "out", "--engine-version", "0.32.0")
    assert done.returncode == ExitCode.USAGE
    [line] = done.stderr.strip().splitlines()
    assert "s.json: k[0]: required is a finite float32 above 0, found 1" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", ["abc", "9.9.9", "0.0.1"])
@pytest.mark.parametrize("kv", ["unit", "none"])
def test_a_version_that_nobody_examined_is_unknown(model: Path, tmp_path: Path, version: str, kv: str) -> None:
    done = overlay(model, "--kv", kv, "--out", tmp_path / "out", "--engine-version", version)
    assert done.returncode == ExitCode.USAGE
    assert f"--engine-version {version}: unknown version; those that were examined: " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_another_overlay_is_replaced_only_by_force(model: Path, tmp_path: Path) -> None:
    out, version = tmp_path / "out", ("--engine-version", "0.32.0")
    (tmp_path / "s.json").write_text(json.dumps(scales().as_document()))
    assert overlay(model, "--kv", "unit", "--out", out, *version).returncode == 0
    unit = open_sealed(out)
    done = overlay(model, "--kv", tmp_path / "s.json", "--out", out, *version)
    assert done.returncode == ExitCode.USAGE
    assert f"is another overlay: found {unit.digest[:19]}" in done.stderr
    assert open_sealed(out) == unit
    inode = out.stat().st_ino
    done = overlay(model, "--kv", "unit", "--out", out, *version)
    assert done.returncode == 0, done.stderr
    assert "was there already, with this digest: left as it is" in done.stdout
    assert out.stat().st_ino == inode
    done = overlay(model, "--kv", tmp_path / "s.json", "--out", out, "--force", *version)
    assert done.returncode == 0, done.stderr
    assert open_sealed(out).digest != unit.digest


def test_a_damaged_overlay_is_replaced_only_by_force(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert overlay(model, "--kv", "none", "--out", out).returncode == 0
    out.chmod(0o755)
    (out / "more").write_text("mine?")
    done = overlay(model, "--kv", "none", "--out", out)
    assert done.returncode == ExitCode.USAGE
    assert "more is not in the manifest" in done.stderr
    assert "(--force replaces it)" in done.stderr
    assert overlay(model, "--kv", "none", "--out", out, "--force").returncode == 0
    assert not (out / "more").exists()


def test_a_directory_of_somebody_elses_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").write_text("x")
    done = overlay(model, "--kv", "none", "--out", tmp_path / "mine")
    assert done.returncode == ExitCode.USAGE
    assert "no overlay of kvguard's" in done.stderr
