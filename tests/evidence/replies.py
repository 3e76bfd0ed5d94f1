"""Replies of the reader inside the engine, as it would send them."""

from __future__ import annotations

from typing import Any

NONCE = "n0nce"


def layer(index: int, **changes: Any) -> dict[str, Any]:
    """An fp8 layer with calibrated scales; `changes` replace its fields."""
    return {
        "name": f"model.layers.{index}.self_attn.attn",
        "class": "Attention",
        "backend": "CPU_ATTN",
        "kv_cache_dtype": "fp8",
        "tensor_dtype": "torch.uint8",
        "shape": [728, 3, 128, 128],
        "k_scale": [0.05000000074505806],
        "v_scale": [0.019999999552965164],
        "q_scale": [1.0],
        "k_scale_float": 0.05000000074505806,
        "v_scale_float": 0.019999999552965164,
        "q_scale_float": 1.0,
        "sliding_window": None,
        "num_kv_heads": 3,
        "head_size": 64,
        "error": None,
        **changes,
    }


def unit(index: int, **changes: Any) -> dict[str, Any]:
    """An fp8 layer whose scales are 1.0."""
    ones = {"k_scale": [1.0], "v_scale": [1.0], "k_scale_float": 1.0, "v_scale_float": 1.0}
    return layer(index, **ones, **changes)


def wide(index: int, **changes: Any) -> dict[str, Any]:
    """A layer in the model's dtype, whose scale attributes hold something all the same."""
    return layer(index, kv_cache_dtype="auto", tensor_dtype="torch.bfloat16", **changes)


def reply(layers: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """One rank's reply."""
    return {
        "nonce": NONCE,
        "rank": 0,
        "tp_rank": 0,
        "pp_rank": 0,
        "dp_rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "pid": 4242,
        "engine_version": "0.32.0",
        "error": None,
        "model_dtype": "bfloat16",
        "cache_dtype_config": "auto",
        "limits": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "max_model_len": 2048,
            "num_blocks": 728,
            "block_size": 128,
        },
        "kv_bytes": 1073741824,
        "layers": layers,
        **changes,
    }


def document(*replies: dict[str, Any], expected: int | None = 1) -> dict[str, Any]:
    """The whole reply document."""
    return {"replies": list(replies), "expected_ranks": expected}


def ranks(count: int, layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same reply from `count` tensor-parallel ranks."""
    return [reply(layers, rank=r, tp_rank=r, tp_size=count, world_size=count) for r in range(count)]
