import pytest

from kvguard.facts.kv_resolution import (
    compressed_tensors_refusal,
    compressed_tensors_scheme,
    cpu_rule,
    e5m2_refusal,
    model_rule,
    modelopt_dtype,
    modelopt_method,
    never_resolves,
    sidecar_is_read,
)
from kvguard.facts.versions import EXAMINED

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def test_every_examined_version_has_a_rule_for_a_scheme_and_for_the_cpu():
    for version in EXAMINED:
        assert compressed_tensors_scheme(version) is not None, version
        assert cpu_rule(version) is not None, version


@pytest.mark.parametrize(
    ("version", "effect"),
    [
        ("0.14.1", "ignored"),
        ("0.15.0", "always"),
        ("0.21.0", "always"),
        ("0.22.0", "if_auto"),
        ("0.32.0+cpu", "if_auto"),
    ],
)
def test_what_a_compressed_tensors_scheme_does(version, effect):
    assert compressed_tensors_scheme(version).effect == effect


@pytest.mark.parametrize(
    ("version", "change", "text"),
    [
        ("0.32.0", {}, None),
        ("0.32.0", {"type": "int"}, "type 'float'"),
        ("0.23.0", {"type": "int"}, None),
        ("0.23.0", {"type": "int", "num_bits": 4}, "num_bits 8"),
        ("0.32.0", {"strategy": "channel"}, "strategy 'tensor' or 'attn_head'"),
        ("0.32.0", {"strategy": "attn_head"}, None),
        ("0.14.1", {"strategy": "attn_head"}, "strategy 'tensor'"),
        ("0.32.0", {"strategy": None}, "found None"),
        ("0.32.0", {"symmetric": False}, "symmetric true"),
        ("0.99.0", {"symmetric": False}, None),
    ],
)
def test_which_schemes_are_refused(version, change, text):
    fact = compressed_tensors_refusal(version, SCHEME | change)
    assert (text in fact.reason) if text else fact is None


STATIC = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("version", "algorithm", "dtype"),
    [
        ("0.13.0", "FP8", None),
        ("0.14.0", "FP8", "fp8_e4m3"),
        ("0.32.0", "fp8", "fp8_e4m3"),
        ("0.32.0", STATIC, "fp8_e4m3"),
        ("0.32.0", {"num_bits": 8, "type": "float"}, "auto"),
        ("0.32.0", {**STATIC, "dynamic": True}, "auto"),
        ("0.32.0", {**STATIC, "dynamic": 0}, "auto"),
        ("0.32.0", {"num_bits": 4, "type": "float"}, "nvfp4"),
        ("0.19.1", {"num_bits": 4, "type": "float"}, "auto"),
        ("0.19.1", "NVFP4", "auto"),
        ("0.20.0", "NVFP4", "nvfp4"),
        ("0.32.0", "INT8", "auto"),
        ("0.32.0", {"num_bits": 8, "type": "int", "dynamic": False}, "auto"),
        ("0.32.0", 8, "auto"),
    ],
)
def test_what_modelopt_resolves_auto_to(version, algorithm, dtype):
    found = modelopt_dtype(version, algorithm)
    assert (found and found[0]) == dtype


def infer(version, producer="modelopt", legacy_key=False, quant_algo="FP8"):
    return modelopt_method(version, producer=producer, legacy_key=legacy_key, quant_algo=quant_algo)


def test_the_inferred_modelopt_method():
    assert infer("0.32.0").method == "modelopt"
    assert infer("0.32.0", quant_algo="nvfp4").method == "modelopt_fp4"
    assert infer("0.13.0", quant_algo="nvfp4").refused
    assert infer("0.32.0", quant_algo="W4A16").refused
    assert infer("0.10.0") is None
    assert infer("0.32.0", producer="other") is None
    assert infer("0.32.0", producer=None, legacy_key=True).method == "modelopt"
    assert infer("0.25.1", producer=None, legacy_key=True) is None
    assert infer("0.32.0", quant_algo=None) is None


def test_methods_that_never_change_the_dtype():
    assert never_resolves("quark")
    assert never_resolves("fp8")
    assert never_resolves("modelopt") is None


def test_the_sidecar_is_read_from_0_10_0():
    assert not sidecar_is_read("0.9.2")
    assert sidecar_is_read("0.10.0")


def test_model_rules():
    assert model_rule("0.11.0", frozenset({"deepseek_v32"}), "auto").effect == "fp8_ds_mla"
    assert model_rule("0.11.1", frozenset({"deepseek_v32"}), "auto") is None
    assert model_rule("0.32.0", frozenset({"deepseek_v32"}), "bfloat16").effect == "auto"
    assert model_rule("0.31.0", frozenset({"glm_moe_dsa"}), "auto") is None
    assert model_rule("0.32.0", frozenset({"glm_moe_dsa"}), "auto").effect == "unknown"
    assert model_rule("0.32.0", frozenset(), "auto") is None


def test_where_e5m2_is_refused():
    assert e5m2_refusal("0.23.0", compressed_tensors_without_scheme=True)
    assert e5m2_refusal("0.24.0", compressed_tensors_without_scheme=True) is None
    assert e5m2_refusal("0.32.0", compressed_tensors_without_scheme=False)
