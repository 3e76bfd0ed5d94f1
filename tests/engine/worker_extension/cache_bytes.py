"""A worker extension of a user's own, loaded by the engine: a digest of every byte of the KV cache."""

import hashlib
from typing import Any

import torch


class CacheBytes:
    """Mixed into vLLM's worker."""

    def cache_digests(self) -> list[str]:
        """SHA-256 of each storage that holds layers' caches, blocks in use or not."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()  # type: ignore[attr-defined]
        caches = [layer.kv_cache for layer in layers if hasattr(layer, "kv_cache")]
        tensors = [each for cache in caches for each in (cache if isinstance(cache, list | tuple) else [cache])]
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        return [_digest(storage) for storage in storages.values()]


def _digest(storage: Any) -> str:
    every_byte = torch.empty(0, dtype=torch.uint8).set_(storage)
    return hashlib.sha256(memoryview(every_byte.numpy())).hexdigest()
