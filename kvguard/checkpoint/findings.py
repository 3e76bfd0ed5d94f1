"""What a person should know of a checkpoint's declarations: keys that nobody reads, scales that are missing, files unseen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvguard.checkpoint.json_config import Section, kind, one_line
from kvguard.checkpoint.models import CheckpointFiles, DeclaredScales, Geometry, KVScheme, Quantization
from kvguard.checkpoint.quantization import SIDECAR, effective_method
from kvguard.facts.kv_resolution import COMPRESSED_TENSORS, never_resolves
from kvguard.facts.producers import intended_scale
from kvguard.facts.versions import NEWEST
from kvguard.vocabulary import ScaleState

UNIT_SCALE = "the files have no KV scale tensors: scale 1.0 is used"
"""The finding about a declaration without scales, which holds where a cache with stored scales runs."""

# Keys that look as if they set the KV cache and that no examined vLLM reads.
_IGNORED_KEYS = ("kv_cache_dtype", "cache_dtype", "kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_config")


def not_taken(other: KVScheme, quantization: Quantization | None) -> str:
    """A declaration that stands where vLLM does not look."""
    before = f" while {quantization.where} exists" if quantization is not None else ""
    return f"{other.where} = {kind(other.raw)} also declares a KV cache; vLLM does not read it{before}"


def ignored_keys(config: Section) -> tuple[str, ...]:
    """Keys that look as if they set the KV cache."""
    places = [config]
    for name in ("text_config", "quantization_config"):
        part = config.section(name) if isinstance(config.value.get(name), dict) else None
        if part is not None:
            places.append(part)
    found = []
    for section in places:
        ours = ("kv_cache_dtype", "cache_dtype") if section.prefix.startswith("quantization") else _IGNORED_KEYS
        found += [
            f"{section.place(key)}={section.value[key]!r} is ignored by vLLM: it does not read that key"
            for key in ours
            if isinstance(section.value.get(key), str | int | float | dict | list)
        ]
    return tuple(text if len(text) <= 300 else text[:297] + "..." for text in found)


def quantization_findings(
    quantization: Quantization | None, scheme: KVScheme | None, sidecar: Mapping[str, Any] | None
) -> tuple[str, ...]:
    """What the quantization block leads to, or does not."""
    if quantization is None:
        return ()
    findings = []
    if sidecar is not None and quantization.file != SIDECAR:
        findings.append(f"{SIDECAR}: not read by vLLM, because {quantization.where} exists")
    method = effective_method(quantization, NEWEST)
    if method is None:
        findings.append(f"{quantization.where}: no quant_method, so vLLM applies no KV declaration from it")
    never = never_resolves(method) if method else None
    if scheme is not None and never is not None:
        findings.append(f"{scheme.where}: {never.reason}")
    if scheme and (method or "").startswith("modelopt") and scheme.num_bits == 8 and scheme.dynamic is not False:
        findings.append(f'{scheme.where}: without "dynamic": false vLLM leaves an 8-bit scheme unused')
    return tuple(findings)


def scale_state_findings(scales: DeclaredScales, scheme: KVScheme | None, quantization: Quantization | None) -> tuple[str, ...]:
    """Scales that are missing, unusable, or 1.0 on purpose."""
    findings = []
    for title, places in (("missing in", scales.missing_layers), ("not usable in", scales.invalid_layers)):
        if places:
            more = f" and {len(places) - 4} more" if len(places) > 4 else ""
            findings.append(f"{scales.where}: KV scales are {title} {', '.join(places[:4])}{more}")
    if scheme and scales.state is ScaleState.UNIT_DEFAULT:
        silent = ", and vLLM prints no warning" if scheme.producer == COMPRESSED_TENSORS else ""
        findings.append(f"{scheme.where}: declared, but {UNIT_SCALE}{silent}")
    if scheme and quantization:
        intended = intended_scale(quantization.producer, quantization.producer_version, scales.state.value)
        if intended is not None:
            findings.append(f"{quantization.where}: {intended.reason}")
    return tuple(findings)


def weight_findings(files: CheckpointFiles, geometry: Geometry) -> tuple[str, ...]:
    """What cannot be seen of the weights, or computed from the architecture."""
    findings = []
    if files.other_weights and not files.safetensors:
        findings.append(f"{files.other_weights[0]}: not safetensors, so its scale tensors cannot be seen")
    if not files.other_weights and not files.safetensors:
        findings.append(f"{one_line(files.directory)}: no weight files, which vLLM needs; KV scale tensors cannot be seen")
    if geometry.unknown_reason:
        findings.append(f"{geometry.unknown_reason}; bytes per token are unknown")
    return tuple(findings)
