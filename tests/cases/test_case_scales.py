"""Cases about KV scales: which tensors count, which layers lack them, and what 1.0 means."""

from __future__ import annotations

import pytest

from case_fakes import MODELOPT_SCHEME, after, before, checkpoint, compressed_tensors, modelopt, named, on, said, seen
from checkpoint_fakes import f32, scales
from kvguard.facts.cautions import cautions
from kvguard.policy.models import allows_scales
from kvguard.verdict.checks import describe
from kvguard.vocabulary import CheckResult, Confidence, Effective, ScaleState
from launches import policy

CALIBRATED = "kv_cache: {dtype: fp8_e4m3, scales: checkpoint}"
UNIT_WARNING = (
    "(Worker pid=7) WARNING 08-09 10:11:12 [kv_cache.py:9] Using KV cache scaling factor 1.0 for fp8_e4m3. "
    "If this is unintended, verify that k/v_scale scaling factors are properly set in the checkpoint.\n"
)
Q_WARNING = (
    "(Worker pid=7) WARNING 08-09 10:11:12 [kv_cache.py:9] Checkpoint does not provide a q scaling factor. Setting it to "
    "k_scale. This only matters for FP8 Attention backends (flash-attn or flashinfer).\n"
)
CAPACITY = (
    "(Worker pid=7) INFO 08-09 10:11:12 [gpu_worker.py:3] Available KV cache memory: 1.00 GiB\n"
    "(EngineCore pid=7) INFO 08-09 10:11:12 [kv_cache_utils.py:3] GPU KV cache size: 1,048,576 tokens\n"
)

HYBRID = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 512,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    },
}


def test_19_scales_that_the_model_class_drops():
    tensors = scales([2, 5], name="model.language_model.layers.{}.self_attn.{}_scale")
    declared = checkpoint(modelopt(kv_cache_scheme=MODELOPT_SCHEME), tensors, **HYBRID)
    # Two attention layers are expected to have scales, not six.
    assert declared.geometry.layer_indices == (2, 5)
    assert (declared.scales.state, declared.scales.missing_layers) == (ScaleState.CHECKPOINT, ())
    found = on("0.32.0", declared, "fp8")
    assert (found.dtype, found.scales) == ("fp8_e4m3", ScaleState.UNKNOWN)
    assert "reported to drop" in found.reason
    shown = seen(
        UNIT_WARNING + "INFO 08-09 10:11:12 [cache.py:9] " + FP8_LINE, declared=declared, version="0.32.0", typed="fp8"
    )
    assert (shown.scales, shown.scales_confidence) == (ScaleState.UNIT_DEFAULT, Confidence.ECHOED)
    assert "all 2 layers" in shown.scales_detail
    assert after(CALIBRATED, shown, declared)["kv_scales"].result is CheckResult.FAIL


FP8_LINE = (
    "Using fp8_e4m3 data type to store kv cache. It reduces the GPU memory footprint and boosts the performance. Meanwhile\n"
)


def test_19_without_the_warning_nothing_is_claimed():
    declared = checkpoint(compressed_tensors(), scales(range(4)))
    assert seen(Q_WARNING, declared=declared, version="0.32.0").scales is ScaleState.UNKNOWN
    ones = checkpoint(compressed_tensors(), {**scales(range(3)), **scales([3], k=1.0, v=1.0)})
    assert seen(UNIT_WARNING, declared=ones, version="0.32.0").scales is ScaleState.UNKNOWN


def test_21_no_warning_is_no_evidence_of_scales():
    declared = checkpoint()
    assert on("0.32.0", declared, "fp8_e4m3").scales is ScaleState.UNIT_DEFAULT
    assert "scales_warning" not in said(CAPACITY)
    check = before(CALIBRATED, declared, "--kv-cache-dtype", "fp8_e4m3")["kv_scales"]
    assert check.result is CheckResult.FAIL
    assert "unit_default" in check.found


def by_modelopt(version, tensors):
    block = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    return checkpoint(sidecar={"producer": {"name": "modelopt", "version": version}, "quantization": block}, tensors=tensors)


