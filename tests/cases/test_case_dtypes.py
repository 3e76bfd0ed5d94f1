"""Cases about what the cache dtype becomes: auto, declarations, precedence, model classes and hardware."""

from __future__ import annotations

import json

import pytest

from case_fakes import (
    LLAMA,
    MODELOPT_SCHEME,
    after,
    before,
    checkpoint,
    compressed_tensors,
    modelopt,
    on,
    said,
    seen,
)
from checkpoint_fakes import files
from kvguard.checkpoint.declared import declare
from kvguard.engine.command import split_words
from kvguard.engine.resolve import resolve
from kvguard.reference.overlay import strip
from kvguard.vocabulary import CheckResult, Confidence, UsageError
from launches import command, policy

SIXTEEN = "kv_cache: {dtype: 16bit}"
FP8 = "kv_cache: {dtype: fp8_e4m3}"


def sidecar(version="0.39.0", **keys):
    return {"producer": {"name": "modelopt", "version": version}, "quantization": {"quant_algo": "NVFP4", **keys}}


def test_01_auto_becomes_fp8_because_the_sidecar_says_so():
    declared = checkpoint(sidecar=sidecar(kv_cache_quant_algo="FP8"))
    assert declared.kv_scheme.where == "hf_quant_config.json: quantization.kv_cache_quant_algo"
    assert on("0.14.1", declared).dtype == "fp8_e4m3"
    old = on("0.12.0", declared)
    assert old.dtype == "bfloat16"
    assert "for weights only" in old.reason
    assert before(FP8, declared, version="0.14.1")["kv_cache_dtype"].result is CheckResult.PASS
    # 16 bit cannot be typed on 0.14.1, and auto gives fp8: what is required cannot be had.
    assert before(SIXTEEN, declared, version="0.14.1")["kv_cache_dtype"].result is CheckResult.FAIL
    # What auto would have given is stated, so that no replica runs an fp8 cache that nobody typed.
    assert resolve(command(version="0.14.1"), "0.14.1", declared, None, {}).stated == "fp8_e4m3"
    line = "(EngineCore_DP0 pid=7) INFO 01-02 03:04:05 [core.py:9] Initializing a V1 LLM engine (v0.14.1) with config: "
    log = line + "model='m', dtype=torch.bfloat16, kv_cache_dtype=fp8_e4m3, device_config=cuda\n"
    echoed = seen(log, declared=declared, version="0.14.1")
    assert (echoed.dtype, echoed.confidence) == ("fp8_e4m3", Confidence.ECHOED)


@pytest.mark.parametrize(
    ("version", "runs", "honoured"),
    [
        ("0.16.0", "fp8_e4m3", False),
        ("0.18.1", "fp8_e4m3", False),
        ("0.19.1", "fp8_e4m3", False),
        ("0.20.2", "fp8_e4m3", False),
        ("0.22.1", "bfloat16", True),
        ("0.32.0", "bfloat16", True),
    ],
)
def test_02_a_compressed_tensors_scheme_over_an_explicit_bfloat16(version, runs, honoured):
    declared = checkpoint(compressed_tensors())
    found = on(version, declared, "bfloat16")
    assert (found.dtype, found.explicit_honoured) == (runs, honoured)
    if not honoured:
        assert "config.json: quantization_config.kv_cache_scheme" in found.reason
        assert found.echo == "bfloat16"


def test_02_on_0_14_1_the_scheme_is_ignored_and_auto_gives_16_bit():
    declared = checkpoint(compressed_tensors())
    assert on("0.14.1", declared).dtype == "bfloat16"
    # The value is accepted there and no backend lists it; under a policy for 16 bit it is replaced by auto.
    assert on("0.14.1", declared, "bfloat16").fails
    plan = resolve(command("--kv-cache-dtype", "bfloat16", version="0.14.1"), "0.14.1", declared, policy(SIXTEEN), {})
    assert (plan.target, plan.stated, plan.problem) == ("bfloat16", "auto", "")


