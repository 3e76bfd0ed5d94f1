"""What is judged before the engine starts."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, Tensors, scales
from kvguard.engine.resolve import resolve
from kvguard.policy.models import Policy
from kvguard.verdict.before_start import judge_before_start
from kvguard.verdict.checks import describe, violates, violations
from kvguard.verdict.runtime_scales import RuntimeScales
from kvguard.vocabulary import Check, CheckResult
from launches import command, declared, policy

SCHEME = {**SMOLLM2, **COMPRESSED_TENSORS}
ALL = scales(range(30))
HALF = scales(range(15))
NAN = {**ALL, **scales([3], k=float("nan"))}


def judged(
    required: Policy | None,
    *argv: str,
    version: str = "0.32.0",
    config: dict[str, Any] | None = None,
    tensors: Tensors | None = None,
    runtime: RuntimeScales | None = None,
) -> dict[str, Check]:
    """The checks on a command and a checkpoint, by name."""
    typed, files = command(*argv, version=version), declared(config or SMOLLM2, tensors)
    found = resolve(typed, version, files, required, (config or {}).get("quantization_config", {}))
    checks = judge_before_start(
        required,
        prediction=found.prediction,
        target=found.target,
        typed=found.typed,
        typed_by=found.typed_by,
        problem=found.problem,
        declared=files,
        model_dtype=found.model_dtype,
        engine_version=version,
        typed_skip_layers=typed.values("--kv-cache-dtype-skip-layers"),
        calculate_kv_scales=typed.present("--calculate-kv-scales"),
        runtime=runtime,
    )
    return {check.name: check for check in checks}


def says(check: Check, *words: str) -> None:
    """A message for the person on call, on one line."""
    line = describe(check)
    assert "\n" not in line
    for word in words:
        assert word in line


def test_what_agrees_starts() -> None:
    checks = judged(policy("kv_cache: {dtype: fp8_e4m3, scales: checkpoint}"), config=SCHEME, tensors=ALL)
    assert {name: check.result for name, check in checks.items()} == {
        "engine_version": CheckResult.PASS,
        "kv_cache_dtype": CheckResult.PASS,
        "kv_scales": CheckResult.PASS,
    }
    assert not violates(checks.values())
    assert "the plan: nothing was typed" in checks["kv_cache_dtype"].where


def test_without_a_policy_only_integrity_is_checked() -> None:
    assert set(judged(None)) == {"kv_scales"}
    broken = judged(None, config=SCHEME, tensors=NAN)
    assert violations(broken.values()) == (broken["kv_scales"],)


def test_typed_against_policy_names_both() -> None:
    check = judged(policy("kv_cache: {dtype: fp8_e4m3}"), "--kv-cache-dtype", "fp8_e5m2")["kv_cache_dtype"]
    assert check.result is CheckResult.FAIL
    says(
        check,
        "required fp8_e4m3",
        "found fp8_e5m2 typed on the command",
        "argument 2 `--kv-cache-dtype`",
        "remove --kv-cache-dtype fp8_e5m2",
        "allow fp8_e5m2",
    )


def test_a_dtype_that_cannot_be_had() -> None:
    check = judged(policy("kv_cache: {dtype: nvfp4}"), version="0.16.0")["kv_cache_dtype"]
    assert check.result is CheckResult.FAIL
    says(check, "required nvfp4", "nvfp4 cannot be had on vLLM 0.16.0", "change the policy, the checkpoint or the vLLM version")


def test_another_sixteen_bit_dtype_than_the_models() -> None:
    check = judged(policy("kv_cache: {dtype: float16}"))["kv_cache_dtype"]
    assert check.result is CheckResult.FAIL
    says(check, "float16, while the model itself is bfloat16", "use 16bit or bfloat16")
    assert judged(policy("kv_cache: {dtype: float16}"), "--dtype", "half")["kv_cache_dtype"].result is CheckResult.PASS


def test_what_cannot_be_predicted_is_left_to_the_engine() -> None:
    required = policy("kv_cache: {scales: checkpoint}")
    unexamined = judged(required, version="0.99.0")
    assert set(unexamined) == {"engine_version", "kv_cache_dtype", "kv_scales"}
    assert unexamined["kv_scales"].result is CheckResult.UNVERIFIED
    assert not violates(unexamined.values())
    assert unexamined["kv_cache_dtype"].result is CheckResult.PASS
    float32 = {**SMOLLM2, "torch_dtype": "float32"}
    unknown = judged(policy("kv_cache: {dtype: 16bit}"), config=float32)["kv_cache_dtype"]
    assert unknown.result is CheckResult.FAIL
    says(unknown, "16bit", "config.json or --dtype")


def test_nothing_passes_on_a_version_that_was_not_examined() -> None:
    for version in ("9999.0", "banana", "-1", "0.33.0", "0.12.3"):
        for typed in ((), ("--kv-cache-dtype", "bfloat16")):
            checks = judged(policy("kv_cache: {dtype: 16bit}"), *typed, version=version)
            assert checks["kv_cache_dtype"].result is CheckResult.UNVERIFIED
            assert checks["kv_scales"].result is CheckResult.UNVERIFIED
            assert not violates(checks.values())


def test_broken_scales_are_proven_by_the_files_on_any_version() -> None:
    for required in ("kv_cache: {dtype: fp8_e4m3}", "kv_cache: {scales: checkpoint}"):
        checks = judged(policy(required), version="9999.0", config=SCHEME, tensors=NAN)
        assert violations(checks.values()) == (checks["kv_scales"],)
    assert judged(policy("kv_cache: {dtype: 16bit}"), version="9999.0", config=SCHEME, tensors=NAN)["kv_scales"].result is (
        CheckResult.UNVERIFIED
    )


def test_a_model_whose_dtype_nobody_says_is_unverified() -> None:
    check = judged(policy("kv_cache: {dtype: 16bit}"), config={**SMOLLM2, "torch_dtype": None})["kv_cache_dtype"]
    assert check.result is CheckResult.UNVERIFIED
    says(check, "--dtype bfloat16")


def test_an_unknown_target_is_unverified() -> None:
    files = declared()
    found = resolve(command(version="0.99.0"), "0.99.0", files, None, {})
    checks = judge_before_start(
        policy("kv_cache: {dtype: bfloat16}"),
        prediction=found.prediction,
        target="unknown",
        typed=None,
        typed_by="",
        problem="",
        declared=files,
        model_dtype="bfloat16",
        engine_version="",
    )
    check = next(check for check in checks if check.name == "kv_cache_dtype")
    assert (check.result, check.enforced) == (CheckResult.UNVERIFIED, False)


@pytest.mark.parametrize(
    ("wanted", "version", "result"),
    [
        ("", "0.32.0", CheckResult.PASS),
        (">=0.27,<0.34", "0.32.0", CheckResult.PASS),
        (">=0.27,<0.34", "0.26.0", CheckResult.FAIL),
        (">=0.27,<0.34", "", CheckResult.UNVERIFIED),
    ],
)
def test_the_version(wanted: str, version: str, result: CheckResult) -> None:
    required = policy(f"engine: {{version: '{wanted}'}}")
    files = declared()
    found = resolve(command(), "0.32.0", files, required, {})
    check, *_ = judge_before_start(
        required,
        prediction=found.prediction,
        target=found.target,
        typed=None,
        typed_by="",
        problem="",
        declared=files,
        model_dtype="bfloat16",
        engine_version=version,
    )
    assert check.result is result
    assert violates((check,)) is (result is not CheckResult.PASS)
    if result is CheckResult.FAIL:
        says(check, "required vLLM <0.34,>=0.27", "found vLLM 0.26.0", "package metadata", "install an allowed vLLM")


@pytest.mark.parametrize(
    ("rule", "tensors", "result", "words"),
    [
        ("checkpoint", ALL, CheckResult.PASS, ()),
        ("checkpoint", {}, CheckResult.FAIL, ("checkpoint scales", "unit_default", "use a checkpoint with calibrated scales")),
        ("checkpoint", scales(range(30), 1.0, 1.0), CheckResult.FAIL, ("unit_declared",)),
        ("unit", {}, CheckResult.PASS, ()),
        ("unit", ALL, CheckResult.FAIL, ("unit scales", "found checkpoint", "set `scales: checkpoint`")),
        ("any", {}, CheckResult.PASS, ()),
        (
            "any",
            HALF,
            CheckResult.FAIL,
            ("partial: missing in model.layers.15 (k, v)", "repair the checkpoint's scale tensors"),
        ),
        ("any", NAN, CheckResult.FAIL, ("invalid: not finite and positive in model.layers.3 (k = nan)",)),
        ("checkpoint", HALF, CheckResult.FAIL, ("partial",)),
        ("any", scales(range(30), 0.0), CheckResult.FAIL, ("invalid", "model.layers.0", "model.layers.29")),
    ],
)
def test_scales(rule: str, tensors: Tensors, result: CheckResult, words: tuple[str, ...]) -> None:
    checks = judged(policy(f"kv_cache: {{dtype: fp8_e4m3, scales: {rule}}}"), config=SCHEME, tensors=tensors)
    assert checks["kv_scales"].result is result
    says(checks["kv_scales"], *words)


def test_long_lists_of_layers_are_cut() -> None:
    many = {**SCHEME, "num_hidden_layers": 80}
    check = judged(policy("kv_cache: {dtype: fp8_e4m3}"), config=many, tensors=scales(range(4)))["kv_scales"]
    says(check, "and 44 more")


def test_scales_of_a_sixteen_bit_cache_do_not_matter() -> None:
    check = judged(policy("kv_cache: {dtype: bfloat16}"), config=SCHEME, tensors=NAN)["kv_scales"]
    assert (check.result, check.found) == (CheckResult.PASS, "not_quantized")


def test_scales_computed_for_each_token_are_runtime_scales() -> None:
    check = judged(policy("kv_cache: {dtype: fp8_per_token_head, scales: runtime}"))["kv_scales"]
    assert (check.result, check.found) == (CheckResult.PASS, "runtime_dynamic")


def test_runtime_scales_are_judged_by_the_way_they_are_had() -> None:
    fp8 = ("--kv-cache-dtype", "fp8", "--calculate-kv-scales")
    required = policy("kv_cache: {dtype: fp8_e4m3, scales: runtime}")
    assert "kv_scales" not in judged(required, *fp8, version="0.20.2"), "not decided yet"
    way = RuntimeScales(way="overlay", reason="", overlay="/o", found="runtime_once: calibration x", where="/o")
    assert judged(required, runtime=way)["kv_scales"].result is CheckResult.PASS
    none = way.model_copy(update={"problem": "no calibration", "action": "calibrate"})
    check = judged(required, runtime=none)["kv_scales"]
    assert check.result is CheckResult.FAIL
    says(check, "required runtime scales; found no calibration (/o); calibrate")
    assert judged(policy("kv_cache: {dtype: fp8_e4m3}"), runtime=none)["kv_scales"].result is CheckResult.FAIL
    assert "kv_scales" not in judged(policy("kv_cache: {dtype: fp8_e4m3}"), *fp8, version="0.20.2")


def test_skipped_layers() -> None:
    argv = ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0", "sliding_window")
    refused = judged(policy("kv_cache: {dtype: fp8_e4m3, skip_layers: [0]}"), *argv)["skip_layers"]
    assert refused.result is CheckResult.FAIL
    says(refused, "only 0 may stay 16-bit", "--kv-cache-dtype-skip-layers 0 sliding_window", "remove sliding_window")
    none = judged(policy("kv_cache: {dtype: fp8_e4m3}"), *argv)["skip_layers"]
    says(none, "only no layer may stay 16-bit", "remove 0, sliding_window")
    allowed = judged(policy("kv_cache: {dtype: fp8_e4m3, skip_layers: [0, sliding_window]}"), *argv)["skip_layers"]
    assert (allowed.result, allowed.action) == (CheckResult.PASS, "")
    assert "skip_layers" not in judged(policy("kv_cache: {dtype: bfloat16}"), *argv[2:])
