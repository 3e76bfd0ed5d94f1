import pytest

from kvguard.facts.scale_names import form_is_recognised, host_copy_stays_one, owns_kv_scales, scale_name


@pytest.mark.parametrize(
    ("name", "layer", "part", "form"),
    [
        ("model.layers.0.self_attn.k_proj.output_scale", 0, "k", "output_scale"),
        ("model.layers.0.self_attn.v_proj.output_scale", 0, "v", "output_scale"),
        ("model.layers.1.self_attn.kv_scale", 1, "kv", "kv_scale"),
        ("model.layers.2.self_attn.k_proj.k_scale", 2, "k", "proj"),
        ("model.layers.2.self_attn.v_proj.v_scale", 2, "v", "proj"),
        ("backbone.layers.3.mixer.k_proj.k_scale", 3, "k", "mixer"),
        ("model.layers.4.self_attn.k_cache.scale", 4, "k", "cache"),
        ("model.layers.4.self_attn.v_cache.scale", 4, "v", "cache"),
        ("model.layers.29.self_attn.k_scale", 29, "k", "plain"),
        ("model.language_model.layers.3.self_attn.v_scale", 3, "v", "plain"),
        ("model.layers.3.self_attn.attn.v_scale", 3, "v", "plain"),
        ("model.layers.3.self_attn.qkv_proj.v_scale", 3, "v", "qkv_proj"),
        ("layers.0.attention.k_fake_quantizer.qscale_act", 0, "k", "mistral"),
        ("layers.0.attention.v_fake_quantizer.qscale_act", 0, "v", "mistral"),
        ("model.layers.3.self_attn.q_scale", 3, "q", "query"),
    ],
)
def test_kv_scale_names(name, layer, part, form):
    found = scale_name(name)
    assert (found.layer, found.part, found.form) == (layer, part, form)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.5.self_attn.k_proj.weight_scale",
        "model.layers.5.self_attn.k_proj.input_scale",
        "layers.0.attention.wq.qscale_act",
        "vision_encoder.transformer.layers.0.attention.k_fake_quantizer.qscale_act",
        "model.visual.blocks.0.attn.k_scale",
        "mtp.layers.0.self_attn.k_scale",
        "model.layers.5.mlp.gate_proj.weight",
        "self_attn.k_scale",
        "",
    ],
)
def test_names_that_are_no_kv_scale(name):
    assert scale_name(name) is None


def test_output_scales_are_compressed_tensors_only_until_0_14_1():
    assert form_is_recognised("0.14.1", "output_scale", "compressed-tensors")
    assert not form_is_recognised("0.15.0", "output_scale", "compressed-tensors")
    assert form_is_recognised("0.32.0", "output_scale", "quark")
    assert not form_is_recognised("0.32.0", "output_scale", "modelopt")


def test_who_owns_kv_scales():
    def owns(version, method, mla=False, declared=True):
        return owns_kv_scales(version, method, mla=mla, algorithm_declared=declared)

    assert owns("0.32.0", "compressed-tensors", declared=False)
    assert owns("0.32.0", "fp8")
    assert not owns("0.32.0", None)
    assert not owns("0.32.0", "gptq")
    assert not owns("0.32.0", "compressed-tensors", mla=True)
    assert owns("0.32.0", "modelopt", mla=True)
    assert not owns("0.13.0", "modelopt", mla=True)
    assert not owns("0.32.0", "modelopt_mixed", declared=False)
    assert not owns("0.16.0", "modelopt_mixed")


def test_host_copies_that_stay_at_one():
    assert host_copy_stays_one("0.19.1", "compressed-tensors")
    assert host_copy_stays_one("0.20.0", "compressed-tensors") is None
    assert host_copy_stays_one("0.19.1", "modelopt") is None
