"""KV cache dtypes by vLLM version: which values are accepted, what they cost, which flags touch them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from kvguard.facts.versions import entry_for, examined, in_range, join_ranges, read_data
from kvguard.vocabulary import Frozen, canonical_dtype

FP8_E5M2 = "fp8_e5m2"


class Fact(Frozen):
    """One thing a version does: why it matters, and where it was read."""

    reason: str
    source: str


def accepted(version: str) -> tuple[str, ...] | None:
    """The values `--kv-cache-dtype` takes, as vLLM spells them. None: this version was not examined."""
    if not examined(version):
        return None
    entry = entry_for(version, read_data("kv_dtypes")["accepted"])
    return None if entry is None else tuple(entry["values"])


def accepted_source(version: str) -> str:
    """Where the accepted values of a version were read, "" when they were not."""
    entry = entry_for(version, read_data("kv_dtypes")["accepted"]) if examined(version) else None
    return "" if entry is None else str(entry["source"])


def versions_accepting(dtype: str) -> str | None:
    """The examined versions whose parser takes this spelling ("0.20.0..0.32.0"), or None when none does."""
    ranges = [entry["versions"] for entry in read_data("kv_dtypes")["accepted"] if dtype in entry["values"]]
    return join_ranges(ranges) if ranges else None


def sixteen_bit_not_honoured(version: str, dtype: str, *, compressed_tensors_scheme: bool) -> Fact | None:
    """Why an explicit `bfloat16` or `float16` does not give that cache in this version, or None when it does."""
    for entry in read_data("kv_dtypes")["sixteen_bit_not_honoured"]:
        applies = entry["applies"] == "always" or compressed_tensors_scheme
        if applies and canonical_dtype(dtype) in entry["values"] and in_range(version, entry["versions"]):
            return Fact(reason=entry["reason"], source=entry["source"])
    return None


def nvfp4_unusable(version: str) -> Fact | None:
    """Why `nvfp4` is accepted and cannot run, or None."""
    entry = read_data("kv_dtypes")["nvfp4_unusable"]
    return Fact(reason=entry["reason"], source=entry["source"]) if in_range(version, entry["versions"]) else None


class RuntimeScales(Fact):
    """What `--calculate-kv-scales` calibrates on: "dummy", "first_batch_if_eager" or "startup_error"."""

    input: str


def calculate_kv_scales_versions() -> str:
    """The versions that have `--calculate-kv-scales` (a later one ends with "unrecognized arguments", exit 2)."""
    return str(read_data("kv_dtypes")["calculate_kv_scales"]["flag"])


def has_calculate_kv_scales(version: str) -> bool | None:
    """Whether `--calculate-kv-scales` exists; None when this version was not examined."""
    return in_range(version, calculate_kv_scales_versions()) if examined(version) else None


def calculate_kv_scales_status(version: str) -> str | None:
    """ "accepted", "deprecated" (a warning says so) or "removed" (the engine exits); None when not examined."""
    if not examined(version):
        return None
    facts = read_data("kv_dtypes")["calculate_kv_scales"]
    if not in_range(version, facts["flag"]):
        return "removed"
    return "deprecated" if in_range(version, facts["deprecated"]) else "accepted"


def runtime_scales(version: str, platform: str | None) -> RuntimeScales | None:
    """What fixes the scales under `--calculate-kv-scales` on a platform ("cpu", else any); None without the flag.

    Eager and compiled mode together; `calibration.calculate_flag` says it for one of them.
    """
    found = [entry for mode in ("eager", "compiled") if (entry := flag_entry(version, platform, mode)) is not None]
    found = [entry for entry in found if entry["result"] in _INPUTS]
    if not found:
        return None
    reasons, sources = (dict.fromkeys(entry[key] for entry in found) for key in ("reason", "source"))
    return RuntimeScales(reason="; ".join(reasons), source="; ".join(sources), input=_INPUTS[found[0]["result"]])


_INPUTS = {"crashes": "startup_error", "dummy": "dummy", "real": "first_batch_if_eager"}


def flag_entry(version: str, platform: str | None, mode: str) -> Mapping[str, str] | None:
    """The calibration facts' entry on `--calculate-kv-scales` for a platform and mode ("eager", "compiled")."""
    for entry in read_data("calibration")["flag"]:
        fits = entry["platform"] in ("any", platform) and entry["mode"] in ("any", mode)
        if fits and in_range(version, entry["versions"]):
            return cast("Mapping[str, str]", entry)
    return None


