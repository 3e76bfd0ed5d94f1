"""Refusals: before the engine starts where that is possible, else after it showed what it is; each says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from guarded import Guarded
from kvguard.vocabulary import ExitCode

FP8 = "kv_cache: {dtype: fp8_e4m3}"
CHECKPOINT = "kv_cache: {dtype: fp8_e4m3, scales: checkpoint}"
BACKEND = "kv_cache: {dtype: fp8_e4m3}\nengine: {attention_backend: FLASH_ATTN}\n"


@pytest.mark.parametrize(
    ("kind", "flags", "policy", "code", "says"),
    [
        ("plain", ("--kv-cache-dtype", "fp8_e5m2"), FP8, 3, ("fp8_e5m2", "fp8_e4m3")),
        ("kv_scheme_no_scales", ("--kv-cache-dtype", "fp8"), CHECKPOINT, 3, ("unit_default", "checkpoint scales")),
        ("kv_scheme_half_scales", ("--kv-cache-dtype", "fp8"), CHECKPOINT, 3, ("partial", "model.layers.29")),
        ("kv_scheme_zero_scales", ("--kv-cache-dtype", "fp8"), FP8, 3, ("invalid", "model.layers.0", "0")),
        ("kv_scheme_nan_scales", ("--kv-cache-dtype", "fp8"), FP8, 3, ("invalid", "model.layers.0", "nan")),
        ("kv_scheme_inf_scales", ("--kv-cache-dtype", "fp8"), FP8, 3, ("invalid", "model.layers.0", "inf")),
        ("plain", ("--calculate-kv-scales",), "", 2, ("removed in 0.28.0", "instead")),
        (
            "plain",
            ("--kv-cache-dtype", "fp8"),
            "kv_cache: {scales: runtime}",
            3,
            ("no calibration of this checkpoint", "kvguard calibrate"),
        ),
        ("plain", ("--kv-cache-dtype", "FP8"), "", 2, ("'FP8'", "fp8_e4m3")),
        ("plain", ("--data-parallel-rank", "0"), "", 2, ("data_parallel_external",)),
        ("plain", (), "engine: {version: '<0.30'}", 3, ("0.32.0", "<0.30")),
    ],
)
def test_refused_before_the_engine_starts(
    guarded: Callable[..., Guarded], kind: str, flags: tuple[str, ...], policy: str, code: int, says: tuple[str, ...]
) -> None:
    run = guarded(kind, *flags, policy=policy)
    assert run.wait_exit(120) == code, run.err
    assert run.engine_group() is None
    assert "engine started" not in run.err
    assert "Traceback" not in run.err
    assert run.out == ""
    for word in says:
        assert word in run.err
    if code == ExitCode.POLICY_VIOLATION:
        assert run.record()["predicate"]["verdict"] == "refuse"
        assert run.termination_log.read_text().startswith("refused by policy: ")
        for word in says:
            assert word in run.record()["predicate"]["plan"]["refusal"]


def test_another_attention_backend_is_refused_once_the_tensors_show_it(guarded: Callable[..., Guarded]) -> None:
    run = guarded("plain", "--kv-cache-dtype", "fp8", policy=BACKEND)
    assert run.wait_exit() == ExitCode.POLICY_VIOLATION
    check = run.check("attention_backend")
    assert (check.result, check.required, check.found) == ("fail", "FLASH_ATTN", "CPU_ATTN")
    assert "attention_backend fail: required FLASH_ATTN; found CPU_ATTN" in run.err
    run.assert_nothing_left()


def test_hold_stays_up_unready_with_the_engine_gone(guarded: Callable[..., Guarded]) -> None:
    run = guarded("plain", "--kv-cache-dtype", "fp8", policy=BACKEND + "on_violation: hold\n").wait_state("refused")
    assert run.engine_processes() == []
    ready = run.management("/readyz")
    assert ready.status_code == 503
    assert "FLASH_ATTN" in ready.json()["reason"]
    answer = run.chat()
    assert answer.status_code == 503
    assert "FLASH_ATTN" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert answer.headers["x-kvguard-kv-cache-dtype"] == "unknown"
    assert run.api("/health").status_code == 503
    assert run.management("/livez").status_code == 200
    record = run.management("/record").json()
    assert record == run.record()
    assert record["predicate"]["verdict"] == "hold"
    assert 'kvguard_check_status{check="attention_backend",result="fail"} 1.0' in run.management("/metrics").text
    assert run.stop() == ExitCode.POLICY_VIOLATION
    run.assert_nothing_left()
