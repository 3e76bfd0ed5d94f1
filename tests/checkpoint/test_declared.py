import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_fakes import COMPRESSED_TENSORS, MODELOPT, SCHEME, SMOLLM2, f32, files, refusal, scales
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.models import CheckpointFiles
from kvguard.vocabulary import ScaleState, Source, Stage, UsageError

SIDECAR = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}


def test_a_plain_checkpoint_declares_nothing():
    found = declare(files(SMOLLM2))
    assert (found.architecture, found.model_type, found.model_dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (found.quant_method, found.kv_scheme, found.quantization) == (None, None, None)
    assert found.scales.state is ScaleState.UNIT_DEFAULT
    assert found.max_position_embeddings == 8192
    assert found.findings == ()


def test_a_compressed_tensors_scheme():
    found = declare(files({**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(30))))
    scheme = found.kv_scheme
    assert (scheme.producer, scheme.num_bits, scheme.type) == ("compressed-tensors", 8, "float")
    assert (scheme.strategy, scheme.dynamic, scheme.symmetric) == ("tensor", False, True)
    assert scheme.where == "config.json: quantization_config.kv_cache_scheme"
    assert found.scales.state is ScaleState.CHECKPOINT
    assert found.scales.tensors == 60
    assert found.scales.k[29] == pytest.approx((0.05,))
    assert found.scales.files == ("model.safetensors",)
    assert found.findings == ()
    declared = {claim.field: (claim.source, claim.value) for claim in found.claims}
    assert declared["kv_cache_scheme"] == (Source.CONFIG_JSON, SCHEME)
    assert declared["scales"] == (Source.SCALE_TENSORS, "checkpoint")
    assert {claim.stage for claim in found.claims} == {Stage.DECLARED}


def test_a_scheme_without_scale_tensors_is_a_finding():
    found = declare(files({**SMOLLM2, **COMPRESSED_TENSORS}))
    assert found.scales.state is ScaleState.UNIT_DEFAULT
    assert any("scale 1.0 is used, and vLLM prints no warning" in finding for finding in found.findings)


@pytest.mark.parametrize("block", [{"quant_method": "compressed-tensors", "kv_cache_scheme": None}, {}])
def test_a_null_scheme_and_none_are_the_same(block):
    found = declare(files({**SMOLLM2, "quantization_config": block}))
    assert found.kv_scheme is None


@pytest.mark.parametrize(
    ("config", "sidecar", "method", "raw", "where"),
    [
        (MODELOPT, None, "modelopt", MODELOPT["quantization_config"]["kv_cache_scheme"], "config.json"),
        ({}, SIDECAR, "modelopt", "FP8", "hf_quant_config.json: quantization.kv_cache_quant_algo"),
        (
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}},
            None,
            "modelopt",
            "NVFP4",
            "config.json: quantization_config.kv_cache_quant_algo",
        ),
        (
            {"quantization_config": {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj"]}}},
            None,
            "quark",
            ["*k_proj"],
            "config.json: quantization_config.export.kv_cache_group",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}},
            None,
            "fp8",
            "static",
            "config.json: quantization_config.kv_cache_scheme",
        ),
        (
            {"compression_config": {"quant_method": "Compressed_Tensors", "kv_cache_scheme": SCHEME}},
            None,
            "compressed-tensors",
            SCHEME,
            "config.json: compression_config.kv_cache_scheme",
        ),
        (
            {"text_config": {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}}},
            None,
            "compressed-tensors",
            SCHEME,
            "config.json: text_config.quantization_config.kv_cache_scheme",
        ),
    ],
)
def test_where_a_declaration_may_be(config, sidecar, method, raw, where):
    found = declare(files({**SMOLLM2, **config}, sidecar=sidecar))
    assert found.quant_method == method
    assert found.kv_scheme.raw == raw
    assert found.kv_scheme.where.startswith(where)


def test_the_sidecar_counts_only_without_a_quantization_config():
    found = declare(files({**SMOLLM2, "quantization_config": {"quant_method": "gptq"}}, sidecar=SIDECAR))
    assert found.kv_scheme is None
    assert any(finding.startswith("hf_quant_config.json: not read") for finding in found.findings)


