from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvguard.policy.models import (
    EnginePolicy,
    KVCachePolicy,
    OnViolation,
    Policy,
    ScalesRule,
    allows_dtype,
    allows_scales,
    allows_version,
    contradiction,
    policy_digest,
)
from kvguard.vocabulary import KV_DTYPES, Confidence, ScaleState


def kv(**fields: object) -> Policy:
    return Policy.model_validate({"kv_cache": fields})


def test_defaults_require_integrity_only() -> None:
    policy = Policy()
    assert policy.kv_cache.dtype == ()
    assert policy.kv_cache.scales is ScalesRule.ANY
    assert policy.kv_cache.min_confidence is Confidence.CORROBORATED
    assert policy.on_violation is OnViolation.REFUSE
    assert all(allows_dtype(policy, name, "bfloat16") for name in (*KV_DTYPES, "unknown", "mixed"))


def test_every_field_says_what_it_means_and_its_default() -> None:
    for model in (Policy, KVCachePolicy, EnginePolicy):
        for name, field in model.model_fields.items():
            assert field.description, name
            assert "Default:" in field.description, name


def test_one_name_is_a_list_of_one_and_aliases_are_one_dtype() -> None:
    assert kv(dtype="fp8") == kv(dtype=["fp8_e4m3"]) == kv(dtype=["fp8_e4m3", "fp8"])
    assert kv(dtype=["16bit", "fp8"]).kv_cache.dtype == ("16bit", "fp8_e4m3")


@pytest.mark.parametrize(
    ("allowed", "dtype", "model_dtype", "expected"),
    [
        ("fp8", "fp8_e4m3", "bfloat16", True),
        ("fp8_e4m3", "fp8", "bfloat16", True),
        ("fp8", "fp8_e5m2", "bfloat16", False),
        ("16bit", "bfloat16", "bfloat16", True),
        ("16bit", "torch.bfloat16", "bf16", True),
        ("16bit", "float16", "bfloat16", False),
        ("16bit", "bfloat16", None, False),
        ("16bit", "16bit", "bfloat16", True),
        ("16bit", "fp8_e4m3", "bfloat16", False),
        ("bfloat16", "bfloat16", "float16", True),
        (["fp8_e5m2", "16bit"], "float16", "float16", True),
        ("fp8", "8-bit", "bfloat16", False),
        ("fp8", "mixed", "bfloat16", False),
        ("16bit", "unknown", "bfloat16", False),
    ],
)
def test_allows_dtype(allowed: object, dtype: str, model_dtype: str | None, expected: bool) -> None:
    assert allows_dtype(kv(dtype=allowed), dtype, model_dtype) is expected


@pytest.mark.parametrize(
    ("rule", "met_by"),
    [
        ("checkpoint", {"checkpoint"}),
        ("unit", {"unit_declared", "unit_default"}),
        ("runtime", {"runtime_once", "runtime_dynamic"}),
        (
            "any",
            {"not_quantized", "checkpoint", "runtime_once", "runtime_dynamic", "unit_declared", "unit_default"},
        ),
    ],
)
def test_allows_scales(rule: str, met_by: set[str]) -> None:
    assert {state.value for state in ScaleState if allows_scales(kv(scales=rule), state)} == met_by


@pytest.mark.parametrize(
    ("range_", "version", "expected"),
    [
        ("", "anything at all", True),
        (">=0.27,<0.34", "0.32.0", True),
        ("==0.32.0", "0.32.0+cpu", True),
        (">=0.27,<0.34", "0.34.0", False),
        (">=0.27", "0.33.0rc1.dev5+g1234", True),
        (">=0.27", "not a version", False),
    ],
)
def test_allows_version(range_: str, version: str, expected: bool) -> None:
    assert allows_version(Policy(engine=EnginePolicy(version=range_)), version) is expected


def test_bad_values_are_refused_by_the_models_themselves() -> None:
    for bad in (
        {"dtype": "fp9"},
        {"dtype": 8},
        {"skip_layers": [True]},
        {"skip_layers": "0,1"},
        {"min_confidence": "unknown"},
    ):
        with pytest.raises(ValidationError):
            kv(**bad)
    with pytest.raises(ValidationError):
        EnginePolicy(version="newest")
    with pytest.raises(ValidationError):
        EnginePolicy.model_validate({"attention_backend": "FLASH ATTN"})


def test_scales_of_a_16_bit_cache_cannot_be_demanded() -> None:
    assert "16bit" in str(contradiction(kv(dtype="16bit", scales="checkpoint")))
    assert contradiction(kv(dtype=["16bit", "fp8"], scales="checkpoint")) is None
    assert contradiction(kv(dtype="bfloat16")) is None
    assert contradiction(kv(scales="unit")) is None


def test_digest_is_of_the_meaning() -> None:
    same = kv(dtype="fp8", skip_layers=[1, 0])
    assert policy_digest(same) == policy_digest(kv(dtype=["fp8_e4m3"], skip_layers=["0", "1"], scales="any"))
    assert policy_digest(same).startswith("sha256:")
    digests = {
        policy_digest(policy)
        for policy in (
            same,
            Policy(),
            kv(dtype=["fp8", "16bit"]),
            kv(dtype=["16bit", "fp8"]),
            kv(dtype="fp8", scales="unit"),
        )
    }
    assert len(digests) == 5
