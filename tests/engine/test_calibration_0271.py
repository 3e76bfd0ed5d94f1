"""Runtime scales where `--calculate-kv-scales` calibrates on the first real batch (0.27.1, CPU, eager): that batch is ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from calibrations import RUNTIME, ranges_of, read_scales, several

from guarded import Guarded
from kvguard.demo.environment import is_complete
from kvguard.reference.prompts import default_prompts
from kvguard.vocabulary import ExitCode

VERSION = "0.27.1"


@pytest.fixture(scope="module")
def older(engine_cache: Path) -> Path:
    """That version's `vllm`."""
    directory = engine_cache / "engines" / VERSION
    if not is_complete(directory):
        pytest.skip(f"vLLM {VERSION} is not set up: kvguard demo setup --engine-version {VERSION}")
    return directory / "bin" / "vllm"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Guarded]]:
    with several(tmp_path_factory.mktemp("flag")) as one:
        yield one


@pytest.fixture(scope="module")
def served(start: Callable[..., Guarded], variant: Callable[[str], Path], older: Path) -> Guarded:
    return start(variant("plain"), older, policy=RUNTIME).wait_ready()


def scales_now(served: Guarded) -> list[tuple[float, float]]:
    found = []
    for _, layer in read_scales(served).layers():
        assert layer.k_scale is not None
        assert layer.v_scale is not None
        found.append((layer.k_scale[0], layer.v_scale[0]))
    return found


def test_before_any_client_every_scale_is_finite_positive_and_not_one(served: Guarded) -> None:
    scales = scales_now(served)
    assert len(scales) == 30
    for value in (value for pair in scales for value in pair):
        assert math.isfinite(value)
        assert 0 < value != 1.0
    recorded = {layer["name"]: layer["k_scale"][0] for layer in served.record()["predicate"]["layers"]}
    for index, (k, _) in enumerate(scales):
        assert recorded[f"model.layers.{index}.self_attn.attn"] == pytest.approx(k, rel=1e-5)


def test_the_record_says_runtime_once_with_the_prompts_digest(served: Guarded) -> None:
    effective = served.effective()
    assert (effective.dtype, effective.confidence, effective.scales) == ("fp8_e4m3", "proven", "runtime_once")
    calibration = served.record()["predicate"]["calibration"]
    assert (calibration["way"], calibration["prompts"]) == ("flag", default_prompts().digest)
    assert served.check("calibration").result == "pass"
    assert any(change["what"] == "--calculate-kv-scales" for change in served.record()["predicate"]["plan"]["changes"])


def test_later_requests_do_not_change_them(served: Guarded) -> None:
    before = scales_now(served)
    assert "Paris" in served.chat().json()["choices"][0]["message"]["content"]
    served.chat("Write ten unusual words in capital letters, then ten numbers above a million.", max_tokens=48)
    assert scales_now(served) == before


def test_they_come_from_our_prompts(served: Guarded) -> None:
    """The engine divides max |K| by 200 and max |V| by 100 (0.27.1 attention.py:584). Our batch holds the beginning of every
    text that the passes see whole, so its maxima are those of the passes or a little less; the first layer, which no cache
    has touched, cannot exceed them at all."""
    ranges = list(ranges_of(served).values())
    scales = scales_now(served)
    assert scales[0][0] * 200 <= ranges[0].k.largest * (1 + 1e-6)
    assert scales[0][1] * 100 <= ranges[0].v.largest * (1 + 1e-6)
    keys = [k * 200 / found.k.largest for (k, _), found in zip(scales, ranges, strict=True)]
    values = [v * 100 / found.v.largest for (_, v), found in zip(scales, ranges, strict=True)]
    ratios = keys + values
    assert sorted(ratios)[len(ratios) // 2] > 0.8
    assert all(0.4 < ratio < 1.25 for ratio in ratios), ratios


@pytest.mark.long
def test_two_starts_give_the_same_scales(
    served: Guarded, start: Callable[..., Guarded], variant: Callable[[str], Path], older: Path
) -> None:
    first, record = scales_now(served), served.record()
    again = start(variant("plain"), older, policy=RUNTIME).wait_ready()
    assert scales_now(again) == first
    assert again.record()["predicate"]["scales_digest"] == record["predicate"]["scales_digest"]
    assert again.record()["predicate"]["content_digest"] == record["predicate"]["content_digest"]


@pytest.mark.long
def test_with_compilation_the_flag_would_see_dummy_tokens_so_it_is_not_used(
    start: Callable[..., Guarded], variant: Callable[[str], Path], older: Path
) -> None:
    compiled = start(variant("plain"), older, "--no-enforce-eager", policy=RUNTIME)
    assert compiled.wait_exit(60) == ExitCode.POLICY_VIOLATION
    assert "no calibration of this checkpoint for vLLM 0.27.1" in compiled.termination_log.read_text()