@pytest.mark.parametrize(
    ("version", "tensors", "state", "says"),
    [
        (
            "0.42.0",
            scales(range(4), k=1.0, v=1.0, name="model.layers.{0}.self_attn.{1}_proj.{1}_scale"),
            "unit_declared",
            "at least 1.0",
        ),
        ("0.43.0", None, "unit_default", "without calibration"),
        ("0.45.0.dev44", None, "unit_default", "without calibration"),
    ],
)
def test_22_scale_one_by_design(version, tensors, state, says):
    declared = by_modelopt(version, tensors)
    assert declared.scales.state == state
    assert any(says in finding and "intends" in finding for finding in declared.findings)
    assert before(CALIBRATED, declared)["kv_scales"].result is CheckResult.FAIL
    for rule in ("unit", "any"):
        check = before(f"kv_cache: {{dtype: fp8_e4m3, scales: {rule}}}", declared)["kv_scales"]
        assert check.result is CheckResult.PASS
    for text in (*declared.findings, describe(before(CALIBRATED, declared)["kv_scales"])):
        assert "corrupt" not in text


def test_22_what_was_not_intended_gets_no_such_note():
    assert not any("intends" in finding for finding in by_modelopt("0.42.0", None).findings)
    assert not any("intends" in finding for finding in by_modelopt("a fork", None).findings)


def test_24_scales_for_fewer_layers():
    tensors = {name: value for name, value in scales(range(3)).items() if name != "model.layers.2.self_attn.v_scale"}
    declared = checkpoint(compressed_tensors(), tensors)
    assert declared.scales.state is ScaleState.PARTIAL
    assert declared.scales.missing_layers == ("model.layers.2 (v)", "model.layers.3 (k, v)")
    assert before(None, declared)["kv_scales"].result is CheckResult.FAIL


def test_25_every_style_of_name():
    tensors = named(
        "model.layers.0.self_attn.k_proj.output_scale",
        "model.layers.0.self_attn.v_proj.output_scale",
        "model.layers.1.self_attn.kv_scale",
        "model.layers.2.self_attn.k_proj.k_scale",
        "model.layers.2.self_attn.v_proj.v_scale",
        "backbone.layers.3.mixer.k_proj.k_scale",
        "backbone.layers.3.mixer.v_proj.v_scale",
        "model.layers.4.self_attn.k_cache.scale",
        "model.layers.4.self_attn.v_cache.scale",
        "model.layers.5.self_attn.k_proj.weight_scale",
    )
    declared = checkpoint({"quant_method": "fp8"}, tensors, num_hidden_layers=6)
    assert sorted(declared.scales.k) == sorted(declared.scales.v) == [0, 1, 2, 3, 4]
    assert declared.scales.k[1] == declared.scales.v[1]
    assert declared.scales.missing_layers == ("model.layers.5 (k, v)",)
    assert declared.scales.tensors == 9


def test_27_the_q_warning_says_nothing_about_k_and_v():
    (claim,) = said(Q_WARNING)["scales_warning"]
    assert claim.value == "q scale absent"
    assert "nothing about k and v" in claim.note
    effective = Effective(dtype="fp8_e4m3", confidence=Confidence.PROVEN, scales=ScaleState.CHECKPOINT)
    assert after(CALIBRATED, effective)["kv_scales"].result is CheckResult.PASS


def test_32_ones_everywhere_are_declared_and_not_missing():
    declared = by_modelopt("0.11.0", scales(range(4), k=1.0, v=1.0, name="model.layers.{0}.self_attn.{1}_proj.{1}_scale"))
    assert declared.scales.state is ScaleState.UNIT_DECLARED
    assert declared.scales.missing_layers == ()
    assert any("intends" in finding for finding in declared.findings)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"type": "int"}, "type 'int'"),
        ({"strategy": "channel"}, "strategy"),
        ({"symmetric": False}, "symmetric"),
    ],
)
def test_33_schemes_that_vllm_refuses(change, field):
    declared = checkpoint(compressed_tensors(**change))
    found = on("0.32.0", declared)
    assert found.fails
    assert field in found.reason


def test_33_before_0_24_0_int_is_not_looked_at():
    found = on("0.20.2", checkpoint(compressed_tensors(type="int")))
    assert (found.dtype, found.fails) == ("fp8_e4m3", False)
    assert "type 'int' is not looked at" in found.reason


