"""Where the scales that the engine holds come from: its tensors against the checkpoint's."""

from __future__ import annotations

import math
import struct
from enum import Enum

from kvguard.checkpoint.models import Declared
from kvguard.evidence.replies import LayerReply, RankReply, TensorReading
from kvguard.evidence.tensors import SCALE_TOLERANCE, invalid_scales
from kvguard.vocabulary import DYNAMIC_SCALE_DTYPES, ScaleState, width_bits

_FLOAT32_MAX = 3.4e38
_SHOWN = 4
_ROUNDED = " to within 2^-8: the loader keeps them in bfloat16"


class _Origin(Enum):
    LOADED = "as in the files"
    UNIT_LOADED = "1.0 as in the files"
    UNIT = "1.0, not in the files"
    LOST = "1.0, the files say otherwise"
    OTHER = "neither the files' nor 1.0"
    ABSENT = "no scale in the engine"


def classify_scales(
    reading: TensorReading, declared: Declared | None, calculated: bool, calibrated: bool = False
) -> tuple[ScaleState, str]:
    """The state of the quantized layers' scales and a sentence about it.

    `calculated`: the engine runs with --calculate-kv-scales. `calibrated`: the files' scales are a calibration of
    kvguard's. Without `declared`, 1.0 cannot be told from 1.0 by default, so most states are unknown.
    """
    quantized = [(r, layer) for r, layer in reading.layers() if _narrow(layer)]
    if not quantized:
        return ScaleState.NOT_QUANTIZED, "no layer is quantized"
    if bad := invalid_scales(reading, calculated):
        return ScaleState.INVALID, _list(bad)
    if all(layer.dtype in DYNAMIC_SCALE_DTYPES for _, layer in quantized):
        return ScaleState.RUNTIME_DYNAMIC, "this format computes its scales as it writes"
    origins = [(_origin(reply, layer, declared), layer.index) for reply, layer in quantized]
    kinds = {kind for kind, _ in origins}
    if _Origin.ABSENT in kinds:
        return ScaleState.UNKNOWN, f"the engine shows no k or v scale in layers {_layers(origins, _Origin.ABSENT)}"
    if _Origin.OTHER in kinds and calculated:
        still = _layers(origins, _Origin.UNIT, _Origin.LOST, _Origin.UNIT_LOADED)
        if still:
            return ScaleState.PARTIAL, f"calculated, but layers {still} are still 1.0"
        return ScaleState.RUNTIME_ONCE, "calculated by the engine from its first forward pass"
    if declared is None:
        one = kinds == {_Origin.UNIT}
        found = "every scale is 1.0" if one else "scales other than 1.0"
        return ScaleState.UNKNOWN, f"{found}; without the checkpoint's files their origin cannot be told"
    if _Origin.OTHER in kinds:
        return ScaleState.UNKNOWN, f"layers {_layers(origins, _Origin.OTHER)}: values neither the files' nor 1.0"
    if kinds <= {_Origin.LOADED, _Origin.UNIT_LOADED}:
        rounded = _ROUNDED if any(_is_rounded(reply, layer, declared) for reply, layer in quantized) else ""
        if calibrated:
            return ScaleState.RUNTIME_ONCE, f"equal to the calibration's scale tensors{rounded}"
        return _loaded(kinds, rounded)
    if kinds <= {_Origin.UNIT, _Origin.LOST}:
        return _unit(kinds, calculated, declared)
    missing = _layers(origins, _Origin.UNIT, _Origin.LOST)
    in_files = f"; missing in the files: {_list(declared.scales.missing_layers)}" if declared.scales.missing_layers else ""
    return ScaleState.PARTIAL, f"layers {missing} run at 1.0 by default{in_files}"


def _loaded(kinds: set[_Origin], rounded: str) -> tuple[ScaleState, str]:
    if kinds == {_Origin.UNIT_LOADED}:
        exact = "the checkpoint's scales are exactly 1.0"
        return ScaleState.UNIT_DECLARED, f"1.0, the checkpoint's scales{rounded}" if rounded else exact
    return ScaleState.CHECKPOINT, f"equal to the checkpoint's scale tensors{rounded}"


