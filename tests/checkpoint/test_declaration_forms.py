"""Every form in which files declare a KV cache, and what is said about forms that no vLLM takes."""

from __future__ import annotations

import pytest

from checkpoint_fakes import SCHEME, SMOLLM2, f32, files, scales
from kvguard.checkpoint.declared import declare
from kvguard.facts.cautions import cautions
from kvguard.facts.devices import find_device
from kvguard.facts.failures import known_failure
from kvguard.facts.producers import intended_scale
from kvguard.facts.versions import in_range, read_data

MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
SIDECAR = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}
QUARK_OUTPUT = {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor"}


def declared(block=None, sidecar=None, overrides=None, tensors=None, **config):
    extra = {} if block is None else {"quantization_config": block}
    return declare(files({**SMOLLM2, **config, **extra}, tensors, sidecar), overrides)


@pytest.mark.parametrize(
    ("block", "where"),
    [
        ({"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}, "export.kv_cache_group"),
        (
            {"quant_method": "quark", "layer_quant_config": {"*k_proj": {"output_tensors": QUARK_OUTPUT}}},
            "layer_quant_config.*k_proj.output_tensors",
        ),
        ({"quant_method": "quark", "kv_cache_scheme": "static"}, "kv_cache_scheme"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "quantization.kv_cache_quant_algo"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "fp8"}, "kv_cache_quant_algo"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_scheme"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, "kv_cache_scheme"),
    ],
)
def test_where_a_declaration_stands(block, where):
    assert declared(block).kv_scheme.where == f"config.json: quantization_config.{where}"


@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "quark"},
        {
            "quant_method": "quark",
            "layer_quant_config": {"*k_proj": {"output_tensors": None}, "*o_proj": {"output_tensors": QUARK_OUTPUT}},
        },
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "modelopt", "kv_cache_quant_algo": None},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
        {"quant_method": "gptq"},
    ],
)
def test_no_declaration(block):
    assert declared(block).kv_scheme is None


def test_the_sidecar_stands_behind_config_json():
    both = declared(MODELOPT, SIDECAR)
    assert both.kv_scheme.where == "config.json: quantization_config.kv_cache_scheme"
    (other,) = both.other_schemes
    assert other.where == "hf_quant_config.json: quantization.kv_cache_quant_algo"
    assert any(text.startswith(other.where) and "also declares" in text for text in both.findings)
    alone = declared(None, SIDECAR)
    assert alone.kv_scheme == other
    assert alone.other_schemes == ()


def test_a_nested_config_stands_behind_both():
    nested = {"num_hidden_layers": 30, "quantization_config": MODELOPT}
    found = declared(MODELOPT, SIDECAR, text_config=nested)
    assert [other.where for other in found.other_schemes] == [
        "hf_quant_config.json: quantization.kv_cache_quant_algo",
        "config.json: text_config.quantization_config.kv_cache_scheme",
    ]
    assert declared(text_config=nested).kv_scheme.where == "config.json: text_config.quantization_config.kv_cache_scheme"


def test_a_broken_block_that_is_not_taken_breaks_nothing():
    assert declared(MODELOPT, {"producer": 3, "quantization": {"kv_cache_quant_algo": "FP8"}}).other_schemes == ()


def test_overrides_take_a_declaration_away_and_bring_one():
    bare = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert declared(MODELOPT, overrides={"quantization_config": bare}).kv_scheme is None
    added = declared(overrides={"quantization_config": MODELOPT})
    assert added.kv_scheme.where == "--hf-overrides: quantization_config.kv_cache_scheme"


def test_producer_and_version_come_with_the_block():
    block = declared(None, SIDECAR).quantization
    assert (block.producer, block.producer_version) == ("modelopt", "0.33.0")
    assert intended_scale("modelopt", "0.33.0", "unit_declared")
    assert intended_scale("modelopt", "0.33.0", "unit_default") is None
    assert intended_scale("modelopt", "0.44.0", "unit_default")
    assert intended_scale("modelopt", None, "unit_default") is None
    assert intended_scale("llm-compressor", "0.44.0", "unit_default") is None


def test_one_scale_or_one_for_each_head():
    heads = {f"model.layers.{n}.self_attn.{side}_scale": f32(0.1, 0.2, 0.3) for n in range(30) for side in "kv"}
    assert declared(tensors=heads).scales.per_head
    assert not declared(tensors=scales(range(30))).scales.per_head
    assert not declared().scales.per_head


def test_nemotron_names_its_attention_layers_by_a_letter():
    found = declared(architectures=["NemotronHForCausalLM"], num_hidden_layers=5, hybrid_override_pattern="M*-E*")
    assert found.geometry.layer_indices == (1, 4)
    assert found.geometry.hybrid
    short = declared(num_hidden_layers=6, hybrid_override_pattern="M*-E*")
    assert short.geometry.layer_indices is None


@pytest.mark.parametrize(
    ("config", "trait"),
    [
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "deepseek_v4"),
        ({"model_type": "deepseek_v41"}, "deepseek_v41"),
        ({"head_dim": 64, "global_head_dim": 128}, "mixed_head_sizes"),
        ({"index_topk": 64, "kv_lora_rank": 512}, "sparse_mla"),
    ],
)
def test_traits(config, trait):
    assert trait in declared(**config).traits
    assert declared().traits == frozenset()


# --- facts that go with them ---


def test_cautions_fit_device_and_version():
    def ids(version, device=None, **more):
        found = {"architecture": "X", "mla": False, **more}
        return [c.id for c in cautions(version, "fp8_e4m3", "checkpoint", device=device and find_device(device), **found)]

    assert ids("0.16.0", "h100") == ["long_context_fa3"]
    assert ids("0.16.0", "h100", mla=True) == ["mla_fp8_turns", "long_context_fa3"]
    assert ids("0.32.0", "h100") == ids("0.16.0") == ids("0.33.0", "h100") == []


def test_every_failure_and_caution_has_a_way_out_and_a_source():
    for entry in read_data("failures")["failures"]:
        assert entry["do"]
        assert entry["source"]
    for entry in read_data("cautions")["cautions"]:
        in_range("0.32.0", entry["versions"])
        assert entry["source"]
    assert known_failure("ValueError: something else") is None
    assert known_failure("No valid attention backend found for cuda with x. Reasons: {}").id == "no_backend"
    assert (
        known_failure("There is no module or parameter named 'layers.0.self_attn.k_scale' in Llama").id
        == "scales_without_method"
    )
