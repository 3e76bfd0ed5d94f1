"""What a sequence costs in KV memory, from the geometry: windows, recurrent state and tensor parallelism included.

Plain arithmetic. An engine rounds up to whole blocks and may pad pages of layers that differ, which costs more.
"""

from __future__ import annotations

from kvguard.checkpoint.geometry import bytes_per_token
from kvguard.checkpoint.models import Geometry
from kvguard.vocabulary import width_bits


def bytes_beyond_window(geometry: Geometry, dtype: str) -> float | None:
    """Bytes a further token takes once a sequence is longer than the window; None when not modelled.

    Layers with a window keep as much as before, so only the others count.
    """
    whole = bytes_per_token(geometry, dtype)
    layers = geometry.attention_layers
    if whole is None or not layers:
        return None
    return whole * (layers - geometry.sliding_layers) / layers if geometry.sliding_window else whole


def state_bytes(geometry: Geometry, model_dtype: str | None = None) -> float | None:
    """Bytes recurrent layers keep for one sequence, however long: 0 without such layers, None when not modelled."""
    if not geometry.hybrid:
        return 0.0
    state = geometry.state
    own = (width_bits(model_dtype or "bfloat16") or 16) / 8
    if state is None:
        return None
    ssm = (width_bits(state.ssm_dtype) or 16) / 8 if state.ssm_dtype else own
    return state.layers * (state.conv_values * own + state.ssm_values * ssm)


def sequence_bytes(
    geometry: Geometry, dtype: str, tokens: int, model_dtype: str | None = None, in_flight: int = 0
) -> float | None:
    """Bytes of one sequence of `tokens` tokens in one replica; None when not modelled.

    Layers with a window keep `in_flight` tokens beside it, those that are being computed.
    """
    whole, beyond = bytes_per_token(geometry, dtype), bytes_beyond_window(geometry, dtype)
    state = state_bytes(geometry, model_dtype)
    if whole is None or beyond is None or state is None:
        return None
    inside = min(tokens, geometry.sliding_window + in_flight) if geometry.sliding_window else tokens
    return whole * inside + beyond * (tokens - inside) + state


def rank_share(geometry: Geometry, ranks: int) -> float | None:
    """The share of a token's bytes that each of `ranks` tensor-parallel ranks holds; None when heads do not divide.

    With more ranks than KV heads each head is stored several times; MLA's latent is stored by every rank.
    """
    if geometry.mla:
        return 1.0
    heads = geometry.kv_heads
    if not heads or (heads % ranks and ranks % heads):
        return None
    return max(1, heads // ranks) / heads
