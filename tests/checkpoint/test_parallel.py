"""What one GPU holds: heads by tensor, layers by pipeline parallelism."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.checkpoint.cost import sequence_bytes
from kvguard.checkpoint.geometry import bytes_per_token, read_geometry
from kvguard.checkpoint.json_config import Section
from kvguard.checkpoint.models import Geometry
from kvguard.checkpoint.parallel import Ranks, per_gpu, stages


def model(layers: int, heads: int, **more: Any) -> Geometry:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 4 * heads, "num_key_value_heads": heads, "head_dim": 128}
    return read_geometry(Section({**sizes, **more}, "config.json"))


LLAMA_70B = model(80, 8)
MLA = read_geometry(
    Section({"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "config.json")
)
GEMMA = model(
    34, 4, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4, sliding_window=1024
)


def token(geometry: Geometry, dtype: str = "bfloat16", **ranks: int) -> float | None:
    return per_gpu(geometry, dtype, Ranks(**ranks), lambda part: bytes_per_token(part, dtype))


@pytest.mark.parametrize(
    ("geometry", "ranks", "found"),
    [
        (LLAMA_70B, {}, 327_680),
        (LLAMA_70B, {"tensor": 8}, 40_960),
        (LLAMA_70B, {"tensor": 16}, 40_960),  # eight heads on sixteen ranks: each head twice
        (LLAMA_70B, {"tensor": 4, "pipeline": 2}, 40_960),
        (LLAMA_70B, {"data": 4}, 327_680),
        (LLAMA_70B, {"tensor": 3}, None),
        (LLAMA_70B, {"pipeline": 3}, 27 * 4_096),
        (LLAMA_70B, {"pipeline": 81}, None),
        (MLA, {"tensor": 8}, 70_272),  # the latent is on every rank
        (MLA, {"pipeline": 2}, 31 * 1_152),
        (GEMMA, {"tensor": 4, "pipeline": 2}, 17 * 2_048 / 4),
    ],
)
def test_a_token(geometry: Geometry, ranks: dict[str, int], found: float | None) -> None:
    assert token(geometry, **ranks) == found


def test_stages_are_cut_as_the_engine_cuts_them() -> None:
    sizes = [part.attention_layers for part in stages(LLAMA_70B, "bfloat16", 3) or ()]
    assert sizes == [27, 27, 26]
    assert [part.attention_layers for part in stages(model(30, 2), "bfloat16", 4) or ()] == [7, 8, 8, 7]
    first, second = stages(GEMMA, "bfloat16", 2) or ()
    assert (first.sliding_layers, second.sliding_layers) == (15, 14)
    assert stages(LLAMA_70B, "turboquant_4bit_nc", 2) is None


def test_layers_that_share_keys_hold_nothing_of_their_own() -> None:
    shared = model(30, 2, num_kv_shared_layers=15)
    assert [part.attention_layers for part in stages(shared, "bfloat16", 2) or ()] == [15]
    assert token(shared, pipeline=2) == token(shared)


def test_recurrent_models_are_not_modelled_on_several_ranks() -> None:
    hybrid = LLAMA_70B.model_copy(update={"hybrid": True})
    assert token(hybrid, tensor=2) is None
    assert token(hybrid, pipeline=2) is None


def test_a_sequence_longer_than_the_window() -> None:
    def cost(part: Geometry) -> float | None:
        return sequence_bytes(part, "bfloat16", 8192)

    each = 2 * 4 * 128 * 2
    first = each * (15 * 1024 + 2 * 8192)
    second = each * (14 * 1024 + 3 * 8192)
    assert per_gpu(GEMMA, "bfloat16", Ranks(pipeline=2), cost) == max(first, second)


@given(st.integers(1, 80), st.integers(1, 16), st.integers(1, 9), st.integers(1, 64))
def test_the_parts_are_at_least_the_whole(layers: int, heads: int, pipeline: int, tensor: int) -> None:
    geometry = model(layers, heads)
    whole, each = bytes_per_token(geometry, "fp8"), token(geometry, "fp8", tensor=tensor, pipeline=pipeline)
    parts = stages(geometry, "fp8", pipeline)
    assert (parts is None) == (pipeline > layers)
    if parts is not None:
        assert sum(part.attention_layers or 0 for part in parts) == layers
    if each is not None and whole is not None:
        assert whole <= each * tensor * pipeline
        assert each <= whole
