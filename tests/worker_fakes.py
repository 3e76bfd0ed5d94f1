"""A vLLM worker in miniature: layers with tensors as the reader inside the engine meets them, and no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 3, 64, 128
WIDTHS = {"torch.bfloat16": 2, "torch.float16": 2, "torch.uint8": 1, "torch.float32": 4}


class Storage:
    """Memory that tensors may share."""

    def __init__(self, size: int) -> None:
        self._size = size

    def data_ptr(self) -> int:
        return id(self)

    def nbytes(self) -> int:
        return self._size


class Tensor:
    """What the reader uses of a torch.Tensor: dtype, shape, storage, and the way to a list of floats."""

    def __init__(self, shape: Sequence[int], dtype: str, storage: Storage | None = None, values: Sequence[float] = ()) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._storage = storage or Storage(self.numel() * WIDTHS[dtype])
        self._values = list(values)

    def numel(self) -> int:
        return math.prod(self.shape)

    def untyped_storage(self) -> Storage:
        return self._storage

    def detach(self) -> Self:
        return self

    def float(self) -> Self:
        return self

    def reshape(self, size: int) -> Self:
        assert size == -1
        return self

    def cpu(self) -> Self:
        return self

    def tolist(self) -> list[float]:
        return self._values


def scale(*values: float) -> Tensor:
    """A float32 tensor of scales, on the device."""
    return Tensor([len(values)], "torch.float32", values=values)


class Attention:
    """An attention layer; its class name is reported."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Backend:
    """An attention backend."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        return self._name


def attention(
    dtype: str = "fp8_e4m3", *, k: float = 0.05, v: float = 0.02, blocks: int = 728, backend: str = "CPU_ATTN", **more: Any
) -> Attention:
    """A layer with a cache of `blocks` blocks; a 16-bit dtype gives it half of them."""
    quantized = dtype.startswith("fp8")
    shape = (blocks if quantized else blocks // 2, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    attributes = {
        "kv_cache": Tensor(shape, "torch.uint8" if quantized else f"torch.{dtype}"),
        "kv_cache_dtype": dtype,
        "attn_backend": Backend(backend),
        "_k_scale": scale(k),
        "_v_scale": scale(v),
        "_q_scale": scale(1.0),
        "_k_scale_float": k,
        "_v_scale_float": v,
        "_q_scale_float": 1.0,
        "sliding_window": None,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
    }
    return Attention(**{**attributes, **more})


def model(count: int = 30, dtype: str = "fp8_e4m3", **more: Any) -> dict[str, Attention]:
    """The layers of a model, by name."""
    return {f"model.layers.{index}.self_attn.attn": attention(dtype, **more) for index in range(count)}


def state(
    layers: Mapping[str, Any], *, rank: int = 0, cache_dtype: str = "auto", blocks: int = 728, **parallel: Any
) -> dict[str, Any]:
    """The attributes of a worker of vLLM's that the reader uses."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "data_parallel_rank": 0}
    return {
        "rank": rank,
        "model_runner": SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=dict(layers))),
        "vllm_config": SimpleNamespace(
            parallel_config=SimpleNamespace(**{"world_size": 1, **sizes, **parallel}),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype, num_gpu_blocks=blocks, block_size=BLOCK_SIZE),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=2048),
            model_config=SimpleNamespace(dtype="torch.bfloat16", max_model_len=2048),
        ),
    }
