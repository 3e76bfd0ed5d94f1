import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, MODELOPT, SCHEME, SMOLLM2, f32, files, scales
from kvguard.checkpoint.declared import declare
from kvguard.evidence.prediction import predict
from kvguard.facts.versions import EXAMINED
from kvguard.vocabulary import ScaleState, Source, Stage

ALL = scales(range(30))
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def model(config=None, tensors=None, sidecar=None, base=SMOLLM2):
    return declare(files({**base, **(config or {})}, tensors, sidecar))


PLAIN = model()
CT = model(COMPRESSED_TENSORS, ALL)
MO = model(MODELOPT, ALL)


def answer(version, requested, declared, **more):
    found = predict(version, requested, declared, **more)
    return found.dtype, found.scales.value


# The table of what was launched on a real 0.32.0, and what ran.
@pytest.mark.parametrize(
    ("declared", "requested", "dtype", "state"),
    [
        (PLAIN, None, "bfloat16", "not_quantized"),
        (CT, None, "fp8_e4m3", "checkpoint"),
        (model(COMPRESSED_TENSORS), None, "fp8_e4m3", "unit_default"),
        (MO, None, "fp8_e4m3", "checkpoint"),
        (model({"kv_cache_dtype": "fp8"}), None, "bfloat16", "not_quantized"),
        (PLAIN, "fp8_e4m3", "fp8_e4m3", "unit_default"),
    ],
)
def test_what_ran_on_0_32_0_is_predicted(declared, requested, dtype, state):
    assert answer("0.32.0", requested, declared) == (dtype, state)
    assert answer("0.32.0+cpu", requested, declared) == (dtype, state)


@pytest.mark.parametrize(
    ("version", "typed_nothing", "typed_bfloat16"),
    [
        ("0.10.2", "bfloat16", "unknown"),
        ("0.14.1", "bfloat16", "unknown"),
        ("0.15.0", "fp8_e4m3", "fp8_e4m3"),
        ("0.16.0", "fp8_e4m3", "fp8_e4m3"),
        ("0.21.0", "fp8_e4m3", "fp8_e4m3"),
        ("0.22.0", "fp8_e4m3", "bfloat16"),
        ("0.32.0", "fp8_e4m3", "bfloat16"),
    ],
)
def test_a_compressed_tensors_scheme_by_version(version, typed_nothing, typed_bfloat16):
    assert predict(version, None, CT).dtype == typed_nothing
    assert predict(version, "bfloat16", CT).dtype == typed_bfloat16


def test_an_explicit_value_that_is_overridden_says_so():
    found = predict("0.20.2", "bfloat16", CT)
    assert found.explicit_honoured is False
    assert "quantization_config.kv_cache_scheme" in found.reason
    assert predict("0.20.2", "fp8", CT).explicit_honoured is True
    assert predict("0.22.0", "bfloat16", CT).explicit_honoured is True
    assert predict("0.22.0", None, CT).explicit_honoured is None
    assert predict("0.22.0", "auto", CT).explicit_honoured is None


@pytest.mark.parametrize(("version", "dtype"), [("0.13.0", "bfloat16"), ("0.14.0", "fp8_e4m3"), ("0.32.0", "fp8_e4m3")])
def test_modelopt_by_version(version, dtype):
    assert predict(version, None, MO).dtype == dtype
    assert predict("0.32.0", "bfloat16", MO).dtype == "bfloat16"


def test_the_modelopt_object_needs_dynamic_false():
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    found = predict("0.32.0", None, model({"quantization_config": block}))
    assert found.dtype == "bfloat16"
    assert '"dynamic": false' in found.reason


def test_a_missing_quant_method_leaves_auto():
    block = {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt"}}
    found = predict("0.32.0", None, model({"quantization_config": block}))
    assert found.dtype == "bfloat16"
    assert "without quant_method" in found.reason


SIDECAR = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def test_the_sidecar():
    declared = model(None, ALL, SIDECAR)
    assert answer("0.32.0", None, declared) == ("fp8_e4m3", "checkpoint")
    assert predict("0.9.2", None, declared).dtype == "bfloat16"
    assert "not read by this version" in predict("0.9.2", None, declared).reason


def test_a_modelopt_algorithm_vllm_does_not_know_fails():
    found = predict("0.32.0", None, model(sidecar={**SIDECAR, "quantization": {"quant_algo": "MYSTERY"}}))
    assert found.fails
    assert "MYSTERY" in found.reason


def test_nvfp4_from_modelopt():
    declared = model({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}})
    assert predict("0.18.0", None, declared).dtype == "bfloat16"
    assert answer("0.24.0", None, declared) == ("nvfp4", "runtime_dynamic")
    assert predict("0.20.2", None, declared).fails


@pytest.mark.parametrize("block", [{"quant_method": "quark", "kv_cache_scheme": "static"}, {"quant_method": "fp8"}])
def test_quark_and_native_fp8_need_an_explicit_value(block):
    declared = model({"quantization_config": block}, ALL)
    assert answer("0.32.0", None, declared) == ("bfloat16", "not_quantized")
    assert answer("0.32.0", "fp8", declared) == ("fp8_e4m3", "checkpoint")


