import pytest

from kvguard.facts.kv_dtypes import (
    BYTES_DTYPES,
    accepted,
    boundary_layers,
    bytes_per_token_per_layer,
    has_calculate_kv_scales,
    nvfp4_unusable,
    runtime_scales,
    runtime_scales_disabled,
    sixteen_bit_not_honoured,
    skip_layers,
    versions_accepting,
)
from kvguard.facts.versions import EXAMINED
from kvguard.vocabulary import KV_DTYPES, canonical_dtype


def test_every_examined_version_has_a_list_that_starts_with_auto():
    for version in EXAMINED:
        values = accepted(version)
        assert values is not None
        assert values[0] == "auto"
        assert {"fp8", "fp8_e4m3", "fp8_e5m2"} <= set(values)


def test_every_accepted_value_has_a_name_in_the_vocabulary():
    for version in EXAMINED:
        assert {canonical_dtype(value) for value in accepted(version) or ()} <= {"auto", *KV_DTYPES}


def test_versions_that_were_not_examined_have_no_list():
    assert accepted("0.33.0") is None
    assert accepted("0.20.3") is None
    assert accepted("0.32.0+cpu") == accepted("0.32.0")


@pytest.mark.parametrize(
    ("dtype", "versions"),
    [
        ("auto", "0.8.5..0.32.0"),
        ("bfloat16", "0.11.0..0.32.0"),
        ("float16", "0.18.0..0.32.0"),
        ("nvfp4", "0.20.0..0.32.0"),
        ("ultraquant_4bit", "0.32.0"),
        ("int8", None),
        ("FP8", None),
    ],
)
def test_which_versions_accept_a_value(dtype, versions):
    assert versions_accepting(dtype) == versions


# Bytes of one KV head of 128, as vLLM's own page sizes have them.
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bfloat16", 512),
        ("fp8", 256),
        ("fp8_e5m2", 256),
        ("int8_per_token_head", 264),
        ("fp8_per_token_head", 264),
        ("int4_per_token_head", 136),
        ("nvfp4", 144),
        ("turboquant_k8v4", 196),
        ("turboquant_4bit_nc", 134),
        ("turboquant_k3v4_nc", 118),
        ("turboquant_3bit_nc", 102),
        ("ultraquant_4bit", 136),
    ],
)
def test_bytes_per_head_of_128(dtype, size):
    assert bytes_per_token_per_layer(dtype, 1, 128) == size
    assert bytes_per_token_per_layer(dtype, 8, 128) == 8 * size


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 1152), ("fp8_e4m3", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)])
def test_bytes_of_a_latent_cache(dtype, size):
    assert bytes_per_token_per_layer(dtype, 1, 576, mla=True) == size


@pytest.mark.parametrize(
    ("dtype", "head_size", "mla"),
    [
        ("auto", 128, False),
        ("mixed", 128, False),
        ("nvfp4", 100, False),
        ("ultraquant_4bit", 80, False),
        ("fp8_ds_mla", 128, False),
        ("fp8_ds_mla", 320, True),
        ("nvfp4", 576, True),
    ],
)
def test_layouts_that_are_not_modelled_have_no_size(dtype, head_size, mla):
    assert bytes_per_token_per_layer(dtype, 8, head_size, mla=mla) is None


def test_narrower_formats_cost_less():
    sizes = [bytes_per_token_per_layer(dtype, 8, 128) for dtype in BYTES_DTYPES]
    assert all(sizes)
    assert max(sizes) == sizes[0]


@pytest.mark.parametrize(
    ("version", "scheme", "honoured"),
    [
        ("0.11.0", False, False),
        ("0.11.1", False, False),
        ("0.14.1", False, False),
        ("0.15.0", False, True),
        ("0.15.0", True, False),
        ("0.21.0", True, False),
        ("0.22.0", True, True),
        ("0.32.0", True, True),
    ],
)
def test_where_an_explicit_bfloat16_is_honoured(version, scheme, honoured):
    assert (sixteen_bit_not_honoured(version, "bfloat16", compressed_tensors_scheme=scheme) is None) is honoured


def test_calculate_kv_scales_ends_with_0_27_1():
    assert has_calculate_kv_scales("0.8.5")
    assert has_calculate_kv_scales("0.27.1")
    assert has_calculate_kv_scales("0.28.0") is False
    assert has_calculate_kv_scales("0.99.0") is None


@pytest.mark.parametrize(
    ("version", "platform", "what"),
    [
        ("0.11.0", None, "startup_error"),
        ("0.20.2", None, "dummy"),
        ("0.26.0", "cpu", "dummy"),
        ("0.27.1", "cpu", "first_batch_if_eager"),
        ("0.27.1", "cuda", "dummy"),
        ("0.28.0", "cpu", None),
    ],
)
def test_what_calibrates(version, platform, what):
    fact = runtime_scales(version, platform)
    assert (fact and fact.input) == what


def test_what_switches_runtime_scales_off():
    def off(version, **changes):
        given = {"scheme": False, "automatic": True, "hybrid": False, **changes}
        return runtime_scales_disabled(version, **given) is not None

    assert off("0.15.0", scheme=True, automatic=False)
    assert off("0.27.1", scheme=True)
    assert not off("0.27.1", scheme=True, automatic=False)
    assert not off("0.14.1", scheme=True)
    assert off("0.19.0", hybrid=True)
    assert not off("0.18.1", hybrid=True)


def test_skip_layers_flag():
    assert not skip_layers("0.18.1").available
    assert skip_layers("0.19.0").available
    assert not skip_layers("0.25.1").honoured_by_mla
    assert skip_layers("0.26.0").honoured_by_mla


def test_boundary_layers_keep_the_models_dtype():
    assert boundary_layers("0.32.0", "turboquant_4bit_nc", 30) == 2
    assert boundary_layers("0.32.0", "turboquant_4bit_nc", 3) == 1
    assert boundary_layers("0.31.0", "ultraquant_4bit", 30) == 0
    assert boundary_layers("0.32.0", "fp8_e4m3", 30) == 0


def test_nvfp4_cannot_run_in_the_first_versions_that_accept_it():
    assert nvfp4_unusable("0.20.2")
    assert nvfp4_unusable("0.21.0") is None
