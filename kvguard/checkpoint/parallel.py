"""What one GPU holds of a token and of a sequence when ranks share a model: heads by tensor, layers by pipeline parallelism.

Data-parallel replicas share nothing: each has a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from kvguard.checkpoint.cost import rank_share
from kvguard.checkpoint.geometry import boundary, windowed_layers
from kvguard.checkpoint.models import Geometry
from kvguard.vocabulary import Frozen


class Ranks(Frozen):
    """How an engine is spread out; `data` counts replicas."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def gpus(self) -> int:
        """How many GPUs that takes."""
        return self.tensor * self.pipeline * self.data


def per_gpu(geometry: Geometry, dtype: str, ranks: Ranks, cost: Callable[[Geometry], float | None]) -> float | None:
    """Bytes on the GPU that holds most, of what `cost` says a part of the model takes; None when not modelled.

    That GPU decides: all ranks of an engine have as many blocks as the one with the fewest.
    """
    if ranks.tensor == ranks.pipeline == 1:
        return cost(geometry)
    share = None if geometry.hybrid else rank_share(geometry, ranks.tensor)
    parts = stages(geometry, dtype, ranks.pipeline)
    costs = [cost(part) for part in parts or ()]
    known = [one for one in costs if one is not None]
    return max(known) * share if share is not None and known and len(known) == len(costs) else None


def stages(geometry: Geometry, dtype: str, count: int) -> tuple[Geometry, ...] | None:
    """The model's pipeline stages; None when the config does not say which layers they hold.

    Layers that do not divide go one each to the last stages but the very last (0.32.0 distributed/utils.py:126, without
    VLLM_PP_LAYER_PARTITION). A format that keeps both ends at 16 bit makes stages differ in a way that is not modelled.
    """
    if count == 1:
        return (geometry,)
    total, indices = geometry.layers, geometry.layer_indices
    if not total or indices is None or count > total or boundary(geometry, dtype):
        return None
    sizes = [total // count] * count
    for place in range(2, total % count + 2):
        sizes[-place] += 1
    windowed = set(windowed_layers(geometry))
    parts, start = [], 0
    for size in sizes:
        inside = tuple(index for index in indices if start <= index < start + size)
        start += size
        if inside:  # a stage whose layers all share the keys and values of others holds no cache
            held = {"attention_layers": len(inside), "sliding_layers": len(windowed & set(inside)), "layer_indices": inside}
            parts.append(geometry.model_copy(update=held))
    return tuple(parts)