def test_a_missing_quant_method_is_a_finding():
    block = {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt", "version": "0.31.0"}}
    found = declare(files({**SMOLLM2, "quantization_config": block}))
    assert found.quant_method is None
    assert (found.kv_scheme.producer, found.kv_scheme.raw) == ("modelopt", "FP8")
    assert any("no quant_method" in finding for finding in found.findings)


def test_a_modelopt_scheme_must_say_that_it_is_not_dynamic():
    block = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert any('"dynamic": false' in text for text in declare(files({**SMOLLM2, "quantization_config": block})).findings)


@pytest.mark.parametrize("key", ["kv_cache_dtype", "cache_dtype", "kv_cache_scheme"])
def test_keys_that_vllm_does_not_read_are_findings(key):
    found = declare(files({**SMOLLM2, key: "fp8"}))
    assert found.kv_scheme is None
    assert found.findings == (f"config.json: {key}='fp8' is ignored by vLLM: it does not read that key",)


def test_the_dtype_key_replaces_torch_dtype():
    found = declare(files({**SMOLLM2, "dtype": "float16"}))
    assert found.model_dtype == "float16"
    assert any("differ" in finding for finding in found.findings)
    assert declare(files({**SMOLLM2, "torch_dtype": "torch.half"})).model_dtype == "float16"
    assert declare(files({**SMOLLM2, "torch_dtype": None})).model_dtype is None


def test_partial_scales_name_the_layers():
    tensors = dict(scales(range(30)))
    del tensors["model.layers.2.self_attn.v_scale"]
    del tensors["model.layers.3.self_attn.k_scale"], tensors["model.layers.3.self_attn.v_scale"]
    found = declare(files({**SMOLLM2, **COMPRESSED_TENSORS}, tensors))
    assert found.scales.state is ScaleState.PARTIAL
    assert found.scales.missing_layers == ("model.layers.2 (v)", "model.layers.3 (k, v)")
    assert any("model.layers.3 (k, v)" in finding for finding in found.findings)


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (f32(math.nan), "(k = nan)"),
        (f32(math.inf), "(k = inf)"),
        (f32(0.0), "(k = 0)"),
        (f32(-0.5), "(k = -0.5)"),
        (f32(0.1, 0.0), "(k = 0)"),
        (("I32", [1], b"\1\0\0\0"), "(k has dtype I32 and shape [1]"),
        (("F32", [0], b""), "(k has dtype F32 and shape [0]"),
        (("F32", [20000], b"\0" * 80000), "(k has shape [20000]"),
    ],
)
def test_invalid_scales_name_layer_and_value(tensor, shown):
    tensors = {**scales(range(30)), "model.layers.4.self_attn.k_scale": tensor}
    found = declare(files({**SMOLLM2, **COMPRESSED_TENSORS}, tensors))
    assert found.scales.state is ScaleState.INVALID
    assert len(found.scales.invalid_layers) == 1
    assert found.scales.invalid_layers[0].startswith(f"model.layers.4 {shown}")


def test_scales_that_are_all_one_are_unit_declared_and_one_that_is_not_is_enough():
    ones = scales(range(30), k=1.0, v=1.0)
    assert declare(files({**SMOLLM2, **MODELOPT}, ones)).scales.state is ScaleState.UNIT_DECLARED
    ones = {**ones, "model.layers.0.self_attn.k_scale": f32(0.5)}
    assert declare(files({**SMOLLM2, **MODELOPT}, ones)).scales.state is ScaleState.CHECKPOINT


def test_one_kv_scale_counts_for_both_sides():
    tensors = {f"model.layers.{layer}.self_attn.kv_scale": f32(0.04, shape=[]) for layer in range(30)}
    found = declare(files(SMOLLM2, tensors)).scales
    assert found.state is ScaleState.CHECKPOINT
    assert found.tensors == 30
    assert found.k == found.v
    assert found.forms == ("kv_scale",)


def test_a_hybrid_needs_scales_only_in_its_attention_layers():
    types = (["linear_attention"] * 3 + ["full_attention"]) * 2
    config = {**SMOLLM2, "num_hidden_layers": 8, "layer_types": types}
    name = "model.language_model.layers.{}.self_attn.{}_scale"
    found = declare(files({**config, **MODELOPT}, scales([3, 7], name=name))).scales
    assert found.state is ScaleState.CHECKPOINT
    half = declare(files({**config, **MODELOPT}, scales([3], name=name))).scales
    assert half.missing_layers == ("model.language_model.layers.7 (k, v)",)


def test_layers_the_model_does_not_have_are_left_out():
    found = declare(files({**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(31))))
    assert found.scales.tensors == 60
    assert any("layers 30 are not counted" in finding for finding in found.findings)
    draft_only = declare(files(SMOLLM2, scales([30])))
    assert draft_only.scales.state is ScaleState.UNIT_DEFAULT