def runtime_scales_disabled(version: str, *, scheme: bool, automatic: bool, hybrid: bool) -> Fact | None:
    """Why vLLM switches `--calculate-kv-scales` off by itself, or None.

    `scheme`: a compressed-tensors `kv_cache_scheme` is declared; `automatic`: no KV cache dtype was typed.
    """
    holds = {
        "compressed_tensors_scheme": scheme,
        "compressed_tensors_scheme_and_auto": scheme and automatic,
        "hybrid": hybrid,
    }
    for entry in read_data("calibration")["flag_ignored"]:
        if holds.get(entry["when"]) and in_range(version, entry["versions"]):
            return Fact(reason=entry["reason"], source=entry["source"])
    return None


class SkipLayers(Frozen):
    """`--kv-cache-dtype-skip-layers`: whether the version has it, for MLA too, and what its entries are."""

    available: bool
    honoured_by_mla: bool
    entries: str
    source: str


def skip_layers(version: str) -> SkipLayers:
    """The skip-layers flag in this version."""
    facts = read_data("kv_dtypes")["skip_layers"]
    return SkipLayers(
        available=in_range(version, facts["versions"]),
        honoured_by_mla=in_range(version, facts["mla"]),
        entries=facts["entries"],
        source=facts["source"],
    )


def boundary_layers(version: str, dtype: str, layers: int) -> int:
    """How many layers at each end keep the model's dtype by themselves (turboquant and ultraquant), usually 0."""
    for entry in read_data("kv_dtypes")["skip_layers"]["boundary"]:
        if dtype.startswith(entry["dtype_prefix"]) and in_range(version, entry["versions"]):
            return min(int(entry["layers"]), layers // 2)
    return 0


def _bits(count: int, bits: int) -> int:
    """Bytes of `count` values of `bits` bits, rounded up."""
    return -(-count * bits // 8)


def _even(size: int) -> int:
    return size + size % 2


# Bytes of one KV head, keys and values together, for one token in one layer; head size in, None when it cannot be.
_PER_HEAD: Mapping[str, Callable[[int], int | None]] = {
    "float32": lambda d: 8 * d,
    "bfloat16": lambda d: 4 * d,
    "float16": lambda d: 4 * d,
    "fp8_e4m3": lambda d: 2 * d,
    FP8_E5M2: lambda d: 2 * d,
    "fp8_inc": lambda d: 2 * d,
    "int8_per_token_head": lambda d: 2 * d + 8,
    "fp8_per_token_head": lambda d: 2 * d + 8,
    "int4_per_token_head": lambda d: d + 8 if d % 2 == 0 else None,
    "nvfp4": lambda d: 2 * (d // 2 + d // 16) if d % 16 == 0 else None,
    "nvfp4_4over6": lambda d: 2 * (d // 2 + d // 16) if d % 16 == 0 else None,
    "turboquant_k8v4": lambda d: _even(d + _bits(d, 4) + 4),
    "turboquant_4bit_nc": lambda d: _even(_bits(d, 4) + 2 + _bits(d, 4) + 4),
    "turboquant_k3v4_nc": lambda d: _even(_bits(d, 3) + 2 + _bits(d, 4) + 4),
    "turboquant_3bit_nc": lambda d: _even(_bits(d, 3) + 2 + _bits(d, 3) + 4),
    "ultraquant_4bit": lambda d: d + 2 * d // 32 if d % 32 == 0 else None,
}

# One latent vector for all heads. The packed layouts are fixed for 512 + 64 values (0.32.0 mla_attention.py:1365).
_LATENT: Mapping[str, Callable[[int], int | None]] = {
    "float32": lambda d: 4 * d,
    "bfloat16": lambda d: 2 * d,
    "float16": lambda d: 2 * d,
    "fp8_e4m3": lambda d: d,
    FP8_E5M2: lambda d: d,
    "fp8_ds_mla": lambda d: 656 if d == 576 else None,
    "nvfp4_ds_mla": lambda d: 352 if d == 576 else None,
}


def bytes_per_token_per_layer(dtype: str, kv_heads: int, head_size: int, *, mla: bool = False) -> float | None:
    """Cache bytes one token takes in one attention layer, scales inside the page included, padding not.

    `kv_heads` and `head_size` are of the part that is asked about (a model or one rank); for MLA `head_size` is the
    latent size (kv_lora_rank + qk_rope_head_dim) and `kv_heads` does not count. None: this layout is not modelled.
    """
    formula = (_LATENT if mla else _PER_HEAD).get(canonical_dtype(dtype))
    size = None if formula is None else formula(head_size)
    if size is None:
        return None
    return float(size if mla else size * kv_heads)


BYTES_DTYPES = tuple(_PER_HEAD)
"""Dtypes with a per-head formula, in the order to show them."""
