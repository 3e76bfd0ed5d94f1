"""Which KV dtype the plan states, by version, checkpoint, command and policy."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, MODELOPT, SMOLLM2
from kvguard.engine.resolve import check_typed, model_dtype_of, runs_quantized
from kvguard.policy.models import Policy
from kvguard.vocabulary import UsageError
from launches import command, declared, dtype, policy, resolved

SCHEME: dict[str, Any] = {**SMOLLM2, **COMPRESSED_TENSORS}
OPT: dict[str, Any] = {**SMOLLM2, **MODELOPT}
FLOAT32 = {**SMOLLM2, "torch_dtype": "float32"}
FP8, BF16, SIXTEEN = dtype("fp8_e4m3"), dtype("bfloat16"), dtype("16bit")


@pytest.mark.parametrize(
    ("version", "config", "argv", "required", "target", "stated"),
    [
        # Nothing typed, no policy: what would happen anyway is made explicit.
        ("0.32.0", SMOLLM2, (), None, "bfloat16", "bfloat16"),
        ("0.32.0", SCHEME, (), None, "fp8_e4m3", "fp8_e4m3"),
        ("0.32.0", OPT, (), None, "fp8_e4m3", "fp8_e4m3"),
        ("0.32.0", SMOLLM2, ("--kv-cache-dtype", "auto"), None, "bfloat16", "bfloat16"),
        ("0.32.0", FLOAT32, (), None, "unknown", None),
        ("0.99.0", SMOLLM2, (), None, "unknown", None),
        # A policy's dtype is stated where nothing was typed.
        ("0.32.0", SMOLLM2, (), FP8, "fp8_e4m3", "fp8_e4m3"),
        ("0.32.0", SCHEME, (), BF16, "bfloat16", "bfloat16"),
        ("0.32.0", OPT, (), BF16, "bfloat16", "bfloat16"),
        ("0.32.0", SCHEME, (), SIXTEEN, "bfloat16", "bfloat16"),
        ("0.32.0", SMOLLM2, ("--dtype", "half"), SIXTEEN, "float16", "float16"),
        ("0.99.0", SMOLLM2, (), FP8, "fp8_e4m3", "fp8_e4m3"),
        # A policy without a dtype asks for nothing.
        ("0.32.0", SCHEME, (), policy("kv_cache:\n  scales: checkpoint\n"), "fp8_e4m3", "fp8_e4m3"),
        # A list: the predicted dtype if it is listed, else the first.
        ("0.32.0", SMOLLM2, (), dtype("fp8_e4m3", "bfloat16"), "bfloat16", "bfloat16"),
        ("0.32.0", SCHEME, (), dtype("bfloat16", "fp8_e4m3"), "fp8_e4m3", "fp8_e4m3"),
        ("0.32.0", SCHEME, (), dtype("int8_per_token_head", "16bit"), "int8_per_token_head", "int8_per_token_head"),
        # What is typed stays as it is, also against the policy: refusing is the verdict's.
        ("0.32.0", SMOLLM2, ("--kv-cache-dtype", "fp8"), None, "fp8_e4m3", None),
        ("0.32.0", SMOLLM2, ("--kv-cache-dtype", "fp8_e5m2"), FP8, "fp8_e5m2", None),
        ("0.99.0", SMOLLM2, ("--kv-cache-dtype", "fp8"), BF16, "fp8_e4m3", None),
        ("0.16.0", SMOLLM2, ("--kv-cache-dtype", "bfloat16"), BF16, "bfloat16", None),
        # 0.11.1 to 0.14.1: no backend lists bfloat16, and auto gives it.
        ("0.12.0", SMOLLM2, (), BF16, "bfloat16", None),
        ("0.12.0", SCHEME, (), SIXTEEN, "bfloat16", None),
        ("0.12.0", SMOLLM2, (), None, "bfloat16", None),
        ("0.12.0", SMOLLM2, ("--kv-cache-dtype", "bfloat16"), BF16, "bfloat16", "auto"),
        ("0.12.0", SMOLLM2, (), FP8, "fp8_e4m3", "fp8_e4m3"),
    ],
)
def test_what_is_stated(
    version: str, config: dict[str, Any], argv: tuple[str, ...], required: Policy | None, target: str, stated: str | None
) -> None:
    found = resolved(*argv, version=version, config=config, required=required)
    assert (found.target, found.stated, found.problem) == (target, stated, "")
    assert not found.strip_scheme
    assert found.reason


@pytest.mark.parametrize("version", ["0.16.0", "0.20.2"])
def test_a_scheme_that_wins_over_an_explicit_dtype_is_stripped(version: str) -> None:
    found = resolved(version=version, config=SCHEME, required=BF16)
    assert (found.target, found.stated, found.strip_scheme, found.problem) == ("bfloat16", None, True, "")
    assert found.hf_overrides == {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert found.prediction.dtype == "bfloat16"
    assert "whatever was requested" in found.reason
    typed = resolved("--kv-cache-dtype", "bfloat16", version=version, config=SCHEME, required=BF16)
    assert (typed.stated, typed.strip_scheme) == ("auto", True)


def test_stripping_keeps_the_commands_own_overrides() -> None:
    typed = resolved("--hf-overrides", '{"rope_scaling": null}', version="0.20.2", config=SCHEME, required=BF16)
    assert typed.hf_overrides == {"rope_scaling": None, "quantization_config": {"quant_method": "compressed-tensors"}}
    dotted = resolved("--hf-overrides.a.b", "1", version="0.20.2", config=SCHEME, required=BF16)
    assert dotted.hf_overrides == {"a": {"b": 1}, "quantization_config": {"quant_method": "compressed-tensors"}}
    theirs = '{"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["x"], "kv_cache_scheme": {}}}'
    assert resolved("--hf-overrides", theirs, version="0.20.2", config=SCHEME, required=BF16).hf_overrides == {
        "quantization_config": {"quant_method": "compressed-tensors", "ignore": ["x"]}
    }


@pytest.mark.parametrize(
    ("version", "config", "required", "says"),
    [
        ("0.12.0", SMOLLM2, dtype("float16"), ("float16 cannot be had on vLLM 0.12.0", "0.12.0 accepts")),
        ("0.12.0", SMOLLM2, dtype("nvfp4"), ("nvfp4 cannot be had on vLLM 0.12.0", "0.12.0 accepts")),
        ("0.32.0", FLOAT32, SIXTEEN, ("16bit", "config.json or --dtype")),
    ],
)
def test_what_cannot_be_had_is_a_problem(version: str, config: dict[str, Any], required: Policy, says: tuple[str, ...]) -> None:
    found = resolved(version=version, config=config, required=required)
    assert found.stated is None
    for words in says:
        assert words in found.problem


def test_a_typed_value_that_cannot_run_is_a_problem_naming_the_reason() -> None:
    found = resolved("--kv-cache-dtype", "fp8_e5m2", config=SCHEME)
    assert found.target == "fp8_e5m2"
    assert "fp8_e5m2 cannot be had on vLLM 0.32.0" in found.problem


def test_a_cpu_that_falls_back_to_auto() -> None:
    found = resolved(version="0.16.0", platform="cpu", required=FP8)
    assert "CPU platform" in found.problem
    assert resolved(version="0.16.0", platform="cpu", required=BF16).stated == "bfloat16"


def test_where_a_typed_value_was_read() -> None:
    found = resolved("--enforce-eager", "--kv-cache-dtype=fp8")
    assert (found.typed, found.typed_by) == ("fp8", "argument 3 `--kv-cache-dtype=fp8`")
    assert runs_quantized(found)
    nothing = resolved("--kv-cache-dtype", "auto")
    assert nothing.typed is None
    assert not runs_quantized(nothing)


@pytest.mark.parametrize(
    ("argv", "config", "expected"),
    [
        ((), SMOLLM2, "bfloat16"),
        (("--dtype", "half"), SMOLLM2, "float16"),
        (("--dtype", "float"), SMOLLM2, "float32"),
        (("--dtype", "auto"), SMOLLM2, "bfloat16"),
        (("--dtype", "unheard-of"), SMOLLM2, None),
        ((), FLOAT32, None),
    ],
)
def test_the_models_own_dtype(argv: tuple[str, ...], config: dict[str, Any], expected: str | None) -> None:
    assert model_dtype_of(command(*argv), declared(config)) == expected


def test_a_dtype_that_this_version_does_not_know() -> None:
    with pytest.raises(UsageError) as caught:
        check_typed(command("--kv-cache-dtype", "nvfp4", version="0.16.0"), "0.16.0")
    for words in ("argument 2", "vLLM 0.16.0 does not know", "'nvfp4'", "vLLM 0.20.0..0.32.0 does", "this version knows auto"):
        assert words in str(caught.value)
    with pytest.raises(UsageError, match="no examined vLLM does"):
        check_typed(command("--kv-cache-dtype", "fp7"), "0.32.0")


@pytest.mark.parametrize(
    ("argv", "version"),
    [((), "0.32.0"), (("--kv-cache-dtype", "fp8"), "0.32.0"), (("--kv-cache-dtype", "fp7"), "0.99.0")],
)
def test_a_dtype_that_may_be_known(argv: tuple[str, ...], version: str) -> None:
    check_typed(command(*argv, version=version), version)