def test_overrides_apply_after_the_files():
    checkpoint = files({**SMOLLM2, **COMPRESSED_TENSORS}, sidecar=SIDECAR)
    assert declare(checkpoint, {"quantization_config": None}).kv_scheme is None
    without = {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert declare(checkpoint, without).kv_scheme is None
    added = declare(files(SMOLLM2), COMPRESSED_TENSORS)
    assert added.kv_scheme.where == "--hf-overrides: quantization_config.kv_cache_scheme"
    merged = declare(files({"text_config": SMOLLM2}), {"text_config": {"num_hidden_layers": 2}})
    assert (merged.geometry.attention_layers, merged.geometry.kv_heads) == (2, 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "config.json: not valid JSON"),
        ("[]", "config.json: expected a JSON object, found a list"),
        ('{"a": NaN}', "config.json: not valid JSON: NaN"),
        ("[" * 100_000, "config.json: JSON nested too deeply"),
        ('{"quantization_config": []}', "config.json: quantization_config: expected an object"),
        ('{"quantization_config": {"quant_method": 8}}', "config.json: quantization_config.quant_method: expected"),
        ('{"quantization_config": {"producer": "modelopt"}}', "config.json: quantization_config.producer: expected"),
        (
            '{"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": "FP8"}}',
            'config.json: quantization_config.kv_cache_scheme: expected an object, found "FP8"',
        ),
        ('{"dtype": 16}', "config.json: dtype: expected a string, found 16"),
        ('{"architectures": "LlamaForCausalLM"}', "config.json: architectures: expected a list of strings"),
        ('{"model_type": "\\ud800"}', "config.json: not valid JSON"),
    ],
)
def test_bad_input_names_file_and_key(config, message):
    with pytest.raises(UsageError) as error:
        declare(CheckpointFiles(directory="/m", config_json=config.encode()))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_missing_or_oversized_config_is_refused():
    with pytest.raises(UsageError, match=r"/m: no config\.json"):
        declare(CheckpointFiles(directory="/m", config_json=None))
    with pytest.raises(UsageError, match="more than the 8388608"):
        declare(CheckpointFiles(directory="/m", config_json=b" " * (9 << 20)))


def test_a_bad_sidecar_names_itself():
    with pytest.raises(UsageError, match=r"hf_quant_config\.json: expected a JSON object"):
        declare(files(SMOLLM2, sidecar=[1]))


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=12) | st.just("modelopt"),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=6), below, max_size=3),
    max_leaves=8,
)
KEYS = [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "layer_types",
    "sliding_window",
    "dtype",
    "torch_dtype",
    "model_type",
    "architectures",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "max_position_embeddings",
    "kv_cache_dtype",
    "index_topk",
    "multi_query",
    "num_kv_shared_layers",
    "v_head_dim",
    "is_encoder_decoder",
    "use_sliding_window",
]
BLOCK = st.fixed_dictionaries(
    {},
    optional={
        key: VALUE | st.sampled_from(["compressed-tensors", "modelopt", "quark", "fp8", "FP8", SCHEME])
        for key in [
            "quant_method",
            "kv_cache_scheme",
            "kv_cache_quant_algo",
            "quantization",
            "producer",
            "export",
            "quant_algo",
            "kv_cache_dtype",
        ]
    },
)
CONFIG = st.fixed_dictionaries(
    {},
    optional={
        **{key: VALUE | st.integers(0, 9) for key in KEYS},
        "quantization_config": BLOCK | VALUE,
        "compression_config": BLOCK | VALUE,
        "text_config": st.fixed_dictionaries({"quantization_config": BLOCK | VALUE}) | VALUE,
    },
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIG | VALUE, st.none() | BLOCK | VALUE, st.none() | st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=2))
def test_no_configuration_escapes_as_another_error(config, sidecar, overrides):
    checkpoint = files({}, scales(range(2))).model_copy(
        update={
            "config_json": json.dumps(config).encode(),
            "hf_quant_config_json": None if sidecar is None else json.dumps(sidecar).encode(),
        }
    )
    message = refusal(lambda: declare(checkpoint, overrides))
    assert "\n" not in message
    if not message:
        found = declare(checkpoint, overrides)
        assert all("\n" not in finding for finding in found.findings)
        found.model_dump_json()


@given(st.binary(max_size=100))
def test_no_bytes_escape_as_another_error(data):
    message = refusal(lambda: declare(CheckpointFiles(directory="/m", config_json=data)))
    assert message.startswith("config.json") or not message


@pytest.mark.parametrize(
    "overrides", [{"model_type": "\ud800"}, {"head_dim": math.nan}, {"text_config": 1}, {"num_hidden_layers": "x"}]
)
def test_bad_overrides_are_usage_errors(overrides):
    with pytest.raises(UsageError):
        declare(files({**SMOLLM2, "text_config": {}}), overrides)
