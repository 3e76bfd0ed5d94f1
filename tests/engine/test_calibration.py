"""Runtime scales where vLLM has no flag for them (0.32.0): measured on text we chose, loaded from an overlay, read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from calibrations import NOISE, RUINED_SCALE, calibrate, cost_against, costs, ranges_of, read_scales, several

from guarded import Guarded
from kvguard.reference.artefact import load_calibration
from kvguard.reference.models import EXACT, Choice
from kvguard.reference.prompts import default_prompts
from kvguard.reference.scales import DEFAULT_HEADROOM, scale_of
from kvguard.vocabulary import ExitCode

FP8 = "kv_cache: {dtype: fp8_e4m3}\n"
UNIT = "kv_cache: {dtype: fp8_e4m3, scales: unit}\n"
SIXTEEN_BIT = "kv_cache: {dtype: 16bit, min_confidence: proven}\n"
RUINED = Choice(
    label="ruined", format="fp8_e4m3", rounding="truncate", scales={"k": [RUINED_SCALE] * 30, "v": [RUINED_SCALE] * 30}
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cal")


@pytest.fixture(scope="module")
def start(place: Path) -> Iterator[Callable[..., Guarded]]:
    with several(place) as one:
        yield one


@pytest.fixture(scope="module")
def report(variant: Callable[[str], Path], engine_bin: Path, place: Path) -> dict[str, Any]:
    """One `kvguard calibrate` on our prompts."""
    return calibrate(variant("plain"), engine_bin, place)


@pytest.fixture(scope="module")
def served(start: Callable[..., Guarded], variant: Callable[[str], Path], engine_bin: Path, report: dict[str, Any]) -> Guarded:
    """The same checkpoint under `scales: runtime`; the calibration is found in the cache."""
    assert report
    return start(variant("plain"), engine_bin).wait_ready()


def test_the_report_says_what_was_measured(report: dict[str, Any]) -> None:
    assert report["prompts"]["digest"] == default_prompts().digest
    assert [row["layer"] for row in report["layers"]] == list(range(30))
    for row in report["layers"]:
        for side in (row["k"], row["v"]):
            assert side["amax"] == max(side["amax_by_head"]) > 0
            assert len(side["amax_by_head"]) == 3
            assert side["scale"] == scale_of(side["amax"], DEFAULT_HEADROOM)
            shares = side["at_scale_one"]
            assert 0 <= shares["underflowed"] < shares["subnormal"] < 1
            assert shares["saturated"] == 0, "nothing in this model reaches 448"
    first = report["layers"][0]["v"]["at_scale_one"]
    assert first["underflowed"] > 0.01, "the first layer's values are small: scale 1.0 loses some of them"
    assert Path(report["path"]).name == report["digest"].removeprefix("sha256:")


def test_the_workers_hold_the_files_scales_to_one_in_a_million(served: Guarded, report: dict[str, Any]) -> None:
    stored = load_calibration(Path(report["path"])).scales
    effective = served.effective()
    assert (effective.dtype, effective.confidence, effective.scales) == ("fp8_e4m3", "proven", "runtime_once")
    layers = {int(layer.index): layer for _, layer in read_scales(served).layers()}
    assert sorted(layers) == list(range(30))
    for index, layer in layers.items():
        assert layer.k_scale == (pytest.approx(stored.k[index], rel=1e-6),)
        assert layer.v_scale == (pytest.approx(stored.v[index], rel=1e-6),)
        assert layer.k_scale != (1.0,)


def test_the_record_names_artefact_and_prompts_and_the_name_stays(served: Guarded, report: dict[str, Any]) -> None:
    calibration = served.record()["predicate"]["calibration"]
    assert (calibration["way"], calibration["artefact"]) == ("overlay", report["digest"])
    assert calibration["prompts"] == default_prompts().digest
    assert [card["id"] for card in served.api("/v1/models").json()["data"]] == [served.model]
    before = read_scales(served)
    answer = served.chat()
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-kvguard-kv-scales"] == "runtime_once"
    after = read_scales(served)
    assert [layer.k_scale for _, layer in after.layers()] == [layer.k_scale for _, layer in before.layers()]


def test_a_quantized_cache_does_not_taint_what_is_measured(served: Guarded, report: dict[str, Any]) -> None:
    """The same passes in the engine that runs FP8 see the same largest keys and values, number for number."""
    ranges = ranges_of(served)
    for row in report["layers"]:
        found = ranges[row["name"]]
        assert list(found.k.amax) == row["k"]["amax_by_head"]
        assert list(found.v.amax) == row["v"]["amax_by_head"]


def test_calibrated_is_no_worse_than_scale_one_and_ruined_scales_are_seen(
    served: Guarded, start: Callable[..., Guarded], variant: Callable[[str], Path], engine_bin: Path
) -> None:
    """Two engines' own decodes against the 16-bit pass; what ruined scales would do, by a pass with them."""
    calibrated, ruined = costs(served, EXACT, RUINED)
    unit_engine = start(variant("plain"), engine_bin, policy=UNIT).wait_ready()
    (unit,) = costs(unit_engine)
    assert unit_engine.stop() == ExitCode.CLEAN
    print({"calibrated": calibrated, "unit": unit, "ruined": ruined})
    assert calibrated <= unit + NOISE, (calibrated, unit)
    assert ruined > 10 * max(calibrated, unit), (ruined, calibrated, unit)