def test_33_a_scale_for_each_head():
    tensors = {f"model.layers.{n}.self_attn.{side}_scale": f32(0.1, 0.2) for n in range(4) for side in "kv"}
    declared = checkpoint(compressed_tensors(strategy="attn_head"), tensors)
    assert declared.scales.per_head
    assert on("0.16.0", declared).scales is ScaleState.CHECKPOINT
    assert on("0.14.1", declared).fails
    # Other methods load one number a layer.
    other = on("0.32.0", checkpoint({"quant_method": "fp8"}, tensors), "fp8")
    assert other.scales is ScaleState.UNKNOWN
    assert "one number" in other.reason


def test_35_scales_and_quality_are_separate_verdicts():
    """Present scales pass the scale check whatever they do to quality, which shadow probes measure beside it."""
    declared = checkpoint(compressed_tensors(), scales(range(4), k=0.0001, v=0.0001))
    effective = Effective(
        dtype="fp8_e4m3",
        confidence=Confidence.PROVEN,
        scales=ScaleState.CHECKPOINT,
        scales_confidence=Confidence.PROVEN,
    )
    checks = after(CALIBRATED, effective, declared)
    assert checks["kv_scales"].result is CheckResult.PASS
    assert not any("quality" in name for name in checks)


def test_37_compressed_tensors_is_silent_about_missing_scales():
    declared = checkpoint({**compressed_tensors(), "config_groups": {}})
    assert on("0.32.0", declared).scales is ScaleState.UNIT_DEFAULT
    assert any("prints no warning" in finding for finding in declared.findings)
    assert before(CALIBRATED, declared)["kv_scales"].result is CheckResult.FAIL
    # An empty log does not make it pass.
    log = "(EngineCore pid=7) INFO 08-09 10:11:12 [kv_cache_utils.py:3] CPU KV cache size: 1,048,576 tokens, Maximum x\n"
    assert seen(log, declared=declared, version="0.32.0").scales is ScaleState.UNKNOWN


def test_38_mistrals_own_names():
    tensors = named(
        "layers.0.attention.k_fake_quantizer.qscale_act",
        "layers.0.attention.v_fake_quantizer.qscale_act",
        "layers.0.attention.wq.qscale_act",
        "vision_encoder.transformer.layers.0.attention.k_fake_quantizer.qscale_act",
    )
    declared = checkpoint({"quant_method": "fp8"}, tensors, num_hidden_layers=1)
    assert (declared.scales.tensors, declared.scales.missing_layers) == (2, ())
    assert on("0.32.0", declared, "fp8").scales is ScaleState.CHECKPOINT
    # Where the mapping was not read, nothing is said.
    assert on("0.20.2", declared, "fp8").scales is ScaleState.UNKNOWN


def test_42_scale_one_has_no_fixed_severity():
    declared = checkpoint()
    for rule in ("any", "unit"):
        check = before(f"kv_cache: {{dtype: fp8_e4m3, scales: {rule}}}", declared, "--kv-cache-dtype", "fp8")["kv_scales"]
        assert check.result is CheckResult.PASS
    assert allows_scales(policy("kv_cache: {scales: unit}"), ScaleState.UNIT_DEFAULT)


def test_84_a_fragile_architecture_is_a_caution_and_no_failure():
    qwen = checkpoint(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    found = on("0.32.0", qwen, "fp8")
    assert found.scales is ScaleState.UNIT_DEFAULT
    (caution,) = cautions("0.32.0", found.dtype, found.scales.value, architecture=qwen.architecture, mla=False)
    assert caution.id == "fragile_at_unit_scale"
    assert "QwenLM/Qwen3#840" in caution.source
    assert cautions("0.32.0", found.dtype, "checkpoint", architecture=qwen.architecture, mla=False) == ()
    assert cautions("0.32.0", found.dtype, "unit_default", architecture="LlamaForCausalLM", mla=False) == ()
    assert before("kv_cache: {dtype: fp8}", qwen, "--kv-cache-dtype", "fp8")["kv_scales"].result is CheckResult.PASS
