"""Mistral's own format: params.json, read as vLLM turns it into a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvguard.checkpoint.json_config import Section, kind
from kvguard.checkpoint.quantization import CONFIG
from kvguard.vocabulary import UsageError

PARAMS = "params.json"

# 0.32.0 transformers_utils/configs/mistral.py:142.
_NAMES = {
    "dim": "hidden_size",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}


def adapt(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """params.json under Hugging Face's names, with config.json's values where it has none (as vLLM fills them in).

    UsageError for a quantization or a sliding window that vLLM refuses.
    """
    config = {_NAMES.get(key, key): value for key, value in params.items()}
    config.setdefault("model_type", "transformer")
    quantization = _quantization(config.pop("quantization", None))
    if quantization is not None:
        config["quantization_config"] = quantization
    _sliding_window(config)
    moe = config.get("moe")
    if isinstance(moe, Mapping) and moe.get("num_shared_experts"):
        config["model_type"], config["architectures"] = "deepseek_v3", ["MistralLarge3ForCausalLM"]
    else:
        config["architectures"] = ["MixtralForCausalLM" if moe else "MistralForCausalLM"]
    return {**defaults, **config}


def origins(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The file, and the key there, of each value in what `adapt` makes of these."""
    found = {key: (CONFIG, key) for key in defaults}
    found |= {_NAMES.get(key, key): (PARAMS, key) for key in params if key != "quantization"}
    for made, of in (("quantization_config", "quantization"), ("layer_types", "sliding_window")):
        if params.get(of) and made not in params:
            found[made] = (PARAMS, of)
    return found


def _quantization(value: Any) -> dict[str, Any] | None:
    """The quantization_config that vLLM makes of `quantization` (0.32.0 configs/mistral.py:202)."""
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise UsageError(f"{PARAMS}: quantization: expected an object, found {kind(value)}")
    if value.get("qformat_weight") == "fp8_e4m3":
        scheme = value.get("qscheme_act")
        if scheme not in ("NO_SCALES", "TENSOR", None):
            raise UsageError(f"{PARAMS}: quantization.qscheme_act: vLLM takes NO_SCALES or TENSOR, found {kind(scheme)}")
        return {"quant_method": "fp8", "activation_scheme": "dynamic" if scheme == "NO_SCALES" else "static"}
    method = Section(value, PARAMS, "quantization.").text("quant_method") or ""
    if method.lower().replace("_", "-") == "compressed-tensors":
        return {**value, "quant_method": "compressed-tensors"}
    raise UsageError(f"{PARAMS}: quantization: vLLM knows qformat_weight fp8_e4m3 or quant_method compressed-tensors only")


def _sliding_window(config: dict[str, Any]) -> None:
    """A list of windows, one a layer and repeated, becomes layer types and one window."""
    windows, layers = config.get("sliding_window"), config.get("num_hidden_layers")
    if not windows or not isinstance(layers, int) or isinstance(layers, bool) or not 0 < layers <= 10_000:
        return
    if isinstance(windows, list):
        numbers = all(size is None or (isinstance(size, int) and not isinstance(size, bool)) for size in windows)
        sizes = {size for size in windows if size is not None} if numbers else set()
        if not numbers or len(sizes) > 1:
            raise UsageError(f"{PARAMS}: sliding_window: vLLM takes one window size, found {kind(windows)}")
        kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
        config["layer_types"] = (kinds * (layers // len(kinds)))[:layers]
        config["sliding_window"] = next(iter(sizes), None)
    elif isinstance(windows, int) and config.get("layer_types") is None:
        config["layer_types"] = ["sliding_attention"] * layers
