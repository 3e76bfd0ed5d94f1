import pytest

from checkpoint_fakes import SMOLLM2
from kvguard.checkpoint.geometry import bytes_per_token, read_geometry
from kvguard.checkpoint.json_config import Section
from kvguard.vocabulary import UsageError


def geometry(config, **changes):
    return read_geometry(Section({**config, **changes}, "config.json"))


def test_smollm2():
    found = geometry(SMOLLM2)
    assert (found.attention_layers, found.kv_heads, found.head_size) == (30, 3, 64)
    assert bytes_per_token(found, "bfloat16") == 23_040
    assert bytes_per_token(found, "fp8") == 11_520
    assert (1 << 30) // 23_040 == 46_603
    assert found.unknown_reason is None


def test_formats_that_keep_layers_at_16_bit_by_themselves():
    found = geometry(SMOLLM2)
    assert bytes_per_token(found, "turboquant_4bit_nc") == 26 * 3 * 70 + 4 * 3 * 256
    assert bytes_per_token(geometry(SMOLLM2, num_hidden_layers=2), "turboquant_4bit_nc") == 2 * 3 * 256


def test_head_size_and_kv_heads_by_default():
    found = geometry({"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512})
    assert (found.kv_heads, found.head_size) == (8, 64)


def test_a_null_or_zero_head_dim_is_as_if_absent():
    assert geometry(SMOLLM2, head_dim=None).head_size == 64
    assert geometry(SMOLLM2, head_dim=0).head_size == 64


def test_multi_query_has_one_kv_head_unless_the_newer_architecture_says_otherwise():
    falcon = {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}
    assert geometry(falcon).kv_heads == 1
    assert geometry(falcon, new_decoder_architecture=True, num_kv_heads=8).kv_heads == 8


def test_the_sizes_of_a_multimodal_model_are_in_text_config():
    found = geometry({"model_type": "gemma3", "text_config": SMOLLM2, "vision_config": {"num_hidden_layers": 27}})
    assert found.attention_layers == 30


def test_mla_has_one_latent_vector():
    deepseek = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    found = geometry(deepseek)
    assert (found.mla, found.kv_heads, found.head_size) == (True, 1, 576)
    assert bytes_per_token(found, "bfloat16") == 61 * 1152
    assert bytes_per_token(found, "fp8_ds_mla") == 61 * 656
    assert geometry(deepseek, model_type="minicpm3").unknown_reason is not None
    assert "index cache" in geometry(deepseek, index_topk=2048).unknown_reason


def test_sliding_windows():
    every_other = ["sliding_attention", "full_attention"] * 15
    found = geometry(SMOLLM2, layer_types=every_other, sliding_window=512)
    assert (found.attention_layers, found.sliding_layers, found.sliding_window) == (30, 15, 512)
    assert geometry(SMOLLM2, sliding_window=4096).sliding_layers == 30
    off = geometry(SMOLLM2, sliding_window=4096, use_sliding_window=False)
    assert (off.sliding_window, off.sliding_layers) == (None, 0)


def test_a_hybrid_knows_its_attention_layers_and_not_its_bytes():
    found = geometry(SMOLLM2, num_hidden_layers=8, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2)
    assert found.layer_indices == (3, 7)
    assert found.hybrid
    assert bytes_per_token(found, "bfloat16") is None
    mamba = geometry(SMOLLM2, mamba_d_state=16)
    assert mamba.attention_layers is None
    assert bytes_per_token(mamba, "bfloat16") is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": [1, 2, 3]}, "KV heads"),
        ({"num_hidden_layers": None}, "number of layers"),
        ({"head_dim": None, "hidden_size": None}, "head size"),
        ({"global_head_dim": 512}, "head sizes"),
        ({"cla_share_factor": 2}, "share"),
        ({"v_head_dim": 128}, "different sizes"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_hidden_layers": 0}, "number of layers"),
        ({"state_size": 16}, "recurrent"),
    ],
)
def test_what_is_not_modelled_says_why_and_has_no_bytes(changes, reason):
    found = geometry(SMOLLM2, **changes)
    assert reason in found.unknown_reason
    assert "config.json" in found.unknown_reason
    assert bytes_per_token(found, "bfloat16") is None


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"num_hidden_layers": "30"}, "config.json: num_hidden_layers"),
        ({"num_hidden_layers": 10**8}, "config.json: num_hidden_layers"),
        ({"num_hidden_layers": -1}, "config.json: num_hidden_layers"),
        ({"num_hidden_layers": True}, "config.json: num_hidden_layers"),
        ({"head_dim": 64.5}, "config.json: head_dim"),
        ({"num_key_value_heads": {}}, "config.json: num_key_value_heads"),
        ({"layer_types": "full_attention"}, "config.json: layer_types"),
        ({"layer_types": ["full_attention"]}, "config.json: layer_types"),
        ({"text_config": [1]}, "config.json: text_config"),
        ({"text_config": {"num_hidden_layers": []}}, "config.json: text_config.num_hidden_layers"),
    ],
)
def test_wrong_types_name_file_and_key(changes, place):
    with pytest.raises(UsageError) as error:
        geometry(SMOLLM2, **changes)
    assert str(error.value).startswith(place)