@pytest.mark.parametrize("change", [{"type": "int"}, {"strategy": "channel"}, {"symmetric": False}])
def test_a_scheme_vllm_refuses_fails_and_names_the_field(change):
    block = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, **change}}
    found = predict("0.32.0", None, model({"quantization_config": block}))
    assert found.fails
    assert found.dtype == "unknown"
    assert next(iter(change)) in found.reason


def test_values_a_version_does_not_know():
    found = predict("0.18.1", "int8_per_token_head", PLAIN)
    assert (found.fails, found.explicit_honoured, found.dtype) == (True, False, "unknown")
    assert "0.20.0..0.32.0" in found.reason
    assert answer("0.20.2", "int8_per_token_head", PLAIN) == ("int8_per_token_head", "runtime_dynamic")
    assert "no examined version" in predict("0.32.0", "int8", PLAIN).reason


def test_a_version_that_was_not_examined_is_unknown():
    for version in ("0.33.0", "0.20.3", "nightly", ""):
        found = predict(version, "fp8", CT)
        assert (found.dtype, found.scales, found.explicit_honoured) == ("unknown", ScaleState.UNKNOWN, None)
        assert "0.8.5..0.32.0" in found.reason


def test_the_models_dtype():
    half = model({"torch_dtype": "float16"})
    assert predict("0.32.0", None, half).dtype == "float16"
    assert predict("0.32.0", None, half, model_dtype="bfloat16").dtype == "bfloat16"
    assert predict("0.32.0", None, half, model_dtype="auto").dtype == "float16"
    assert predict("0.32.0", None, half, model_dtype="half").dtype == "float16"
    assert predict("0.32.0", None, model({"torch_dtype": "float32"})).dtype == "unknown"
    assert predict("0.32.0", None, model({"torch_dtype": "float32"}), model_dtype="float32").dtype == "float32"
    assert predict("0.32.0", None, model({"torch_dtype": None})).dtype == "unknown"


def test_a_16_bit_cache_unlike_the_model_is_said_to_be_nonsense():
    found = predict("0.32.0", "float16", PLAIN)
    assert found.dtype == "float16"
    assert "nonsense" in found.reason
    assert "nonsense" not in predict("0.32.0", "float16", PLAIN, model_dtype="float16").reason


def test_scales_follow_the_quantization_method():
    assert answer("0.24.0", "fp8", model(None, ALL)) == ("fp8_e4m3", "unit_default")
    assert answer("0.24.0", "fp8", model({"quantization_config": {"quant_method": "gptq"}}, ALL))[1] == "unit_default"


def test_scale_tensors_without_a_quantization_config_stop_the_loader_from_0_25_0():
    declared = model(None, ALL)
    assert "refuses to load" not in predict("0.24.0", "fp8", declared).reason
    for requested in ("fp8", None):
        assert "refuses to load" in predict("0.25.0", requested, declared).reason


def test_scale_states_of_the_files_carry_over():
    partial = {name: value for name, value in ALL.items() if "layers.3." not in name}
    broken = {**ALL, "model.layers.3.self_attn.k_scale": f32(0.0)}
    assert answer("0.32.0", None, model(COMPRESSED_TENSORS, partial))[1] == "partial"
    assert answer("0.32.0", None, model(COMPRESSED_TENSORS, broken))[1] == "invalid"
    assert answer("0.32.0", None, model(COMPRESSED_TENSORS, scales(range(30), k=1.0, v=1.0)))[1] == "unit_declared"
    assert answer("0.32.0", "bfloat16", model(COMPRESSED_TENSORS, broken)) == ("bfloat16", "not_quantized")


def test_names_a_version_does_not_recognise_are_not_loaded():
    tensors = {f"model.layers.{layer}.self_attn.{side}_proj.output_scale": f32(0.05) for layer in range(30) for side in "kv"}
    declared = model(COMPRESSED_TENSORS, tensors)
    assert answer("0.14.1", "fp8", declared)[1] == "checkpoint"
    assert answer("0.15.0", "fp8", declared)[1] == "unit_default"


def test_fp8_e5m2():
    bare = model({"quantization_config": {"quant_method": "compressed-tensors"}})
    assert predict("0.32.0", "fp8_e5m2", CT).fails
    assert predict("0.23.0", "fp8_e5m2", bare).fails
    assert predict("0.24.0", "fp8_e5m2", bare).dtype == "fp8_e5m2"
    assert predict("0.20.2", "fp8_e5m2", CT).dtype == "fp8_e4m3"
    assert predict("0.32.0", "fp8_e5m2", PLAIN).dtype == "fp8_e5m2"


