"""Mistral's own format: what params.json declares, and which files vLLM reads where both formats are there."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_fakes import SCHEME, SMOLLM2, f32, refusal, safetensors, write
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.mistral import adapt
from kvguard.engine.checkpoint_files import read_checkpoint
from kvguard.evidence.prediction import predict

PARAMS = {"dim": 512, "n_layers": 2, "head_dim": 64, "n_heads": 8, "n_kv_heads": 2, "hidden_dim": 1024, "vocab_size": 100}
FP8 = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}


def tensors(layers=(0, 1)):
    found = {"tok_embeddings.weight": ("BF16", [2, 2], b"\0" * 8)}
    for layer in layers:
        for side, value in (("k", 0.04), ("v", 0.02), ("q", 0.03)):
            found[f"layers.{layer}.attention.{side}_fake_quantizer.qscale_act"] = f32(value, shape=[])
        found[f"layers.{layer}.attention.wq.qscale_act"] = f32(0.01, shape=[])
        found[f"vision_encoder.transformer.layers.{layer}.attention.k_fake_quantizer.qscale_act"] = f32(0.5, shape=[])
    return found


def native(directory, params, content=None):
    (directory / "params.json").write_text(json.dumps(params))
    (directory / "consolidated.safetensors").write_bytes(safetensors(tensors() if content is None else content))
    return directory


def test_a_checkpoint_of_the_native_format_alone(tmp_path):
    declared = declare(read_checkpoint(str(native(tmp_path, {**PARAMS, "quantization": FP8}))))
    assert declared.architecture == "MistralForCausalLM"
    assert declared.quant_method == "fp8"
    assert declared.quantization.where == "params.json: quantization"
    geometry = declared.geometry
    assert (geometry.attention_layers, geometry.kv_heads, geometry.head_size) == (2, 2, 64)
    assert sorted(declared.scales.k) == sorted(declared.scales.v) == [0, 1]
    assert (declared.scales.tensors, declared.scales.query, declared.scales.missing_layers) == (4, True, ())
    assert declared.scales.k[0] == pytest.approx((0.04,))
    found = predict("0.32.0", "fp8", declared)
    assert (found.dtype, found.scales) == ("fp8_e4m3", "checkpoint")


def test_what_auto_becomes_is_the_dtype_of_the_tensors_when_it_is_one(tmp_path):
    one = {"w": ("BF16", [1], b"\0\0"), "fp8": ("F8_E4M3", [1], b"\0")}
    declared = declare(read_checkpoint(str(native(tmp_path, PARAMS, one))))
    assert declared.model_dtype == "bfloat16"
    assert predict("0.32.0", None, declared).dtype == "bfloat16"
    several = {**one, "x": f32(1.0)}
    assert declare(read_checkpoint(str(native(tmp_path, PARAMS, several)))).model_dtype is None


def test_compressed_tensors_in_params(tmp_path):
    block = {"quant_method": "compressed_tensors", "kv_cache_scheme": SCHEME}
    declared = declare(read_checkpoint(str(native(tmp_path, {**PARAMS, "quantization": block}))))
    assert declared.kv_scheme.producer == "compressed-tensors"
    assert predict("0.32.0", None, declared).dtype == "fp8_e4m3"


def test_both_formats_config_json_fills_in_what_params_lacks(tmp_path):
    write(tmp_path, {**SMOLLM2, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}})
    (tmp_path / "model.safetensors").write_bytes(b"not read, because the consolidated file is")
    files = read_checkpoint(str(native(tmp_path, {**PARAMS, "n_layers": 3})))
    assert [header.file for header in files.safetensors] == ["consolidated.safetensors"]
    declared = declare(files)
    assert declared.geometry.attention_layers == 3
    assert declared.model_dtype == "bfloat16"
    assert declared.kv_scheme is not None


@pytest.mark.parametrize(
    ("params", "config", "place"),
    [
        ({"n_layers": -1}, None, "params.json: n_layers: expected a whole number"),
        ({"n_kv_heads": "two"}, None, "params.json: n_kv_heads: expected a whole number"),
        ({"dim": [512], "head_dim": None}, None, "params.json: dim: expected a whole number"),
        ({"n_layers": 3, "sliding_window": [None, 64]}, None, "params.json: sliding_window: 2 entries for 3 layers"),
        ({}, {"v_head_dim": "64"}, "config.json: v_head_dim: expected a whole number"),
        ({"quantization": {"quant_method": "compressed-tensors", "kv_cache_scheme": "x"}}, None,
         "params.json: quantization.kv_cache_scheme: expected an object"),
        ({}, {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": "x"}},
         "config.json: quantization_config.kv_cache_scheme: expected an object"),
    ],
)  # fmt: skip
def test_an_error_names_the_file_and_the_key_that_stands_there(tmp_path, params, config, place):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    files = read_checkpoint(str(native(tmp_path, {**PARAMS, **params})))
    assert place in refusal(lambda: declare(files))


def test_a_declaration_is_placed_where_it_stands(tmp_path):
    block = {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}
    write(tmp_path, {**SMOLLM2, "quantization_config": block})
    inherited = declare(read_checkpoint(str(native(tmp_path, PARAMS))))
    assert inherited.kv_scheme.where == "config.json: quantization_config.kv_cache_scheme"
    own = declare(read_checkpoint(str(native(tmp_path, {**PARAMS, "quantization": block}))))
    assert own.kv_scheme.where == "params.json: quantization.kv_cache_scheme"


def test_an_override_is_named_as_one(tmp_path):
    write(tmp_path, SMOLLM2)
    files = read_checkpoint(str(tmp_path))
    assert "--hf-overrides: num_hidden_layers: expected" in refusal(lambda: declare(files, {"num_hidden_layers": "9"}))


def test_consolidated_weights_without_params_keep_config_json(tmp_path):
    write(tmp_path, SMOLLM2)
    (tmp_path / "consolidated.safetensors").write_bytes(safetensors({}))
    files = read_checkpoint(str(tmp_path))
    assert files.params_json is None
    assert [header.file for header in files.safetensors] == ["consolidated.safetensors"]


def test_its_own_index_counts(tmp_path):
    native(tmp_path, PARAMS)
    (tmp_path / "consolidated-2.safetensors").write_bytes(b"leftover, not in the index")
    index = {"weight_map": {"tok_embeddings.weight": "consolidated.safetensors"}}
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    assert [header.file for header in read_checkpoint(str(tmp_path)).safetensors] == ["consolidated.safetensors"]
    (tmp_path / "consolidated.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    assert "consolidated.safetensors.index.json" in refusal(lambda: read_checkpoint(str(tmp_path)))
    os.remove(tmp_path / "params.json")
    assert "no config.json" in refusal(lambda: read_checkpoint(str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"quantization": {"qformat_weight": "int8"}}, "qformat_weight fp8_e4m3 or quant_method compressed-tensors only"),
        ({"quantization": {**FP8, "qscheme_act": "CHANNEL"}}, "qscheme_act"),
        ({"quantization": "fp8"}, "expected an object"),
        ({"sliding_window": [1, 2]}, "one window size"),
    ],
)
def test_what_vllm_refuses(change, wrong):
    text = refusal(lambda: adapt({**PARAMS, **change}, {}))
    assert text.startswith("params.json: ")
    assert wrong in text


def test_windows_in_turn_become_layer_types():
    config = adapt({**PARAMS, "n_layers": 4, "sliding_window": [None, 128]}, {})
    assert config["layer_types"] == ["full_attention", "sliding_attention"] * 2
    assert config["sliding_window"] == 128
    assert adapt({**PARAMS, "sliding_window": 64}, {})["layer_types"] == ["sliding_attention"] * 2


def test_architectures():
    assert adapt({**PARAMS, "moe": {"num_experts": 8}}, {})["architectures"] == ["MixtralForCausalLM"]
    large = adapt({**PARAMS, "moe": {"num_shared_experts": 1}, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, {})
    assert (large["model_type"], large["architectures"]) == ("deepseek_v3", ["MistralLarge3ForCausalLM"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*PARAMS, "quantization", "sliding_window", "moe", "dtype"]), JSON))
def test_any_params_are_read_or_refused(params):
    text = refusal(lambda: adapt(params, {}))
    assert not text or text.startswith("params.json: ")
