"""Checkpoints small enough to write in a test, with the weights that overlays look for, and digests of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_fakes import SMOLLM2, Tensors, f32, write
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.models import CheckpointFiles, Declared
from kvguard.engine.checkpoint_files import FileDigest, digest_files, read_checkpoint
from kvguard.reference.scales import Scales

LAYERS = 3
CONFIG = {**SMOLLM2, "num_hidden_layers": LAYERS}


def weights(prefix: str = "model.layers", projection: str = "k_proj", layers: int = LAYERS) -> Tensors:
    """One attention weight a layer, and an embedding."""
    found = {f"{prefix}.{index}.self_attn.{projection}.weight": f32(0.5, 0.25) for index in range(layers)}
    return {"model.embed_tokens.weight": f32(1.0), **found}


def checkpoint(
    directory: Path, config: Mapping[str, Any] = CONFIG, tensors: Tensors | None = None, **more: bytes | str
) -> tuple[CheckpointFiles, Declared, tuple[FileDigest, ...]]:
    """A model directory on disk, read and digested."""
    write(directory, config, weights() if tensors is None else tensors, **more)
    return reread(directory)


def reread(directory: Path) -> tuple[CheckpointFiles, Declared, tuple[FileDigest, ...]]:
    """What a model directory holds now."""
    files = read_checkpoint(str(directory))
    return files, declare(files), digest_files(str(directory), files)


def scales(layers: int = LAYERS, k: float = 0.05, v: float = 0.02) -> Scales:
    """The same two scales for every layer."""
    return Scales(k=dict.fromkeys(range(layers), k), v=dict.fromkeys(range(layers), v))