def test_calculate_kv_scales():
    def scales_of(version, declared=PLAIN, **more):
        return predict(version, "fp8", declared, calculate_kv_scales=True, **more)

    assert scales_of("0.28.0").fails
    assert scales_of("0.27.1").scales is ScaleState.RUNTIME_ONCE
    assert "dummy" in scales_of("0.27.1").reason
    assert "first real batch" in scales_of("0.27.1", platform="cpu").reason
    assert scales_of("0.11.0").scales is ScaleState.UNKNOWN
    assert scales_of("0.20.2", CT).scales is ScaleState.CHECKPOINT
    assert scales_of("0.27.1", CT).scales is ScaleState.RUNTIME_ONCE
    assert predict("0.27.1", None, CT, calculate_kv_scales=True).scales is ScaleState.CHECKPOINT
    assert predict("0.27.1", None, PLAIN, calculate_kv_scales=True).scales is ScaleState.NOT_QUANTIZED


def test_the_cpu_platform():
    assert predict("0.20.2", "fp8", PLAIN, platform="cpu").dtype == "bfloat16"
    assert predict("0.20.2", "fp8", PLAIN, platform="cpu").explicit_honoured is False
    assert predict("0.20.2", "fp8", PLAIN).dtype == "fp8_e4m3"
    assert predict("0.21.0+cpu", "fp8", PLAIN).dtype == "fp8_e4m3"
    assert predict("0.11.0", "fp8_e4m3", PLAIN, platform="cpu").dtype == "fp8_e5m2"
    assert predict("0.12.0", "bfloat16", PLAIN, platform="cpu").dtype == "bfloat16"
    assert predict("0.32.0", "nvfp4", PLAIN, platform="cpu").dtype == "unknown"
    assert predict("0.20.2", None, CT, platform="cpu").fails


def test_mla_ignores_compressed_tensors_schemes():
    declared = model(COMPRESSED_TENSORS, scales(range(4)), base=DEEPSEEK)
    assert predict("0.32.0", None, declared).dtype == "bfloat16"
    assert "not applied to MLA" in predict("0.32.0", None, declared).reason
    assert answer("0.32.0", "fp8", declared) == ("fp8_e4m3", "unit_default")
    assert answer("0.32.0", None, model(MODELOPT, scales(range(4)), base=DEEPSEEK)) == ("fp8_e4m3", "checkpoint")
    assert predict("0.32.0", "fp8_ds_mla", PLAIN).fails


def test_models_with_rules_of_their_own():
    v32 = model({"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}, base=DEEPSEEK)
    assert answer("0.11.0", None, v32) == ("fp8_ds_mla", "runtime_dynamic")
    assert predict("0.12.0", None, v32).dtype == "bfloat16"
    assert predict("0.12.0", "fp8", v32).dtype == "fp8_ds_mla"
    assert predict("0.24.0", None, v32).dtype == "unknown"
    assert predict("0.20.0", "bfloat16", v32).dtype == "bfloat16"
    glm = model({"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}, base=DEEPSEEK)
    assert predict("0.32.0", None, glm).dtype == "unknown"
    assert predict("0.31.0", None, glm).dtype == "bfloat16"


def test_predictions_are_claims_with_their_reasons():
    found = predict("0.32.0", None, CT)
    assert {claim.field: claim.value for claim in found.claims} == {
        "kv_cache_dtype": "fp8_e4m3",
        "scales": "checkpoint",
    }
    assert all(claim.stage is Stage.PREDICTED and claim.source is Source.FACTS for claim in found.claims)
    assert any("attention.py" in source for source in found.sources)


def test_every_version_answers_every_value_for_every_kind_of_checkpoint():
    for version in EXAMINED:
        for declared in (PLAIN, CT, MO, model(base=DEEPSEEK)):
            for requested in (None, "bfloat16", "fp8", "fp8_e5m2", "nvfp4", "fp8_ds_mla", "turboquant_4bit_nc"):
                for platform in (None, "cpu"):
                    found = predict(version, requested, declared, platform=platform)
                    assert found.reason or requested
                    assert "\n" not in found.reason
                    assert not (found.fails and found.dtype != "unknown")
                    assert (found.scales is ScaleState.UNKNOWN) == (found.dtype == "unknown")


def test_a_query_scale_or_recurrent_layers_defeat_calculate_kv_scales():
    with_query = {**ALL, **{f"model.layers.{layer}.self_attn.q_scale": f32(0.1) for layer in range(30)}}
    block = {"quantization_config": {"quant_method": "fp8"}}
    found = predict("0.27.1", "fp8", model(block, with_query), calculate_kv_scales=True)
    assert found.scales is ScaleState.UNIT_DEFAULT
    assert "query scale" in found.reason
    hybrid = model({"mamba_d_state": 16})
    assert predict("0.27.1", "fp8", hybrid, calculate_kv_scales=True).scales is ScaleState.UNIT_DEFAULT
    assert predict("0.18.1", "fp8", hybrid, calculate_kv_scales=True).scales is ScaleState.RUNTIME_ONCE


def test_host_copies_that_stay_at_one_are_mentioned():
    assert "FlashInfer" in predict("0.19.1", None, CT).reason
    assert "FlashInfer" not in predict("0.20.0", None, CT).reason