def _unit(kinds: set[_Origin], calculated: bool, declared: Declared) -> tuple[ScaleState, str]:
    if _Origin.LOST in kinds:
        return ScaleState.UNIT_DEFAULT, "the checkpoint has scales, the engine did not load them"
    if calculated:
        return ScaleState.UNIT_DEFAULT, "no forward pass has calculated scales yet"
    if declared.scales.state is ScaleState.UNKNOWN:
        return ScaleState.UNIT_DEFAULT, f"every scale is 1.0; {declared.scales.where}"
    return ScaleState.UNIT_DEFAULT, "the checkpoint has no scales"


def _origin(reply: RankReply, layer: LayerReply, declared: Declared | None) -> _Origin:
    """One layer's origin; keys and values must share it, else the worse of the two counts."""
    if not layer.k_scale or not layer.v_scale:
        return _Origin.ABSENT
    index = int(layer.index) if layer.index.isdigit() else -1
    scales = declared.scales if declared is not None else None
    stored = (scales.k.get(index), scales.v.get(index)) if scales is not None else (None, None)
    both = {
        _side(layer.k_scale, stored[0], reply, layer),
        _side(layer.v_scale, stored[1], reply, layer),
    }
    for kind in (_Origin.OTHER, _Origin.LOST, _Origin.UNIT, _Origin.LOADED):
        if kind in both:
            return kind
    return _Origin.UNIT_LOADED


def _is_rounded(reply: RankReply, layer: LayerReply, declared: Declared) -> bool:
    """Whether a scale of this layer is the file's in bfloat16 only."""
    index = int(layer.index)
    for values, table in ((layer.k_scale or (), declared.scales.k), (layer.v_scale or (), declared.scales.v)):
        mine = _of_this_rank(table.get(index, ()), len(values), reply)
        if mine is not None and not _equal(values, mine) and _equal(values, tuple(map(_bfloat16, mine))):
            return True
    return False


def _side(values: tuple[float, ...], stored: tuple[float, ...] | None, reply: RankReply, layer: LayerReply) -> _Origin:
    unit = all(value == 1.0 for value in values)
    if stored is None:
        return _Origin.UNIT if unit else _Origin.OTHER
    mine = _of_this_rank(stored, len(values), reply)
    # ModelOpt's loader keeps scales in the model's dtype (0.32.0 quantization/modelopt.py; seen on bfloat16).
    if mine is not None and (_equal(values, mine) or _equal(values, tuple(map(_bfloat16, mine)))):
        return _Origin.UNIT_LOADED if unit else _Origin.LOADED
    # MI300-class ROCm stores e4m3fnuz, and vLLM doubles loaded scales there (0.32.0 quantization/kv_cache.py).
    if mine is not None and (layer.backend or "").startswith("ROCM") and _equal(values, tuple(2 * v for v in mine)):
        return _Origin.LOADED
    return _Origin.LOST if unit else _Origin.OTHER


def _of_this_rank(stored: tuple[float, ...], count: int, reply: RankReply) -> tuple[float, ...] | None:
    """The stored values that belong to this rank's `count` scales: all, one for all, or this rank's heads."""
    if len(stored) == count:
        return stored
    if len(stored) == 1:
        return stored * count
    if count and len(stored) == count * (reply.tp_size or 1) and reply.tp_rank is not None:
        return stored[reply.tp_rank * count : (reply.tp_rank + 1) * count]
    return None


def _equal(values: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    return len(values) == len(expected) and all(
        math.isclose(a, b, rel_tol=SCALE_TOLERANCE) for a, b in zip(values, expected, strict=True)
    )


def _bfloat16(value: float) -> float:
    """The nearest bfloat16, ties to even: the upper half of a float32."""
    if not math.isfinite(value) or abs(value) > _FLOAT32_MAX:
        return value
    bits = int.from_bytes(struct.pack(">f", value), "big")
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack(">f", (bits & 0xFFFF0000).to_bytes(4, "big"))[0])


def _narrow(layer: LayerReply) -> bool:
    return (width_bits(layer.dtype or "") or 16) < 16


def _layers(origins: list[tuple[_Origin, str]], *kinds: _Origin) -> str:
    return _list(tuple(dict.fromkeys(index for kind, index in origins if kind in kinds)))


def _list(items: tuple[str, ...]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