def test_03_the_label_auto_is_no_information_and_the_bytes_are():
    declared = checkpoint(
        compressed_tensors(), num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4, head_dim=128
    )
    # 16-bit: 2·16·4·128·2 = 32,768 bytes a token; 5 GiB / 327,680 tokens = 16,384.
    log = (
        "(EngineCore_DP0 pid=7) INFO 02-03 04:05:06 [core.py:9] Initializing a V1 LLM engine (v0.16.0) with config: "
        "model='m', dtype=torch.bfloat16, kv_cache_dtype=auto, device_config=cuda\n"
        "(EngineCore_DP0 pid=7) INFO 02-03 04:05:07 [gpu_worker.py:3] Available KV cache memory: 5.00 GiB\n"
        "(EngineCore_DP0 pid=7) INFO 02-03 04:05:07 [kv_cache_utils.py:3] GPU KV cache size: 327,680 tokens\n"
    )
    page = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="20480"} 1.0\n'
    found = seen(log, page, declared=declared, version="0.16.0")
    assert (found.dtype, found.confidence, found.bytes_per_token) == ("fp8_e4m3", Confidence.CORROBORATED, 16_384)
    assert found.contradictions == ()
    label = next(claim for claim in said(page=page)["kv_cache_dtype"] if claim.source == "metrics")
    assert label.value is None
    assert "no information" in label.note
    assert on("0.16.0", declared).echo == "auto"
    assert after(SIXTEEN, found)["kv_cache_dtype"].result is CheckResult.FAIL


def test_05_float16_on_a_bfloat16_model_is_an_error_before_the_start():
    declared = checkpoint()
    check = before(None, declared, "--kv-cache-dtype", "float16")["sixteen_bit_type"]
    assert check.result is CheckResult.FAIL
    assert "--kv-cache-dtype bfloat16 or auto" in check.action
    assert "nonsense" in on("0.32.0", declared, "float16").reason
    assert "sixteen_bit_type" not in before(None, declared, "--kv-cache-dtype", "float16", "--dtype", "float16")
    assert "sixteen_bit_type" not in before(None, declared, "--kv-cache-dtype", "bfloat16")


def test_06_a_declaration_in_both_files_is_named_twice():
    sizes = {"head_dim": 64, "global_head_dim": 128}
    beside = sidecar("0.40.0", kv_cache_quant_algo="FP8")
    both = checkpoint(modelopt(kv_cache_scheme=MODELOPT_SCHEME), sidecar=beside, **sizes)
    assert both.kv_scheme.where == "config.json: quantization_config.kv_cache_scheme"
    assert [other.where for other in both.other_schemes] == ["hf_quant_config.json: quantization.kv_cache_quant_algo"]
    # One taken away, the other is still reported; vLLM itself looks at the sidecar only without quantization_config.
    left = checkpoint(modelopt(), sidecar=beside, **sizes)
    assert left.kv_scheme is None
    assert any("also declares a KV cache" in finding for finding in left.findings)
    assert on("0.32.0", checkpoint(sidecar=beside, **sizes), device="h100").dtype == "fp8_e4m3"
    # Mixed head sizes run on Triton there, which has no e4m3 below 8.9.
    failing = on("0.32.0", both, device="a100")
    assert failing.fails
    assert "8.9" in failing.reason
    unsaid = checkpoint(
        modelopt(kv_cache_scheme=MODELOPT_SCHEME), sidecar=beside, architectures=["Gemma4ForConditionalGeneration"]
    )
    assert on("0.32.0", unsaid, device="sm80").fails


def test_06_an_overlay_without_the_directive_has_it_in_neither_file():
    both = files(
        {**LLAMA, "quantization_config": modelopt(kv_cache_scheme=MODELOPT_SCHEME)},
        None,
        sidecar("0.40.0", kv_cache_quant_algo="FP8"),
    )
    overlay = strip(both, ["config.json", "hf_quant_config.json", "model.safetensors"])
    assert sorted(overlay.files) == ["config.json", "hf_quant_config.json"]
    assert overlay.links == ("model.safetensors",)
    config, beside = (json.loads(overlay.files[name]) for name in sorted(overlay.files))
    assert "kv_cache_scheme" not in config["quantization_config"]
    assert "kv_cache_quant_algo" not in beside["quantization"]
    bare = declare(
        both.model_copy(
            update={"config_json": overlay.files["config.json"], "hf_quant_config_json": overlay.files["hf_quant_config.json"]}
        )
    )
    assert (bare.kv_scheme, bare.other_schemes) == (None, ())
    assert on("0.32.0", bare, device="h100").dtype == "bfloat16"


