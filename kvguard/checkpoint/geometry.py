"""How many bytes of KV cache one token costs, from the model's architecture in config.json."""

from __future__ import annotations

from kvguard.checkpoint.json_config import Section
from kvguard.checkpoint.models import Geometry, RecurrentState
from kvguard.facts.kv_dtypes import boundary_layers, bytes_per_token_per_layer
from kvguard.facts.versions import NEWEST, read_data
from kvguard.vocabulary import UsageError

MAX_LAYERS = 10_000

_FACTS = read_data("architectures")
_MLA_TYPES = frozenset(_FACTS["mla_model_types"]["values"])
_KV_HEAD_KEYS = tuple(_FACTS["kv_head_keys"]["values"])
_FULL_ATTENTION = frozenset(_FACTS["full_attention"]["values"])
_WINDOW_ATTENTION = frozenset(_FACTS["window_attention"]["values"])
_RECURRENT_KEYS = tuple(_FACTS["recurrent_keys"]["values"])
_NOT_MODELLED = _FACTS["not_modelled"]["values"]


def read_geometry(config: Section) -> Geometry:
    """The KV geometry of the language model in config.json (its `text_config` when that holds the sizes).

    UsageError for values of the wrong type; `unknown_reason` for whatever the arithmetic does not cover.
    """
    text = _with_defaults(text_section(config))
    layers = text.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if layers is not None and layers > MAX_LAYERS:
        raise text.wrong(text.has("num_hidden_layers", "n_layer", "n_layers", "num_layers") or "", f"<= {MAX_LAYERS}")
    types = _layer_types(text, layers)
    indices = _attention_indices(text, layers, types)
    mla = (text.text("model_type") in _MLA_TYPES) and text.has("kv_lora_rank") is not None
    heads = text.number("num_attention_heads", "n_head", "n_heads")
    head_size = _latent_size(text) if mla else _head_size(text, heads)
    kv_heads = 1 if mla else _kv_heads(text, heads)
    window = _window(text)
    kept = types if indices is None else [types[index] for index in indices if index < len(types)]
    sliding = sum(1 for kind in kept if kind in _WINDOW_ATTENTION)
    hybrid = text.has(*_RECURRENT_KEYS) is not None or any(kind not in _FULL_ATTENTION | _WINDOW_ATTENTION for kind in types)
    state = _mamba_state(text, layers, types, indices) if hybrid else None
    indexer = _indexer_bytes(text)
    return Geometry(
        layers=layers,
        attention_layers=None if indices is None else len(indices),
        kv_heads=kv_heads or None,
        head_size=head_size or None,
        mla=mla,
        sliding_window=window,
        sliding_layers=sliding if types else len(indices or ()) if window else 0,
        layer_types=types,
        layer_indices=indices,
        hybrid=hybrid,
        indexer_bytes=indexer,
        state=state,
        unknown_reason=_unknown_reason(
            text, layers, indices, kv_heads, head_size, mla=mla, hybrid=hybrid and state is None, indexer=indexer
        ),
    )


def bytes_per_token(geometry: Geometry, dtype: str, wide_layers: int | None = None) -> float | None:
    """KV bytes one token takes in all attention layers of one replica, all heads counted once; None when not modelled.

    Within the window for layers that have one; what recurrent layers keep is no matter of tokens. `wide_layers` is how
    many layers are kept at 16 bit; None means those that a format leaves so by itself. Padding of pages does not count.
    """
    layers = geometry.attention_layers
    if geometry.unknown_reason or not (layers and geometry.kv_heads and geometry.head_size):
        return None
    layer = bytes_per_token_per_layer(dtype, geometry.kv_heads, geometry.head_size, mla=geometry.mla)
    wide = bytes_per_token_per_layer("bfloat16", geometry.kv_heads, geometry.head_size, mla=geometry.mla)
    if layer is None or wide is None:
        return None
    kept = len(boundary(geometry, dtype)) if wide_layers is None else wide_layers
    return layer * (layers - kept) + wide * kept + geometry.indexer_bytes * layers


def boundary(geometry: Geometry, dtype: str) -> tuple[int, ...]:
    """Which attention layers, counted from 0, a format leaves at 16 bit by itself: both ends (turboquant, ultraquant)."""
    layers = geometry.attention_layers or 0
    ends = boundary_layers(NEWEST, dtype, layers)
    return (*range(ends), *range(layers - ends, layers))


def windowed_layers(geometry: Geometry) -> tuple[int, ...]:
    """Indices of the attention layers that see only a window; () also where the config does not say which they are."""
    indices = geometry.layer_indices or ()
    if not geometry.layer_types:
        return indices if geometry.sliding_layers else ()
    types = geometry.layer_types
    return tuple(index for index in indices if index < len(types) and types[index] in _WINDOW_ATTENTION)


def text_section(config: Section) -> Section:
    """The part of config.json that describes the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        if config.has(key):
            nested = config.section(key)
            if nested is not None and nested.has("num_hidden_layers", "hidden_size", "model_type"):
                return nested
    return config


def _with_defaults(text: Section) -> Section:
    """The config with its class's defaults where it leaves them out, as the published configs of some models do."""
    defaults = _FACTS["config_defaults"]["values"].get(text.text("model_type") or "", {})
    missing = {key: value for key, value in defaults.items() if text.value.get(key) is None}
    return Section({**text.value, **missing}, text.where, text.prefix, text.origins) if missing else text


