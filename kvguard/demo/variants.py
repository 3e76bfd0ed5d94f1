"""Checkpoints that differ from a base in what they declare about the KV cache, for the demo and the tests.

The weights stay the base's (links to its files); scale tensors go into one extra safetensors file, written by hand,
so that a variant takes milliseconds and needs neither numpy nor torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvguard.demo.cache import exclusive
from kvguard.reference.overlay import safetensors_bytes
from kvguard.vocabulary import UsageError

K_SCALE = 0.05
V_SCALE = 0.02

_RUINED = 0.002  # so small that most keys and many values saturate: answers turn to noise, and stay finite

_WEIGHTS = "model.safetensors"
_SCALES_FILE = "kv_scales.safetensors"
_INDEX = "model.safetensors.index.json"

_KV_SCHEME = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}

_COMPRESSED_TENSORS: Mapping[str, Any] = {
    "quantization_config": {
        "config_groups": {},
        "format": "dense",
        "ignore": [],
        "kv_cache_scheme": _KV_SCHEME,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
}

# With the ignore list the weights stay dense and only the KV cache becomes FP8; without it dense weights are read as
# FP8 and the answers are garbage (tried on 0.32.0).
_MODELOPT: Mapping[str, Any] = {
    "quantization_config": {
        "ignore": ["*proj*", "lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.40.0"},
        "quant_algo": "FP8",
        "quant_method": "modelopt",
    }
}


@dataclass(frozen=True)
class Variant:
    """What one kind adds: keys of config.json, and scale tensors as (k, v) for each layer (None: no tensors)."""

    config: Mapping[str, Any]
    scales: Callable[[int], list[tuple[float, float] | None]] = lambda layers: [None] * layers


def _every_layer(k: float, v: float) -> Callable[[int], list[tuple[float, float] | None]]:
    return lambda layers: [(k, v)] * layers


def _first_half(layers: int) -> list[tuple[float, float] | None]:
    return [(K_SCALE, V_SCALE) if layer < layers // 2 else None for layer in range(layers)]


VARIANTS: Mapping[str, Variant] = {
    "plain": Variant({}),
    "kv_scheme_scales": Variant(_COMPRESSED_TENSORS, _every_layer(K_SCALE, V_SCALE)),
    "kv_scheme_no_scales": Variant(_COMPRESSED_TENSORS),
    "kv_scheme_half_scales": Variant(_COMPRESSED_TENSORS, _first_half),
    "kv_scheme_zero_scales": Variant(_COMPRESSED_TENSORS, _every_layer(0.0, 0.0)),
    "kv_scheme_nan_scales": Variant(_COMPRESSED_TENSORS, _every_layer(math.nan, math.nan)),
    "kv_scheme_inf_scales": Variant(_COMPRESSED_TENSORS, _every_layer(math.inf, math.inf)),
    "kv_scheme_ruined_scales": Variant(_COMPRESSED_TENSORS, _every_layer(_RUINED, _RUINED)),
    "modelopt": Variant(_MODELOPT),
    "toplevel_key": Variant({"kv_cache_dtype": "fp8"}),
}
"""Every kind of checkpoint the demo and the tests use, by name."""


def make_variant(base: Path, kind: str, out: Path) -> Path:
    """Write the variant `kind` of the checkpoint `base` as the directory `out`; returns `out`.

    `base` is a checkpoint in one safetensors file. The same arguments give the same bytes; an `out` that already holds
    them is left alone, so that an engine may be reading it; any other is replaced. UsageError for an unknown kind or a
    base that is not such a checkpoint.
    """
    if kind not in VARIANTS:
        raise UsageError(f"variant {kind!r} is not one of {', '.join(VARIANTS)}")
    base = base.resolve()
    links = {file.name: file for file in sorted(base.iterdir()) if file.is_file() and file.name != "config.json"}
    files = variant_files(base, VARIANTS[kind])
    if _holds(out, links, files):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        unfinished = Path(work) / "variant"
        unfinished.mkdir()
        for name, file in links.items():
            (unfinished / name).symlink_to(file)
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        _replace(unfinished, out)
    return out


def ensure_variants(base: Path) -> dict[str, Path]:
    """Every variant of `base`, by kind, in a directory beside it."""
    directory = base.with_name(f"{base.name}-variants")
    with exclusive(directory.with_name(f".{directory.name}.lock"), f"the variants in {directory}"):
        return {kind: make_variant(base, kind, directory / kind) for kind in VARIANTS}


def variant_files(base: Path, variant: Variant) -> dict[str, bytes]:
    """The files, by name, in which `variant` differs from `base`: config.json, and scale tensors with their index."""
    config = _read_config(base)
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise UsageError(f"{base / 'config.json'}: num_hidden_layers must be an integer, found {layers!r}")
    files = {"config.json": _json_bytes({**config, **variant.config})}
    tensors = scale_tensors(variant.scales(layers))
    if tensors:
        files[_SCALES_FILE] = safetensors_bytes(tensors)
        files[_INDEX] = _json_bytes(_index(base / _WEIGHTS, tensors))
    return files


def scale_tensors(scales: list[tuple[float, float] | None]) -> dict[str, float]:
    """Scale tensors by name for one (k, v) a layer, in the order of the layers; layers with None have none."""
    tensors = {}
    for layer, pair in enumerate(scales):
        if pair is not None:
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = pair[0]
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = pair[1]
    return tensors


def safetensors_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file of our own making (kvguard.engine reads untrusted ones)."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    return header


def _index(weights: Path, tensors: Mapping[str, float]) -> dict[str, Any]:
    header = safetensors_header(weights)
    names = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    size = sum(end - begin for begin, end in names.values()) + 4 * len(tensors)
    weight_map = dict.fromkeys(names, weights.name) | dict.fromkeys(tensors, _SCALES_FILE)
    return {"metadata": {"total_size": size}, "weight_map": weight_map}


def _read_config(base: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{base / 'config.json'}: need a checkpoint's config.json: {error}") from error
    if not (base / _WEIGHTS).is_file():
        raise UsageError(f"{base}: need {_WEIGHTS} (a checkpoint in one file), found none")
    return config


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _holds(out: Path, links: Mapping[str, Path], files: Mapping[str, bytes]) -> bool:
    """Whether the directory `out` consists of exactly these links and files."""
    if not out.is_dir() or {entry.name for entry in out.iterdir()} != {*links, *files}:
        return False
    linked = all((out / name).is_symlink() and (out / name).readlink() == file for name, file in links.items())
    return linked and all((out / name).read_bytes() == content for name, content in files.items())


def _replace(source: Path, target: Path) -> None:
    """Put the directory `source` at `target`, whatever is there now."""
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.exists():
        shutil.rmtree(target)
    os.rename(source, target)
