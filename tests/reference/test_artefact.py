"""Calibrations as artefacts: named by what made them, found by what they fit, and refused when corrupt or stale."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, f32, refusal
from kvguard.engine.sealed import write_sealed
from kvguard.reference.artefact import (
    REPORT,
    Calibration,
    Options,
    at_home,
    find_calibrations,
    load_calibration,
    only_one,
    overlays_directory,
    save_calibration,
    stale,
)
from kvguard.reference.scales import Scales
from overlay_fakes import CONFIG, checkpoint, reread, scales, weights

PROMPTS = "sha256:" + "1" * 64
OPTIONS = Options(headroom=2.0, model_dtype="bfloat16")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return overlays_directory({"XDG_CACHE_HOME": str(tmp_path / "cache")})


def save(
    model: Path,
    cache: Path,
    given: Scales | None = None,
    prompts: str = PROMPTS,
    engine: str = "0.32.0",
    options: Options = OPTIONS,
    out: Path | None = None,
) -> Calibration:
    files, declared, digests = reread(model)
    return save_calibration(
        files=files,
        declared=declared,
        digests=digests,
        engine=engine,
        prompts=prompts,
        options=options,
        scales=given or scales(),
        report={"layers": []},
        directory=cache,
        out=out,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model")
    return tmp_path / "model"


def test_it_is_named_by_its_digest_and_reads_back(model: Path, cache: Path) -> None:
    saved = save(model, cache)
    assert saved.path == str(cache / saved.digest.removeprefix("sha256:"))
    assert load_calibration(Path(saved.path)) == saved
    assert saved.scales == scales()
    assert saved.summary() == {
        "way": "overlay",
        "artefact": saved.digest,
        "prompts": PROMPTS,
        "engine": "0.32.0",
        "options": {"format": "fp8_e4m3", "headroom": 2.0, "model_dtype": "bfloat16"},
    }
    _, declared, _ = reread(Path(saved.path))
    assert declared.scales.k == {index: pytest.approx((0.05,)) for index in range(3)}


def test_equal_calibrations_are_one_and_anything_else_makes_another(model: Path, cache: Path) -> None:
    first = save(model, cache)
    assert save(model, cache) == first
    others = [
        save(model, cache, scales(k=0.051)),
        save(model, cache, prompts="sha256:" + "2" * 64),
        save(model, cache, engine="0.31.0"),
        save(model, cache, options=Options(headroom=4.0, model_dtype="bfloat16")),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 5
    assert len(list(cache.iterdir())) == 5


def test_the_same_checkpoint_elsewhere_gives_the_same_name(model: Path, cache: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert save(tmp_path / "copy", tmp_path / "other").digest == save(model, cache).digest


def test_it_fits_its_checkpoint_engine_and_dtype_alone(model: Path, cache: Path) -> None:
    saved = save(model, cache)
    _, _, digests = reread(model)
    assert stale(saved, digests, "0.32.0", "bfloat16") == ""
    assert stale(saved, digests, "0.32.0", None) == ""
    assert "made on vLLM 0.32.0, the engine is vLLM 0.31.0" in stale(saved, digests, "0.31.0", "bfloat16")
    assert "made in bfloat16, the model runs in float16" in stale(saved, digests, "0.32.0", "float16")
    assert find_calibrations(cache, digests, "0.32.0", "bfloat16") == ((saved,), ())
    assert find_calibrations(cache, digests, "0.31.0", "bfloat16") == ((), ())
    assert find_calibrations(cache / "none", digests, "0.32.0", None) == ((), ())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: (d / "config.json").write_text('{"num_hidden_layers": 3}'), "config.json has changed"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json is new"),
        (lambda d: checkpoint(d, CONFIG, {**weights(), "lm_head.weight": f32(2.0)}), "model.safetensors has changed"),
    ],
)
def test_a_checkpoint_that_changed_is_named(model: Path, cache: Path, change, words: str) -> None:
    saved = save(model, cache)
    change(model)
    _, _, digests = reread(model)
    assert words in stale(saved, digests, "0.32.0", "bfloat16")
    assert find_calibrations(cache, digests, "0.32.0", None)[0] == ()


def test_a_file_that_is_gone_is_named(tmp_path: Path, cache: Path) -> None:
    checkpoint(tmp_path / "m", tokenizer__json="{}")
    saved = save(tmp_path / "m", cache)
    (tmp_path / "m/tokenizer.json").unlink()
    _, _, digests = reread(tmp_path / "m")
    assert "tokenizer.json is gone" in stale(saved, digests, "0.32.0", None)
    assert "which is gone" in find_calibrations(cache, digests, "0.32.0", None)[1][0]


def test_a_corrupt_one_is_named_and_not_used(model: Path, cache: Path) -> None:
    saved = save(model, cache)
    (Path(saved.path) / "kv_scales.safetensors").chmod(0o644)
    (Path(saved.path) / "kv_scales.safetensors").write_bytes(b"x")
    _, _, digests = reread(model)
    fitting, problems = find_calibrations(cache, digests, "0.32.0", None)
    assert fitting == ()
    assert "kv_scales.safetensors is corrupt" in problems[0]
    assert save(model, cache) == saved, "made again in its place"
    assert find_calibrations(cache, digests, "0.32.0", None) == ((saved,), ())


def test_what_lies_about_is_passed_over(model: Path, cache: Path) -> None:
    saved = save(model, cache)
    (cache / ".x.kvguard-half").mkdir()
    (cache / "notes").mkdir()
    (cache / "file").write_text("x")
    _, _, digests = reread(model)
    assert find_calibrations(cache, digests, "0.32.0", None) == ((saved,), ())


def test_an_overlay_that_is_no_calibration_is_refused(model: Path, tmp_path: Path) -> None:
    write_sealed(tmp_path / "o", about={"kind": "stripped"}, source=str(model), files={}, links={})
    assert "but no calibration" in refusal(lambda: load_calibration(tmp_path / "o"))
    write_sealed(tmp_path / "p", about={"kind": "calibration"}, source=str(model), files={}, links={})
    assert "written by another version of kvguard" in refusal(lambda: load_calibration(tmp_path / "p"))


def test_one_from_another_machine_is_written_again_under_its_own_name(model: Path, cache: Path, tmp_path: Path) -> None:
    """Its links lead to where the checkpoint lay there; scales, digest and report stay."""
    shutil.copytree(model, tmp_path / "moved")
    foreign = save(tmp_path / "moved", cache, out=tmp_path / "shared")
    files, declared, _ = reread(model)
    home = at_home(foreign, files, declared, cache)
    assert home.path == str(cache / foreign.digest.removeprefix("sha256:"))
    assert (home.digest, home.scales) == (foreign.digest, foreign.scales)
    assert os.readlink(Path(home.path) / "model.safetensors") == str(model / "model.safetensors")
    assert (Path(home.path) / REPORT).read_bytes() == (Path(foreign.path) / REPORT).read_bytes()
    assert at_home(home, files, declared, cache) == home


def test_a_checkpoint_with_a_scheme_of_its_own_is_calibrated_too(tmp_path: Path, cache: Path) -> None:
    checkpoint(tmp_path / "m", {**CONFIG, **COMPRESSED_TENSORS})
    saved = save(tmp_path / "m", cache)
    files, declared, _ = reread(Path(saved.path))
    assert declared.kv_scheme is not None
    assert files.index_json is not None


def test_only_one_start_calibrates_at_a_time(cache: Path) -> None:
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with only_one(cache):
            order.append("first in")
            inside.set()
            leave.wait(120)
            order.append("first out")

    def second() -> None:
        with only_one(cache):
            order.append("second in")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(120)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(120)
    assert order == ["first in", "first out", "second in"]
