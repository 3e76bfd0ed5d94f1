"""Scale tensors that are there, and of which nobody can say what an engine makes."""

from __future__ import annotations

import json

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, SCHEME, SMOLLM2, f32, files, scales, write
from kvguard.checkpoint.declared import declare
from kvguard.engine.checkpoint_files import read_checkpoint
from kvguard.evidence.prediction import predict
from kvguard.vocabulary import ScaleState


def test_a_number_of_values_that_no_loader_takes_is_invalid():
    """Three KV heads: one value, or three."""
    three, seven = f32(*[0.5] * 3), f32(*[0.5] * 7)
    name = "model.layers.3.self_attn.v_scale"
    assert declare(files(SMOLLM2, {**scales(range(30)), name: three})).scales.state is ScaleState.CHECKPOINT
    found = declare(files(SMOLLM2, {**scales(range(30)), name: seven})).scales
    assert (found.state, found.invalid_layers) == (ScaleState.INVALID, ("model.layers.3 (v has 7 values for 3 KV heads)",))


def test_a_scale_whose_inverse_is_infinite_is_invalid():
    found = declare(files(SMOLLM2, {**scales(range(30)), "model.layers.3.self_attn.v_scale": f32(1e-40)})).scales
    assert found.state is ScaleState.INVALID


def test_two_tensors_that_give_a_layer_different_values_are_told_and_nobody_knows_which_is_loaded():
    twice = {**scales(range(30)), "model.layers.7.self_attn.k_proj.k_scale": f32(9.0)}
    declared = declare(files({**SMOLLM2, **COMPRESSED_TENSORS}, twice))
    assert declared.scales.ambiguous == ("model.layers.7 (k)",)
    assert any("several tensors give model.layers.7 (k) differently" in finding for finding in declared.findings)
    found = predict("0.32.0", None, declared)
    assert found.scales is ScaleState.UNKNOWN
    assert "two values for model.layers.7 (k)" in found.reason
    same = {**scales(range(30)), "model.layers.7.self_attn.k_proj.k_scale": f32(0.05)}
    assert predict("0.32.0", None, declare(files({**SMOLLM2, **COMPRESSED_TENSORS}, same))).scales is ScaleState.CHECKPOINT


def test_a_scale_for_each_head_needs_the_strategy_that_says_so():
    heads = {name: f32(*[0.5] * 3) for name in scales(range(30))}
    assert predict("0.32.0", None, declare(files({**SMOLLM2, **COMPRESSED_TENSORS}, heads))).scales is ScaleState.UNKNOWN
    block = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}
    said = declare(files({**SMOLLM2, "quantization_config": block}, heads))
    assert predict("0.32.0", None, said).scales is ScaleState.CHECKPOINT


@pytest.mark.parametrize(
    ("more", "unseen"),
    [
        ({"pytorch_model__bin": b"x"}, "pytorch_model.bin: not safetensors"),
        ({"model__gguf": b"x"}, "model.gguf: not safetensors"),
    ],
)
def test_scales_in_files_whose_tensors_are_not_seen_are_unknown(tmp_path, more, unseen):
    owner = {"quantization_config": {"quant_method": "fp8"}}
    declared = declare(read_checkpoint(str(write(tmp_path, {**SMOLLM2, **owner}, **more))))
    assert declared.scales.state is ScaleState.UNKNOWN
    assert unseen in declared.scales.where
    assert predict("0.32.0", "fp8", declared).scales is ScaleState.UNKNOWN
    # Without a quantization method nobody loads them, whatever the files hold.
    plain = declared.model_copy(update={"quantization": None})
    assert predict("0.32.0", "fp8", plain).scales is ScaleState.UNIT_DEFAULT


def test_without_any_weights_nothing_is_known_of_scales(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, **COMPRESSED_TENSORS}))
    declared = declare(read_checkpoint(str(tmp_path)))
    assert declared.scales.state is ScaleState.UNKNOWN
    assert predict("0.32.0", None, declared).scales is ScaleState.UNKNOWN
    assert any("no weight files, which vLLM needs" in finding for finding in declared.findings)


def test_where_the_config_does_not_say_how_many_layers_there_are_completeness_is_unknown():
    config = {**SMOLLM2, **COMPRESSED_TENSORS, "num_hidden_layers": None}
    found = predict("0.32.0", None, declare(files(config, scales(range(15)))))
    assert found.scales is ScaleState.UNKNOWN
    assert "which layers need scales" in found.reason
