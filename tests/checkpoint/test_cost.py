"""Bytes per token of published architectures, as docs/geometry.md states them, and what a sequence costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from checkpoint_fakes import SMOLLM2
from kvguard.checkpoint.cost import bytes_beyond_window, rank_share, sequence_bytes, state_bytes
from kvguard.checkpoint.geometry import bytes_per_token, read_geometry
from kvguard.checkpoint.json_config import Section
from kvguard.evidence.layouts import layouts


def dense(layers: int, heads: int, head: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": 4 * heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        **more,
    }


def latent(layers: int, kind: str, **more: Any) -> dict[str, Any]:
    ranks = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 128}
    return {"model_type": kind, "num_hidden_layers": layers, **ranks, **more}


NEMOTRON = dense(
    52,
    8,
    128,
    model_type="nemotron_h",
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    mamba_num_heads=128,
    mamba_head_dim=64,
    n_groups=8,
    ssm_state_size=128,
    conv_kernel=4,
)
GEMMA_12B = {
    "model_type": "gemma3",
    "text_config": dense(48, 8, 256, model_type="gemma3_text", sliding_window=1024, sliding_window_pattern=6),
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": dense(32, 8, 128),
    "Llama-3-70B": dense(80, 8, 128),
    "Qwen3-8B": dense(36, 8, 128, sliding_window=None, use_sliding_window=False),
    "Qwen3-32B": dense(64, 8, 128, use_sliding_window=False),
    "Qwen3-30B-A3B": dense(48, 4, 128, use_sliding_window=False),
    "Mistral-7B-v0.1": dense(32, 8, 128, sliding_window=4096),
    "Mistral-7B-v0.3": dense(32, 8, 128, sliding_window=None),
    # As published: what the class has by default is left out.
    "Gemma-3-4B": {
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
    },
    "Gemma-3-12B": GEMMA_12B,
    "Gemma-3-27B": {"text_config": dense(62, 16, 128, model_type="gemma3_text", sliding_window=1024)},
    "gpt-oss-20b": dense(24, 8, 64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 12),
    "gpt-oss-120b": dense(36, 8, 64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18),
    "DeepSeek-V2": latent(60, "deepseek_v2"),
    "DeepSeek-V3, R1": latent(61, "deepseek_v3"),
    "DeepSeek-V3.2": latent(61, "deepseek_v32", index_topk=2048, index_head_dim=128, index_n_heads=64),
    "Nemotron-H-8B": NEMOTRON,
}
DOCS = (Path(__file__).parents[2] / "docs/geometry.md").read_text(encoding="utf-8")


def geometry(config: dict[str, Any]):
    return read_geometry(Section(config, "config.json"))


def documented() -> dict[str, tuple[int, int, int]]:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", DOCS, re.MULTILINE)
    return {name: tuple(int(figure.replace(",", "")) for figure in figures) for name, *figures in rows}


def test_the_table_has_every_model():
    assert set(documented()) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_figures_of_the_table(name):
    found = geometry(MODELS[name])
    assert found.unknown_reason is None
    figures = bytes_per_token(found, "bfloat16"), bytes_per_token(found, "fp8"), bytes_beyond_window(found, "bfloat16")
    assert figures == documented()[name]


def test_the_two_figures_beside_it():
    assert bytes_per_token(geometry(MODELS["DeepSeek-V3.2"]), "fp8_ds_mla") == 48_068
    assert state_bytes(geometry(NEMOTRON), "bfloat16") == 102_137_856
    for figure in ("48,068", "102,137,856"):
        assert figure in DOCS


def test_a_sequence_longer_than_the_window():
    mistral, oss = geometry(MODELS["Mistral-7B-v0.1"]), geometry(MODELS["gpt-oss-20b"])
    assert sequence_bytes(mistral, "bfloat16", 1000) == 131_072 * 1000
    assert sequence_bytes(mistral, "bfloat16", 8192) == 131_072 * 4096
    assert sequence_bytes(oss, "fp8", 8192) == 24_576 * 128 + 12_288 * (8192 - 128)
    assert sequence_bytes(geometry(NEMOTRON), "bfloat16", 8192) == 16_384 * 8192 + 102_137_856
    assert sequence_bytes(geometry(SMOLLM2), "bfloat16", 8192) == 23_040 * 8192


def test_layers_that_share_count_once():
    found = geometry(dense(30, 2, 256, num_kv_shared_layers=10))
    assert found.layer_indices == tuple(range(20))
    assert bytes_per_token(found, "bfloat16") == 2 * 20 * 2 * 256 * 2
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 6
    with_windows = geometry(dense(30, 2, 256, num_kv_shared_layers=10, layer_types=kinds, sliding_window=512))
    assert (with_windows.attention_layers, with_windows.sliding_layers) == (20, 16)


def test_a_mamba_hybrid_by_layer_types():
    granite = dense(
        4,
        4,
        128,
        hidden_size=1024,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_expand=2,
    )
    found = geometry(granite)
    assert found.layer_indices == (2,)
    assert bytes_per_token(found, "bfloat16") == 2 * 4 * 128 * 2
    assert state_bytes(found, "float16") == 3 * ((2048 + 256) * 3 + 32 * 64 * 128) * 2


@pytest.mark.parametrize(
    "config",
    [
        dense(4, 4, 128, layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_value_heads=8),
        dense(4, 4, 128, layer_types=["mamba"] * 3 + ["attention"], mamba_d_state=16, mamba_expand=2),
        latent(4, "glm_moe_dsa", index_topk=2048, index_head_dim=128),
        latent(4, "deepseek_v32", index_topk=2048),
        dense(4, 4, 128, compress_ratios=[4]),
        dense(4, 4, 128, global_head_dim=256),
    ],
)
def test_outside_the_model_nothing_is_said(config):
    found = geometry(config)
    assert found.unknown_reason
    assert bytes_per_token(found, "bfloat16") is None
    assert bytes_beyond_window(found, "bfloat16") is None
    assert sequence_bytes(found, "bfloat16", 100) is None


def test_ranks():
    llama, mla = geometry(MODELS["Llama-3-8B"]), geometry(MODELS["DeepSeek-V3, R1"])
    assert [rank_share(llama, ranks) for ranks in (1, 2, 8, 16)] == [1, 0.5, 0.125, 0.125]
    assert rank_share(llama, 3) is None
    assert rank_share(mla, 8) == 1
    # What all ranks hold together agrees with the capacity check's arithmetic.
    for ranks in (1, 2, 8, 16):
        sizes = {layout.dtype: layout.bytes_per_token for layout in layouts(llama, ranks)}
        assert sizes["bfloat16"] == 131_072 * rank_share(llama, ranks) * ranks
    assert layouts(geometry(NEMOTRON)) == ()
