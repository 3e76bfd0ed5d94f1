"""The quantization block of a checkpoint and the KV declaration inside it, chosen as vLLM chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvguard.checkpoint.json_config import Section, kind
from kvguard.checkpoint.models import KVScheme, Quantization
from kvguard.facts.kv_resolution import COMPRESSED_TENSORS, modelopt_method
from kvguard.facts.versions import NEWEST
from kvguard.vocabulary import UsageError

CONFIG = "config.json"
SIDECAR = "hf_quant_config.json"
OVERRIDES = "--hf-overrides"

BLOCKS = ("quantization_config", "compression_config")
"""The keys of a quantization block, the one that is taken first in front."""


def find_quantization(
    config: Section, sidecar: Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> tuple[Quantization, Section] | None:
    """The block vLLM takes, and its contents; None when the checkpoint has none.

    Order: config.json's `quantization_config`, hf_quant_config.json, `compression_config`, and the same two keys of
    `text_config` (0.32.0 transformers_utils/config.py:893, model_arch_config_convertor.py:263). `config` already
    contains `overrides`, which is asked only for where a value came from. UsageError for values that vLLM stumbles on.
    """
    for prefix in ("", "text_config."):
        nested = config.value.get("text_config") if prefix else config.value
        if not isinstance(nested, Mapping):
            continue
        for key in BLOCKS:
            overridden = key in overrides if not prefix else "text_config" in overrides
            file = OVERRIDES if overridden else config.where
            holder = Section(nested, file, prefix, None if prefix or overridden else config.origins)
            block = holder.section(key)
            if block is not None:
                return _quantization(block, block.where, prefix + key), block
            if key == "quantization_config" and not prefix and sidecar is not None and not overridden:
                block = Section(sidecar, SIDECAR)
                return _quantization(block, SIDECAR, ""), block
    return None


def _quantization(block: Section, file: str, key: str) -> Quantization:
    method = block.text("quant_method")
    producer = block.section("producer")
    nested = block.section("quantization")
    return Quantization(
        file=file,
        block=key,
        written=block.prefix.removesuffix("."),
        method=method.lower().replace("compressed_tensors", COMPRESSED_TENSORS) if method else None,
        producer=producer.text("name") if producer else None,
        producer_version=producer.text("version") if producer else None,
        quant_algo=nested.text("quant_algo") if nested else None,
        legacy_modelopt=nested is not None and "modelopt_quant_config" in nested.value,
    )


def effective_method(quantization: Quantization | None, version: str) -> str | None:
    """The quantization method this version goes by: inferred for ModelOpt, else as written; None without one."""
    if quantization is None:
        return None
    inferred = modelopt_method(
        version,
        producer=quantization.producer,
        legacy_key=quantization.legacy_modelopt,
        quant_algo=quantization.quant_algo,
    )
    return inferred.method if inferred and inferred.method else quantization.method


def find_scheme(quantization: Quantization, block: Section) -> KVScheme | None:
    """The KV cache declaration of a quantization block, None when it has none.

    UsageError when compressed-tensors' `kv_cache_scheme` is no object: vLLM cannot start with that.
    """
    method = effective_method(quantization, NEWEST)
    if method == COMPRESSED_TENSORS:
        scheme = block.section("kv_cache_scheme")
        return None if scheme is None else _scheme(COMPRESSED_TENSORS, scheme.value, block.place("kv_cache_scheme"))
    producer = method or quantization.producer or "unknown"
    # The resolver's own order, with Python's notion of "present" (0.32.0 utils/torch_utils.py:457).
    nested = block.section("quantization")
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        for section in (nested, block):
            if section is not None and section.value.get(key):
                return _scheme(producer, section.value[key], section.place(key))
    return _quark_scheme(block) if method == "quark" else None


def _quark_scheme(block: Section) -> KVScheme | None:
    """Quark's ways to say it: the layers whose outputs are cached, or output tensors of k_proj and v_proj."""
    export = block.section("export")
    if export is not None and export.value.get("kv_cache_group"):
        return _scheme("quark", export.value["kv_cache_group"], export.place("kv_cache_group"))
    layers = block.section("layer_quant_config")
    for name in layers.value if layers is not None else ():
        layer = layers.section(name) if layers is not None else None
        if layer is not None and name.endswith(("k_proj", "v_proj")) and layer.value.get("output_tensors"):
            return _scheme("quark", layer.value["output_tensors"], layer.place("output_tensors"))
    return None


def other_schemes(
    config: Mapping[str, Any], sidecar: Mapping[str, Any] | None, taken: Quantization | None
) -> tuple[KVScheme, ...]:
    """KV declarations in blocks that vLLM does not take for this checkpoint, in the order it would come to them."""
    blocks = []
    if sidecar is not None and (taken is None or taken.file != SIDECAR):
        blocks.append((Section(sidecar, SIDECAR), SIDECAR, ""))
    for prefix, holder in (("", config), ("text_config.", config.get("text_config"))):
        for key in BLOCKS:
            block = holder.get(key) if isinstance(holder, Mapping) else None
            if isinstance(block, dict) and (taken is None or taken.block != prefix + key):
                blocks.append((Section(block, CONFIG, f"{prefix}{key}."), CONFIG, prefix + key))
    found = []
    for section, file, key in blocks:
        try:
            scheme = find_scheme(_quantization(section, file, key), section)
        except UsageError:
            continue
        if scheme is not None:
            found.append(scheme)
    return tuple(found)


def _scheme(producer: str, raw: Any, where: str) -> KVScheme:
    if not isinstance(raw, Mapping):
        return KVScheme(producer=producer, raw=raw, where=where)

    def typed(key: str, wanted: type[int] | type[str] | type[bool]) -> Any:
        return raw[key] if type(raw.get(key)) is wanted else None

    return KVScheme(
        producer=producer,
        raw=dict(raw),
        where=where,
        num_bits=typed("num_bits", int),
        type=typed("type", str),
        dynamic=typed("dynamic", bool),
        strategy=typed("strategy", str),
        symmetric=typed("symmetric", bool),
    )


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json after `--hf-overrides`: a key is replaced, nested model configs are merged.

    vLLM merges only into nested configuration objects (`text_config` and the like) and replaces plain objects such as
    `quantization_config` (0.32.0 config/model.py:544). UsageError when the merge meets something else.
    """
    result = dict(config)
    for key, value in overrides.items():
        current = result.get(key)
        mergeable = key.endswith("_config") and key not in BLOCKS and isinstance(current, Mapping)
        if mergeable and isinstance(current, Mapping):
            if not isinstance(value, Mapping):
                raise UsageError(f"{OVERRIDES}: {key}: expected an object to merge into config.json's, found {kind(value)}")
            result[key] = _merged(current, value)
        else:
            result[key] = value
    return result


def _merged(current: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(current)
    for key, value in updates.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result
