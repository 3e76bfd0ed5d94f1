"""One command and checkpoint on several versions, and what can be judged without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, MODELOPT, SMOLLM2, files, scales
from kvguard.engine.preview import Outcome, differences, full_version, judge_statically, preview
from kvguard.facts.devices import find_device
from kvguard.facts.versions import EXAMINED
from kvguard.verdict.checks import violates
from kvguard.vocabulary import CheckResult, UsageError
from launches import policy

CT = files({**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(30)))
MO = files({**SMOLLM2, **MODELOPT}, scales(range(30)))
PLAIN = files(SMOLLM2)


def no_config(path: str) -> bytes:
    raise UsageError(f"{path}: not there")


def on(version: str, *argv: str, of: Any = CT, device: str | None = None) -> Outcome:
    return preview(("vllm", "serve", "m", *argv), version, of, no_config, find_device(device) if device else None)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.12", "0.12.0"),
        ("0.22", "0.22.1"),
        ("0.10", "0.10.2"),
        ("0.20.0", "0.20.0"),
        ("0.33", "0.33"),
        ("1", "1"),
        ("0", "0"),
    ],
)
def test_short_versions_mean_the_newest_examined_patch(text, version):
    assert full_version(text) == version


def test_one_command_on_five_versions():
    typed = [on(version, "--kv-cache-dtype", "bfloat16") for version in ("0.14.1", "0.16.0", "0.22.1", "0.32.0", "0.33.0")]
    assert [outcome.dtype for outcome in typed] == ["unknown", "fp8_e4m3", "bfloat16", "bfloat16", "unknown"]
    assert [outcome.honoured for outcome in typed] == [False, False, True, True, None]
    assert [outcome.bytes_per_token for outcome in typed] == [None, 11_520, 23_040, 23_040, None]
    assert "no attention backend" in typed[0].problem
    assert (typed[1].echo, typed[1].scales) == ("bfloat16", "checkpoint")
    changes = differences(typed)
    assert changes[0] == "0.14.1 → 0.16.0: starts, with a KV cache of fp8_e4m3, not as typed"
    assert "0.16.0 → 0.22.1: KV cache fp8_e4m3 → bfloat16" in changes
    assert changes[-1] == "0.32.0 → 0.33.0: unknown, because the facts cover 0.8.5..0.32.0"
    assert not any("0.22.1 → 0.32.0" in change for change in changes)


def test_what_a_version_refuses_is_its_problem():
    assert "removed in 0.28.0" in on("0.32.0", "--calculate-kv-scales").problem
    assert "new in 0.19.0" in on("0.18.1", "--kv-cache-dtype-skip-layers", "0").problem
    assert "does not know" in on("0.18.1", "--kv-cache-dtype", "nvfp4").problem
    assert "c.yaml" in on("0.32.0", "--config", "c.yaml").problem
    flags = [on(version, "--calculate-kv-scales", of=PLAIN) for version in ("0.27.1", "0.28.0")]
    assert differences(flags)[0].startswith("0.27.1 → 0.28.0: no longer starts: argument 2")


def test_the_command_s_own_settings_count():
    assert on("0.32.0", "--hf-overrides", '{"quantization_config": null}').dtype == "bfloat16"
    assert on("0.32.0", "--dtype", "float16", of=PLAIN).dtype == "float16"
    assert on("0.32.0", device="t4").problem
    assert on("0.13.0", of=MO).dtype == "bfloat16"


def test_a_lost_request_is_a_change():
    before, after = on("0.14.1", "--kv-cache-dtype", "fp8"), on("0.20.2", "--kv-cache-dtype", "fp8_e5m2")
    assert any("typed value is not what runs" in change for change in differences([before, after]))
    assert differences([before]) == ()


def test_every_version_answers():
    for version in (*EXAMINED, "0.33.0"):
        for of in (CT, MO, PLAIN):
            outcome = on(version, "--kv-cache-dtype", "fp8", of=of)
            assert bool(outcome.problem) <= (outcome.dtype == "unknown")


# --- without an engine ---


def judged(text: str | None, *argv: str, of: Any = CT, version: str = "0.32.0", device: str | None = None) -> Any:
    required = policy(text) if text else None
    where = find_device(device) if device else None
    return judge_statically(("vllm", "serve", "m", *argv), version, required, of, no_config, {}, where)


def results(verdict: Any) -> dict[str, CheckResult]:
    return {check.name: check.result for check in verdict.checks}


def test_what_agrees_is_allowed():
    verdict = judged("kv_cache: {dtype: fp8_e4m3, scales: checkpoint}")
    assert set(results(verdict).values()) == {CheckResult.PASS}
    assert not violates(verdict.checks)
    assert verdict.resolution.stated == "fp8_e4m3"


@pytest.mark.parametrize(
    ("text", "argv", "more", "name"),
    [
        ("kv_cache: {dtype: fp8_e4m3, scales: checkpoint}", (), {"of": files({**SMOLLM2, **COMPRESSED_TENSORS})}, "kv_scales"),
        ("kv_cache: {dtype: 16bit}", ("--kv-cache-dtype", "fp8"), {}, "kv_cache_dtype"),
        ("engine: {version: '<0.30'}", (), {}, "engine_version"),
        (None, ("--kv-cache-dtype", "float16"), {"of": PLAIN}, "sixteen_bit_type"),
        (None, (), {"device": "t4"}, "start"),
    ],
)
def test_what_is_refused(text, argv, more, name):
    verdict = judged(text, *argv, **more)
    assert results(verdict)[name] is CheckResult.FAIL
    assert violates(verdict.checks)


def test_what_only_an_engine_tells_is_unverified_and_allowed():
    verdict = judged(None, version="0.33.0")
    assert results(verdict)["start"] is CheckResult.UNVERIFIED
    assert not violates(verdict.checks)
    runtime = judged("kv_cache: {dtype: fp8_e4m3, scales: runtime}", of=files({**SMOLLM2, **COMPRESSED_TENSORS}))
    assert results(runtime)["kv_scales"] in (CheckResult.UNVERIFIED, CheckResult.FAIL)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--data-parallel-rank", "0"), "data_parallel_external"),
        (("--kv-cache-dtype", "fp9"), "does not know"),
        (("--nonsense",), "no such flag"),
    ],
)
def test_what_vllm_or_kvguard_would_not_run_is_a_usage_error(argv, says):
    with pytest.raises(UsageError, match=says):
        judged(None, *argv)


def test_only_serve_is_judged():
    with pytest.raises(UsageError, match="vllm serve MODEL"):
        judge_statically(("vllm", "bench", "m"), "0.32.0", None, PLAIN, no_config, {})
