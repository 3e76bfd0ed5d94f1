"""Checkpoints for tests: safetensors bytes from values, directories, and files in memory."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvguard.checkpoint.models import CheckpointFiles
from kvguard.checkpoint.safetensors_header import parse_header
from kvguard.vocabulary import UsageError

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED_TENSORS = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}}
MODELOPT = {
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }
}

Tensors = Mapping[str, tuple[str, list[int], bytes]]
"""Name -> (dtype, shape, bytes)."""


def f32(*values: float, shape: list[int] | None = None) -> tuple[str, list[int], bytes]:
    """A float32 tensor of these values."""
    return "F32", [len(values)] if shape is None else shape, struct.pack(f"<{len(values)}f", *values)


def scales(layers: Any, k: float = 0.05, v: float = 0.02, name: str = "model.layers.{}.self_attn.{}_scale") -> Tensors:
    """One key and one value scale a layer."""
    return {name.format(layer, side): f32(value) for layer in layers for side, value in (("k", k), ("v", v))}


def safetensors(tensors: Tensors) -> bytes:
    """The bytes of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def files(config: Mapping[str, Any], tensors: Tensors | None = None, sidecar: Any = None) -> CheckpointFiles:
    """A checkpoint in memory, as `read_checkpoint` would give it."""
    content = safetensors(tensors or {})
    decoded = {
        name: struct.unpack(f"<{len(data) // 4}f", data)
        for name, (dtype, shape, data) in (tensors or {}).items()
        if dtype == "F32" and math.prod(shape) <= 64
    }
    return CheckpointFiles(
        directory="/models/m",
        config_json=json.dumps(config).encode(),
        hf_quant_config_json=None if sidecar is None else json.dumps(sidecar).encode(),
        safetensors=(parse_header(content, "model.safetensors", len(content)),),
        scale_values=decoded,
    )


def write(directory: Path, config: Any, tensors: Tensors | None = None, **more: bytes | str) -> Path:
    """A model directory; `more` are further files, "__" in a name standing for ".". With other weights, no safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if tensors is not None or not any(name.endswith(("__bin", "__gguf", "__safetensors")) for name in more):
        (directory / "model.safetensors").write_bytes(safetensors(tensors or {}))
    for name, content in more.items():
        path = directory / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return directory


def refusal(call: Callable[[], object]) -> str:
    """The text of the UsageError that a call raises, "" when it raises nothing; any other exception escapes."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""