def _mamba_state(
    text: Section, layers: int | None, types: tuple[str, ...], indices: tuple[int, ...] | None
) -> RecurrentState | None:
    """The Mamba-2 state of one sequence and layer, None for other recurrent layers or sizes that are not given."""
    pattern = text.value.get("hybrid_override_pattern")
    kinds = types or (text.words("layers_block_type") or ())
    mamba = pattern.count("M") if isinstance(pattern, str) else sum(kind == "mamba" for kind in kinds)
    others = set(kinds) - _FULL_ATTENTION - {"mamba"}
    if not mamba or others or indices is None or layers is None:
        return None
    for keys in _FACTS["mamba2_keys"]["values"]:
        heads, head, groups, state, kernel = (text.number(keys[key]) for key in ("heads", "head", "groups", "state", "kernel"))
        if not (heads and head and groups and state and kernel):
            continue
        hidden, expand = text.number("hidden_size"), text.number(keys["expand"]) if "expand" in keys else None
        inner = expand * hidden if expand and hidden else heads * head
        conv = (inner + 2 * groups * state) * (kernel - 1)
        dtype = text.text("mamba_ssm_cache_dtype") or keys.get("ssm_dtype")
        return RecurrentState(layers=mamba, conv_values=conv, ssm_values=heads * head * state, ssm_dtype=dtype)
    return None


def _indexer_bytes(text: Section) -> int:
    """What a sparse-attention index adds to each token and layer: fp8 keys with a float32 scale for each block."""
    block = _FACTS["indexer"]["values"].get(text.text("model_type") or "")
    size = text.number("index_head_dim") if block and text.has("index_topk") else None
    return size + size // block * 4 if block and size else 0


def _layer_types(text: Section, layers: int | None) -> tuple[str, ...]:
    types = text.words("layer_types") or ()
    pattern = text.value.get("sliding_window_pattern")
    if not types and isinstance(pattern, int) and pattern > 1 and layers:
        return tuple("sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers))
    if layers is not None and 0 < len(types) < layers:
        raise UsageError(f"{text.place('layer_types')}: {len(types)} entries for {layers} layers")
    return types[: layers or 0]


def _attention_indices(text: Section, layers: int | None, types: tuple[str, ...]) -> tuple[int, ...] | None:
    """Which layers keep keys and values; None when the config does not say."""
    if layers is None:
        return None
    own = max(layers - (text.number("num_kv_shared_layers") or 0), 0)
    kinds = types or (text.words("layers_block_type") or ())
    if kinds:
        keeps = _FULL_ATTENTION | _WINDOW_ATTENTION
        return tuple(index for index, kind in enumerate(kinds[:own]) if kind in keeps)
    pattern = text.value.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == layers:  # NemotronH: one letter a layer, * for attention
        return tuple(index for index, letter in enumerate(pattern) if letter == "*")
    if text.has(*_RECURRENT_KEYS):
        return None
    return tuple(range(own))


def _latent_size(text: Section) -> int | None:
    rank, rope = text.number("kv_lora_rank"), text.number("qk_rope_head_dim")
    return None if rank is None or rope is None else rank + rope


def _head_size(text: Section, heads: int | None) -> int | None:
    explicit = text.number("head_dim") or text.number("hidden_size_per_head")
    hidden = text.number("hidden_size", "n_embd", "d_model")
    return explicit or (hidden // heads if hidden and heads else None)


def _kv_heads(text: Section, heads: int | None) -> int | None:
    key = text.has(*_KV_HEAD_KEYS)
    if key is not None and isinstance(text.value[key], list):
        return None
    # Falcon and GPT-BigCode: one KV head unless the newer architecture says otherwise.
    if text.flag("multi_query") and not text.flag("new_decoder_architecture"):
        return 1
    return heads if key is None else text.number(key)


def _window(text: Section) -> int | None:
    if text.value.get("use_sliding_window") is False:
        return None
    return text.number("sliding_window") or None


def _unknown_reason(
    text: Section,
    layers: int | None,
    indices: tuple[int, ...] | None,
    kv_heads: int | None,
    head_size: int | None,
    *,
    mla: bool,
    hybrid: bool,
    indexer: int,
) -> str | None:
    for key, meaning in _NOT_MODELLED.items():
        if text.value.get(key) and not (key == "index_topk" and indexer):
            return f"{text.place(key)}: {meaning}, which is not modelled"
    if text.flag("is_encoder_decoder"):
        return f"{text.place('is_encoder_decoder')}: encoder-decoder caches are not modelled"
    if hybrid:
        return f"{text.where}: recurrent layers (Mamba, linear attention) keep a state that is not modelled"
    if text.has("kv_lora_rank") and not mla:
        return f"{text.place('kv_lora_rank')}: this model type's use of it is not modelled"
    value_size = None if mla else text.number("v_head_dim")
    if value_size and value_size != head_size:
        return f"{text.place('v_head_dim')}: keys and values of different sizes are not modelled"
    for name, value in (("number of layers", layers), ("number of KV heads", kv_heads), ("head size", head_size)):
        if not value:
            return f"{text.where}: the {name} cannot be told"
    return None if indices else f"{text.where}: no attention layers"
