"""The KV scale tensors in a checkpoint: which layers have them, and whether their values can be used."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from kvguard.checkpoint.json_config import one_line
from kvguard.checkpoint.models import CheckpointFiles, DeclaredScales, Geometry, TensorInfo
from kvguard.facts.scale_names import ScaleName, scale_name
from kvguard.vocabulary import ScaleState

MAX_SCALE_BYTES = 65_536
"""A KV scale is one number, or one per head; a larger tensor of that name is not read."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: kernels divide by a scale, and by a smaller one that is infinite."""

_LAYER_PREFIX = re.compile(r"^(.*?)(?:^|\.)\d+\.")
_DEFAULT_PREFIX = "model.layers"


def declared_scales(files: CheckpointFiles, geometry: Geometry) -> tuple[DeclaredScales, tuple[str, ...]]:
    """The scale tensors of the model's attention layers, and findings about odd ones.

    Layers that should have scales come from the geometry; when it cannot tell, from the tensors themselves. Tensors of
    layers the model does not have (draft layers after the last one) are left out, with a finding.
    """
    found = list(_found(files))
    expected = geometry.layer_indices
    outside = sorted({name.layer for _, _, name, _ in found if expected is not None and name.layer not in expected})
    counted = [item for item in found if expected is None or item[2].layer in expected]
    findings = [*_twice(found)]
    if outside:
        layers = ", ".join(str(layer) for layer in outside[:10]) + (", ..." if len(outside) > 10 else "")
        findings.append(
            f"{counted[0][0] if counted else found[0][0]}: KV scale tensors of layers {layers} are not counted: "
            f"config.json has no attention layer of that index"
        )
    keys_and_values = [item for item in counted if item[2].part != "q"]
    if not keys_and_values and not files.safetensors:
        unseen = f"{files.other_weights[0]}: not safetensors" if files.other_weights else "no weight files"
        where = f"{one_line(unseen)}, so KV scale tensors cannot be seen"
        return DeclaredScales(state=ScaleState.UNKNOWN, where=where), tuple(findings)
    if not keys_and_values:
        return DeclaredScales(state=ScaleState.UNIT_DEFAULT, where="no KV scale tensors in the files"), tuple(findings)
    found_scales = _summary(files, keys_and_values, geometry, query=len(counted) > len(keys_and_values))
    if found_scales.ambiguous:
        findings.append(
            f"{found_scales.where}: several tensors give {', '.join(found_scales.ambiguous[:4])} differently; "
            "the engine keeps whichever it loads last"
        )
    return found_scales, tuple(findings)


Found = tuple[str, str, ScaleName, TensorInfo]
"""File, tensor name, what the name says, and where its values are."""


def _found(files: CheckpointFiles) -> Iterable[Found]:
    for header in files.safetensors:
        for tensor, info in header.tensors.items():
            name = scale_name(tensor)
            if name is not None:
                yield header.file, tensor, name, info


def _twice(found: list[Found]) -> Iterable[str]:
    first: dict[str, str] = {}
    for file, tensor, _, _ in found:
        if tensor in first:
            yield f"{file}: {one_line(tensor)} is also in {first[tensor]}; the engine keeps whichever it loads last"
        first.setdefault(tensor, file)


def _summary(files: CheckpointFiles, found: list[Found], geometry: Geometry, *, query: bool) -> DeclaredScales:
    expected = geometry.layer_indices
    k: dict[int, tuple[float, ...]] = {}
    v: dict[int, tuple[float, ...]] = {}
    invalid: dict[tuple[int, str], str] = {}
    differing: set[tuple[int, str]] = set()
    for _, tensor, name, info in found:
        values = files.scale_values.get(tensor, ())
        problem = _problem(values, info, geometry.kv_heads)
        for side, table in (("k", k), ("v", v)):
            if side in name.part:
                if table.setdefault(name.layer, values) != values:
                    differing.add((name.layer, side))
                table[name.layer] = values
                if problem:
                    invalid[name.layer, side] = problem
    prefix = _prefix(found)
    layers = expected if expected is not None else tuple(sorted(k.keys() | v.keys()))
    missing = []
    for layer in layers:
        sides = [side for side, table in (("k", k), ("v", v)) if layer not in table]
        if sides:
            missing.append(f"{prefix}.{layer} ({', '.join(sides)})")
    names = tuple(dict.fromkeys(file for file, _, _, _ in found))
    forms = tuple(sorted({name.form for _, _, name, _ in found}))
    return DeclaredScales(
        state=_state(invalid=bool(invalid), missing=bool(missing), values=[*k.values(), *v.values()]),
        k=dict(sorted(k.items())),
        v=dict(sorted(v.items())),
        missing_layers=tuple(missing),
        invalid_layers=tuple(f"{prefix}.{layer} ({side} {text})" for (layer, side), text in sorted(invalid.items())),
        ambiguous=tuple(f"{prefix}.{layer} ({side})" for layer, side in sorted(differing)),
        tensors=len({tensor for _, tensor, _, _ in found}),
        files=names,
        forms=forms,
        query=query,
        where=f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {one_line(found[0][1])} ...",
    )


def _problem(values: tuple[float, ...], info: TensorInfo, heads: int | None) -> str | None:
    if info.end - info.start > MAX_SCALE_BYTES:
        return f"has shape {list(info.shape)}, which is no scale"
    if not values:
        return f"has dtype {one_line(info.dtype, 20)} and shape {list(info.shape)}, which is no scale"
    bad = next((value for value in values if not (math.isfinite(value) and value >= SMALLEST_SCALE)), None)
    if bad is not None:
        return f"= {bad:g}"
    fits = heads is None or len(values) in (1, heads)
    return None if fits else f"has {len(values)} values for {heads} KV head{'s' * (heads != 1)}"


def _state(*, invalid: bool, missing: bool, values: list[tuple[float, ...]]) -> ScaleState:
    if invalid:
        return ScaleState.INVALID
    if missing:
        return ScaleState.PARTIAL
    if all(value == 1.0 for layer in values for value in layer):
        return ScaleState.UNIT_DECLARED
    return ScaleState.CHECKPOINT


def _prefix(found: list[Found]) -> str:
    match = _LAYER_PREFIX.match(found[0][1])
    return one_line(match[1]) if match and match[1] else _DEFAULT_PREFIX