def test_07_a_declaration_on_a_gpu_without_fp8():
    declared = checkpoint(compressed_tensors())
    for version in ("0.16.0", "0.32.0"):
        found = on(version, declared, device="sm75")
        assert found.fails
        assert "quantization_config.kv_cache_scheme" in found.reason
        assert "overlay" in found.reason
    # auto is not enough; an explicit 16-bit value is, from 0.22.0 on.
    assert on("0.32.0", declared, "auto", device="sm75").fails
    assert on("0.32.0", declared, "bfloat16", device="sm75").dtype == "bfloat16"
    assert on("0.16.0", declared, "bfloat16", device="sm75").fails


def test_10_null_or_absent_is_no_declaration():
    null = {"quant_method": "compressed-tensors", "kv_cache_scheme": None}
    for block in (null, {"quant_method": "compressed-tensors"}):
        declared = checkpoint(block)
        assert declared.kv_scheme is None
        assert declared.findings == ()
        assert on("0.32.0", declared).dtype == "bfloat16"
    # The same inside text_config, where multimodal checkpoints keep it.
    nested = checkpoint(text_config={"num_hidden_layers": 4, "quantization_config": null})
    assert nested.kv_scheme is None


@pytest.mark.parametrize(
    ("block", "beside"),
    [
        (None, {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}),
        (modelopt(quant_algo="FP8", kv_cache_quant_algo="FP8"), None),
        (modelopt(quant_algo="FP8", kv_cache_scheme="FP8"), None),
        (modelopt(kv_cache_scheme=MODELOPT_SCHEME), None),
        (compressed_tensors(), None),
    ],
)
def test_11_five_spellings_of_fp8(block, beside):
    declared = checkpoint(block, sidecar=beside)
    assert declared.kv_scheme is not None
    assert on("0.32.0", declared).dtype == "fp8_e4m3"


def test_11_a_sidecar_without_its_producer_is_declared_and_not_resolved():
    declared = checkpoint(sidecar={"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    assert declared.kv_scheme.raw == "FP8"
    assert on("0.32.0", declared).dtype == "bfloat16"


def test_11_nvfp4_by_version():
    declared = checkpoint(modelopt(kv_cache_quant_algo="NVFP4"))
    for version in ("0.14.1", "0.18.1"):
        found = on(version, declared)
        assert found.dtype == "bfloat16"
        assert "warns" in found.reason
    assert on("0.24.0", declared, device="b200").dtype == "nvfp4"
    assert on("0.32.0", declared, device="b200").dtype == "nvfp4"


def test_15_without_quant_method_the_resolver_does_not_look():
    block = {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt", "version": "0.31.0"}}
    declared = checkpoint(block)
    assert declared.kv_scheme.raw == "FP8"
    assert on("0.32.0", declared).dtype == "bfloat16"
    assert any("no quant_method" in finding for finding in declared.findings)


def test_18_a_model_class_decides_by_hardware():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    glm = checkpoint(fp8, architectures=["GlmMoeDsaForCausalLM"])
    assert on("0.32.0", glm, device="b200").dtype == "fp8_e4m3"
    assert on("0.32.0", glm, device="b200").echo == "fp8_e4m3"
    assert on("0.32.0", glm, device="h100").dtype == "bfloat16"
    unknown = on("0.32.0", glm)
    assert (unknown.dtype, unknown.echo) == ("unknown", None)
    assert on("0.31.0", glm, device="b200").dtype == "bfloat16"
    line = "(APIServer pid=7) INFO 08-09 10:11:12 [config.py:9] Using fp8 kv-cache for GlmMoeDsaForCausalLM on SM10x\n"
    assert [claim.value for claim in said(line)["kv_cache_dtype"]] == ["fp8_e4m3"]


def test_57_deepseek_v4_has_no_16_bit_cache():
    declared = checkpoint({"quant_method": "fp8", "weight_block_size": [128, 128]}, architectures=["DeepseekV4ForCausalLM"])
    assert on("0.32.0", declared).dtype == "unknown"
    assert on("0.32.0", declared, device="h100").dtype == "fp8_ds_mla"
    assert on("0.32.0", declared, device="h100").echo == "auto"


def test_98_another_engine_is_not_guarded():
    """TensorRT-LLM's own rules are no part of the facts: an engine that is not vLLM is refused as a command."""
    with pytest.raises(UsageError, match="vllm serve"):
        split_words(("trtllm-serve", "m"))