def test_a_corrupt_artefact_starts_nothing(
    start: Callable[..., Guarded], variant: Callable[[str], Path], engine_bin: Path, report: dict[str, Any]
) -> None:
    scales = Path(report["path"]) / "kv_scales.safetensors"
    whole = scales.read_bytes()
    scales.chmod(0o644)
    try:
        scales.write_bytes(whole[:-1])
        refused = start(variant("plain"), engine_bin)
        assert refused.wait_exit(60) == ExitCode.POLICY_VIOLATION
        assert "kv_scales.safetensors is corrupt" in refused.termination_log.read_text()
    finally:
        scales.write_bytes(whole)


# --- in full ---


@pytest.mark.long
def test_against_a_sixteen_bit_engine_beside_them(
    served: Guarded, start: Callable[..., Guarded], variant: Callable[[str], Path], engine_bin: Path
) -> None:
    """Three engines' own decodes, each teacher forced on a 16-bit engine."""
    reference = start(variant("plain"), engine_bin, policy=SIXTEEN_BIT).wait_ready()
    found = {"calibrated": cost_against(served, reference), "floor": cost_against(reference, reference)}
    for name, kind, policy in (("unit", "plain", UNIT), ("ruined", "kv_scheme_ruined_scales", FP8)):
        engine = start(variant(kind), engine_bin, policy=policy).wait_ready()
        found[name] = cost_against(engine, reference)
        assert engine.stop() == ExitCode.CLEAN
    print(found)
    assert found["floor"] < NOISE, found
    assert found["calibrated"] <= found["unit"] + NOISE, found
    assert found["ruined"] > 10 * max(found["calibrated"], found["unit"]), found


@pytest.mark.long
def test_equal_calibrations_have_one_digest(
    report: dict[str, Any], variant: Callable[[str], Path], engine_bin: Path, tmp_path: Path
) -> None:
    again = calibrate(variant("plain"), engine_bin, tmp_path)
    assert again["digest"] == report["digest"]
    assert again["layers"] == report["layers"]


@pytest.mark.long
def test_serve_calibrates_by_itself_only_when_told_to(variant: Callable[[str], Path], engine_bin: Path, tmp_path: Path) -> None:
    with several(tmp_path) as one:
        refused = one(variant("plain"), engine_bin)
        assert refused.wait_exit(60) == ExitCode.POLICY_VIOLATION
        told = one(variant("plain"), engine_bin, options=("--calibrate",)).wait_ready()
        assert told.effective().scales == "runtime_once"
        digest = told.record()["predicate"]["content_digest"]
        told.stop()
        again = one(variant("plain"), engine_bin, options=("--calibrate",)).wait_ready()
        assert again.record()["predicate"]["content_digest"] == digest, "found, not measured again"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kv_scheme_no_scales", "modelopt"])
def test_checkpoints_with_a_scheme_of_their_own_load_given_scales(
    kind: str, variant: Callable[[str], Path], engine_bin: Path, tmp_path: Path
) -> None:
    calibrate(variant(kind), engine_bin, tmp_path)
    with several(tmp_path) as one:
        served = one(variant(kind), engine_bin).wait_ready()
        assert served.effective().scales == "runtime_once"
        assert "Paris" in served.chat().json()["choices"][0]["message"]["content"]
        assert json.dumps(served.record()["predicate"]["calibration"])
