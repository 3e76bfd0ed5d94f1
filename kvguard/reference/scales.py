"""From what keys and values span to the scales of an e4m3 cache, and what calibration changes.

An e4m3 cache stores x ÷ scale, so scale = max |x| × headroom ÷ 448 puts the largest value seen at 448 ÷ headroom.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from kvguard.facts.calibration import E4M3_LARGEST
from kvguard.files import printable
from kvguard.reference.ranges import Ranges, Side
from kvguard.vocabulary import Frozen, Json, PolicyRefusal, UsageError

DEFAULT_HEADROOM = 2.0
"""How far later text may exceed the calibration set before it saturates.

Measured (SmolLM2-135M, 810 generated tokens, e4m3 to nearest, mean |Δ logprob| against the 16-bit pass): 0.11 for every
headroom from 1 to 16 and for scale 1.0, 0.13 at 0.75, 0.32 at 0.5. Room costs nothing, too little of it does.
"""

MAX_HEADROOM = 64.0

_STEPS = 2**8  # a bfloat16's significant bits
_KEYS = ("k", "v", "layers")
_INDEX = re.compile(r"(?:^|\.)(\d{1,9})(?:\.|$)")


class Scales(Frozen):
    """Scales of keys and values by layer index."""

    k: dict[int, float]
    v: dict[int, float]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers' indices, ascending."""
        return tuple(sorted(self.k))

    def as_document(self) -> dict[str, Json]:
        """As `scales.json` holds them: lists in the order of the layers, with the layers' indices."""
        layers = self.layers
        return {"layers": list(layers), "k": [self.k[i] for i in layers], "v": [self.v[i] for i in layers]}


def scale_of(largest: float, headroom: float) -> float:
    """The scale for values up to `largest`: rounded up to eight significant bits, which a bfloat16 holds exactly.

    Rounded, so that equal calibrations have equal digests, and so that loaders that keep scales in the model's dtype (those
    of ModelOpt, fp8 and Quark checkpoints; seen on 0.32.0) hold what the file says; up, so that the headroom asked for is
    there. It moves a scale by less than 1 %, e4m3's own steps are 6 to 12 %.
    """
    mantissa, exponent = math.frexp(largest * headroom / E4M3_LARGEST)
    return math.ldexp(math.ceil(mantissa * _STEPS) / _STEPS, exponent)


def fits_bfloat16(scale: float) -> bool:
    """Whether a bfloat16 holds this scale as its float32 does."""
    return struct.pack(">f", scale)[2:] == b"\0\0"


def scales_from(ranges: Ranges, headroom: float) -> Scales:
    """One scale for the keys and one for the values of each layer, from max |x| of all heads.

    Raises PolicyRefusal, naming layer and side, for values that are not finite or all zero, or so far from 1 that no
    float32 holds their scale.
    """
    k: dict[int, float] = {}
    v: dict[int, float] = {}
    for name, layer in ranges.items():
        index = layer_index(name)
        for word, side, table in (("key", layer.k, k), ("value", layer.v, v)):
            if not (math.isfinite(side.largest) and side.largest > 0):
                raise PolicyRefusal(f"layer {name}: the largest {word} is {side.largest}, from which no scale follows")
            table[index] = scale_of(side.largest, headroom)
            if not _positive(table[index]):
                raise PolicyRefusal(f"layer {name}: the largest {word} is {side.largest}, whose scale no float32 holds")
    return Scales(k=k, v=v)


def layer_index(name: str) -> int:
    """The index in a layer's name ("model.layers.3.self_attn.attn"). PolicyRefusal when there is not exactly one."""
    found = _INDEX.findall(name)
    if len(found) != 1:
        raise PolicyRefusal(f"layer {name}: no single index in its name, so its scale tensors cannot be named")
    return int(found[0])


def unit_scales(layers: tuple[int, ...]) -> Scales:
    """1.0 for every layer."""
    return Scales(k=dict.fromkeys(layers, 1.0), v=dict.fromkeys(layers, 1.0))


def parse_scales(document: Any, where: str) -> Scales:
    """Scales from a JSON document {"k": […], "v": […], "layers": […]}; `layers` defaults to 0, 1, 2, …

    Raises UsageError naming file and key for anything else, for other keys, and for scales that are not finite and
    positive as the float32 that is written.
    """
    if not isinstance(document, dict):
        raise UsageError(f'{where}: required is an object {{"k": […], "v": […]}} with one number for each layer')
    if unknown := [key for key in document if key not in _KEYS]:
        raise UsageError(f"{where}: {printable(str(unknown[0]), 60)}: unknown key; known are {', '.join(_KEYS)}")
    sides: dict[str, list[float]] = {}
    for key in ("k", "v"):
        values = document.get(key)
        if not isinstance(values, list) or not values:
            raise UsageError(f"{where}: {key}: required is a list with one number for each attention layer")
        for position, value in enumerate(values):
            if not _positive(value):
                found = printable(str(value)[:40])
                raise UsageError(f"{where}: {key}[{position}]: required is a finite float32 above 0, found {found}")
        sides[key] = [float(value) for value in values]
    layers = document.get("layers", list(range(len(sides["k"]))))
    plain = isinstance(layers, list) and all(type(item) is int and item >= 0 for item in layers)
    if not plain or len({len(layers), len(sides["k"]), len(sides["v"])}) != 1 or len(set(layers)) != len(layers):
        raise UsageError(f"{where}: layers: required are as many different layer indices as there are scales in k and in v")
    return Scales(k=dict(zip(layers, sides["k"], strict=True)), v=dict(zip(layers, sides["v"], strict=True)))


def _positive(value: Any) -> bool:
    """Whether a value is a number that stays finite and above 0 as a float32."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        (held,) = struct.unpack("<f", struct.pack("<f", value))
    except (OverflowError, struct.error):  # a number that no float32, a whole one that no float holds
        return False
    return math.isfinite(held) and held > 0


def report_layers(ranges: Ranges, scales: Scales) -> list[dict[str, Json]]:
    """What was measured, layer by layer: max |x| (of all heads and of each), the scale, and what scale 1.0 would lose.

    Shares are of all numbers seen: `saturated` above 448, `underflowed` below the smallest e4m3 number, `subnormal` with
    fewer than three bits of mantissa.
    """
    rows: list[dict[str, Json]] = []
    for name, layer in ranges.items():
        index = layer_index(name)
        rows.append({"layer": index, "name": name, "k": _row(layer.k, scales.k[index]), "v": _row(layer.v, scales.v[index])})
    return rows


def _row(side: Side, scale: float) -> dict[str, Json]:
    return {
        "amax": side.largest,
        "amax_by_head": list(side.amax),
        "scale": scale,
        "at_scale_one": {
            "saturated": _share(side.saturated, side.count),
            "underflowed": _share(side.underflowed, side.count),
            "subnormal": _share(side.subnormal, side.count),
        },
    }


def _share(count: int, of: int) -> float:
    return float(f"{count / of:.4g}") if of else 0.0
