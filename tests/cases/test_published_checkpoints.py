"""Shapes of published checkpoints, and what `inspect` predicts for them on the versions where answers differ.

The configs are made here: the shapes that matter, not the files. `FRONT` is what the engine's own resolution returns
(its banner and metrics), `RUNS` what its layers run.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from checkpoint_fakes import scales, write
from kvguard.cli.inspect import inspect

VERSIONS = ("0.12.0", "0.14.1", "0.16.0", "0.20.2", "0.22.0", "0.32.0")

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
}
MLA = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
V32 = {**MLA, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 2048}
GLM5 = {**MLA, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "index_topk": 2048}
V4 = {**DENSE, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
NEMOTRON = {
    **DENSE,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M*-*",
}
QWEN35 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {**DENSE, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "dtype": "bfloat16", "text_config": MLA}

BLOCK_FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}
SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": SCHEME}}
CT = {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}
CT_SCHEME = {**SCHEME, "strategy": "tensor", "symmetric": True}
CT_KV = {"quantization_config": {**CT["quantization_config"], "kv_cache_scheme": CT_SCHEME}}
QUARK = {"quantization_config": {"quant_method": "quark", "kv_cache_scheme": "static"}}
PROJ = "model.layers.{0}.self_attn.{1}_proj.{1}_scale"


def sidecar(algorithm: str, version: str | None = "0.33.0") -> dict[str, Any]:
    producer = {} if version is None else {"producer": {"name": "modelopt", "version": version}}
    return {**producer, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


WIDE, FP8 = "bfloat16", "fp8_e4m3"
SIXTEEN = (WIDE,) * 6
FROM_0_14 = (WIDE, FP8, FP8, FP8, FP8, FP8)
FROM_0_15 = (WIDE, WIDE, FP8, FP8, FP8, FP8)

CHECKPOINTS: list[tuple[str, dict[str, Any], dict[str, Any] | None, tuple[str, ...]]] = [
    ("Llama-3.1 FP8, sidecar", DENSE, sidecar("FP8", "0.23.0"), FROM_0_14),
    ("Qwen3 NVFP4, sidecar", DENSE, sidecar("NVFP4"), FROM_0_14),
    ("DeepSeek-V3.1 NVFP4, sidecar", MLA, sidecar("NVFP4", "0.22.1.dev750"), FROM_0_14),
    ("GLM-5.1, MiniMax, Gemma-4 NVFP4, config", {**DENSE, **NVFP4}, sidecar("NVFP4", "0.45.0.dev44"), FROM_0_14),
    ("Kimi-K2.5 NVFP4, config", {**KIMI, **NVFP4}, None, FROM_0_14),
    (
        "Kimi-K2.5, an older snapshot",
        {
            **KIMI,
            "text_config": {**MLA, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}},
        },
        None,
        SIXTEEN,
    ),
    ("Nemotron-3 Nano NVFP4, sidecar", NEMOTRON, sidecar("NVFP4", "0.29.0"), FROM_0_14),
    ("Nemotron-3 Super FP8, a copy without producer", NEMOTRON, sidecar("FP8", None), SIXTEEN),
    ("Nemotron-3 Super FP8, with its producer", NEMOTRON, sidecar("FP8"), FROM_0_14),
    ("Qwen3.5 NVFP4, config", {**QWEN35, **NVFP4}, sidecar("NVFP4"), FROM_0_14),
    ("Qwen3 FP8, native", {**DENSE, **BLOCK_FP8}, None, SIXTEEN),
    ("DeepSeek-V3, Kimi-K2, native", {**MLA, **BLOCK_FP8}, None, SIXTEEN),
    ("MiniMax, MiMo, Step FP8, native", {**DENSE, **BLOCK_FP8, "architectures": ["MiniMaxM2ForCausalLM"]}, None, SIXTEEN),
    ("amd Llama FP8-KV, Quark", {**DENSE, **QUARK}, None, SIXTEEN),
    ("RedHatAI Llama-3 FP8-KV, AutoFP8", {**DENSE, "quantization_config": {"quant_method": "fp8"}}, None, SIXTEEN),
    ("llm-compressor FP8-KV", {**DENSE, **CT_KV}, None, FROM_0_15),
    ("RedHatAI FP8-Dynamic without a KV directive", {**DENSE, **CT}, None, SIXTEEN),
]

app = typer.Typer()
app.command()(inspect)


def inspected(directory: Any, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [str(directory), "--json", *arguments])
    assert result.exit_code == 0, result.exception
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def stored(tmp_path: Any, config: dict[str, Any], beside: Any = None, tensors: Any = None) -> Any:
    more = {} if beside is None else {"hf_quant_config__json": json.dumps(beside)}
    return write(tmp_path, config, tensors, **more)


@pytest.mark.parametrize(("name", "config", "beside", "runs"), CHECKPOINTS, ids=[row[0] for row in CHECKPOINTS])
def test_what_auto_becomes(tmp_path, name, config, beside, runs):
    directory = stored(tmp_path, config, beside)
    found = tuple(inspected(directory, "--engine-version", version)["prediction"]["dtype"] for version in VERSIONS)
    assert found == runs, name


@pytest.mark.parametrize(
    ("name", "config", "beside", "device", "runs", "front"),
    [
        ("DeepSeek-V3.2, native", {**V32, **BLOCK_FP8}, None, "h100", WIDE, "auto"),
        ("DeepSeek-V3.2, native", {**V32, **BLOCK_FP8}, None, "b200", WIDE, "auto"),
        ("DeepSeek-V3.2, native", {**V32, **BLOCK_FP8}, None, "rtx5090", "fp8_ds_mla", "auto"),
        ("DeepSeek-V3.2, native", {**V32, **BLOCK_FP8}, None, None, "unknown", "auto"),
        ("DeepSeek-V3.2 NVFP4", V32, sidecar("NVFP4"), "b200", FP8, FP8),
        ("DeepSeek-V3.2 NVFP4", V32, sidecar("NVFP4"), "h100", "fp8_ds_mla", FP8),
        ("DeepSeek-V3.2 NVFP4", V32, sidecar("NVFP4"), None, "unknown", FP8),
        ("GLM-5 NVFP4", GLM5, sidecar("NVFP4", "0.42.0rc1"), "b200", FP8, FP8),
        ("GLM-5 NVFP4", GLM5, sidecar("NVFP4", "0.42.0rc1"), None, "unknown", FP8),
        ("GLM-5 FP8, native", {**GLM5, **BLOCK_FP8}, None, "b200", FP8, FP8),
        ("GLM-5 FP8, native", {**GLM5, **BLOCK_FP8}, None, "h100", WIDE, "auto"),
        ("GLM-5 FP8, native", {**GLM5, **BLOCK_FP8}, None, None, "unknown", None),
        ("DeepSeek-V4, native", {**V4, **BLOCK_FP8}, None, "h100", "fp8_ds_mla", "auto"),
        ("DeepSeek-V4, native", {**V4, **BLOCK_FP8}, None, "rtx5090", "fp8_ds_mla", "auto"),
        ("DeepSeek-V4, native", {**V4, **BLOCK_FP8}, None, None, "unknown", "auto"),
        (
            "DeepSeek-V4-Flash NVFP4",
            {**V4, "quantization_config": {**BLOCK_FP8["quantization_config"], "kv_cache_quant_algo": None}},
            {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}},
            "b200",
            "fp8_ds_mla",
            "auto",
        ),
    ],
)
def test_where_0_32_0_needs_the_device(tmp_path, name, config, beside, device, runs, front):
    directory = stored(tmp_path, config, beside)
    options = ("--device", device) if device else ()
    prediction = inspected(directory, "--engine-version", "0.32.0", *options)["prediction"]
    assert (prediction["dtype"], prediction["echo"]) == (runs, front), name


@pytest.mark.parametrize(
    ("version", "device", "runs"),
    [
        ("0.12.0", None, WIDE),
        ("0.20.2", None, WIDE),
        ("0.22.0", "h100", WIDE),
        ("0.31.0", "b200", WIDE),
        ("0.32.0", "b200", FP8),
    ],
)
def test_glm_class_default_is_new_in_0_32_0(tmp_path, version, device, runs):
    directory = stored(tmp_path, {**GLM5, **BLOCK_FP8})
    options = ("--device", device) if device else ()
    assert inspected(directory, "--engine-version", version, *options)["prediction"]["dtype"] == runs


def test_a_bfloat16_request_for_deepseek_v3_2_is_shown_as_auto(tmp_path):
    directory = stored(tmp_path, {**V32, **BLOCK_FP8})
    options = ("--engine-version", "0.32.0", "--kv-cache-dtype", "bfloat16", "--device", "h100")
    prediction = inspected(directory, *options)["prediction"]
    assert (prediction["dtype"], prediction["echo"]) == (WIDE, "auto")


def test_deepseek_v3_2_by_version_under_fp8(tmp_path):
    directory = stored(tmp_path, {**V32, **BLOCK_FP8})

    def under_fp8(version: str, *options: str) -> str:
        answer = inspected(directory, "--engine-version", version, "--kv-cache-dtype", "fp8", *options)
        return str(answer["prediction"]["dtype"])

    assert [under_fp8(version) for version in ("0.12.0", "0.14.1", "0.16.0")] == ["fp8_ds_mla"] * 3
    assert [under_fp8(version) for version in ("0.20.2", "0.22.0", "0.32.0")] == ["unknown"] * 3
    assert [under_fp8(version, "--device", "h100") for version in ("0.20.2", "0.22.0", "0.32.0")] == ["fp8_ds_mla"] * 3
    assert under_fp8("0.32.0", "--device", "b200") == FP8
    assert under_fp8("0.22.0", "--device", "b200") == "unknown"


@pytest.mark.parametrize(
    ("name", "config", "beside", "tensors", "typed", "states"),
    [
        (
            "Llama-3.1 FP8",
            DENSE,
            sidecar("FP8"),
            scales([0, 1], 1.0, 1.0, PROJ),
            None,
            ("not_quantized", *["unit_declared"] * 5),
        ),
        ("Qwen3 NVFP4", DENSE, sidecar("NVFP4"), scales([0, 1], name=PROJ), None, ("not_quantized", *["checkpoint"] * 5)),
        (
            "Nemotron-3 Nano",
            NEMOTRON,
            sidecar("NVFP4"),
            scales([1, 3], name="backbone.layers.{0}.mixer.{1}_proj.{1}_scale"),
            None,
            ("not_quantized", *["checkpoint"] * 5),
        ),
        ("llm-compressor", {**DENSE, **CT_KV}, None, scales([0, 1]), None, (*["not_quantized"] * 2, *["checkpoint"] * 4)),
        (
            "AutoFP8, one scale for both",
            {**DENSE, "quantization_config": {"quant_method": "fp8"}},
            None,
            {name.replace(".k_scale", ".kv_scale"): value for name, value in scales([0, 1]).items() if ".k_" in name},
            "fp8",
            ("checkpoint",) * 6,
        ),
        (
            "Quark, output scales",
            {**DENSE, **QUARK},
            None,
            scales([0, 1], name="model.layers.{0}.self_attn.{1}_proj.output_scale"),
            "fp8",
            ("checkpoint",) * 6,
        ),
        (
            "Qwen3.5 NVFP4",
            {**QWEN35, **NVFP4},
            None,
            scales([1, 3], name="model.language_model.layers.{0}.self_attn.{1}_scale"),
            None,
            ("not_quantized", *["unknown"] * 5),
        ),
    ],
)
def test_scales_by_version(tmp_path, name, config, beside, tensors, typed, states):
    directory = stored(tmp_path, config, beside, tensors)
    options = ("--kv-cache-dtype", typed) if typed else ()
    found = [inspected(directory, "--engine-version", version, *options) for version in VERSIONS]
    assert tuple(report["prediction"]["scales"] for report in found) == states, name
    assert found[0]["scales"]["missing"] == []
