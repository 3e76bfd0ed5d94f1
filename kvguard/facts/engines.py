"""Everything the facts say about one vLLM version, put together: what `kvguard engines` prints."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from kvguard.facts.cli_flags import flags_that_changed, has_flag
from kvguard.facts.echo import Echo, echoes, ready_message, stale_labels
from kvguard.facts.kv_dtypes import (
    accepted,
    accepted_source,
    calculate_kv_scales_status,
    nvfp4_unusable,
    sixteen_bit_not_honoured,
    skip_layers,
)
from kvguard.facts.kv_resolution import (
    compressed_tensors_scheme,
    cpu_rule,
    model_rules,
    modelopt_dtype,
    modelopt_source,
    never_resolving_methods,
    sidecar_is_read,
)
from kvguard.facts.log_lines import LogPrefix, log_lines, log_prefix
from kvguard.facts.metric_names import info_labels, meanings, other_series, series_names
from kvguard.facts.scale_names import recognised_forms, scale_owners
from kvguard.facts.versions import EXAMINED, KNOWN, examined, too_old
from kvguard.vocabulary import Frozen

_CPU = {
    "e4m3_to_e5m2": "fp8_e4m3 becomes fp8_e5m2",
    "all_to_auto": "the model's dtype",
    "quantized_to_auto": "the model's dtype",
    "none": "nothing of its own",
}


class Ruling(Frozen):
    """What one kind of declaration does to the cache dtype, and where that was read."""

    effect: str
    reason: str
    source: str


class EngineFacts(Frozen):
    """One version. With `examined` False everything else is empty or None: recognised, and not measured.

    `auto` maps what may decide under auto (a quantization method or a model) to its ruling; `precedence` says what
    becomes of a typed value; `flags` of True, False or None (not read); `scale_names` of each name form to the methods
    that load it; `scale_owners` of each method to the attention layers it loads scales for; `log_fields` of what the
    start-up log's known lines tell; `series` of each meaning to its names.
    """

    version: str
    examined: bool
    guarded: bool
    note: str = ""
    dtypes: tuple[str, ...] | None = None
    dtypes_source: str = ""
    flags: dict[str, bool | None] = Field(default_factory=dict)
    calculate_kv_scales: str | None = None
    auto: dict[str, Ruling] = Field(default_factory=dict)
    precedence: tuple[str, ...] = ()
    scale_names: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    scale_owners: dict[str, dict[str, bool]] = Field(default_factory=dict)
    log_fields: dict[str, int] = Field(default_factory=dict)
    log_prefix: LogPrefix | None = None
    series: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    other_series: tuple[str, ...] = ()
    info_labels: tuple[str, ...] = ()
    stale_labels: dict[str, str] = Field(default_factory=dict)
    ready_message: tuple[str, ...] | None = None
    echo: tuple[Echo, ...] = ()


def engine_facts(version: str) -> EngineFacts:
    """The facts about a version; for one that was not read, that it is recognised and nothing more."""
    if not examined(version):
        note = f"not examined; the facts cover {KNOWN}, and everything about this version is unknown"
        return EngineFacts(version=version, examined=False, guarded=False, note=note)
    return EngineFacts(
        version=version,
        examined=True,
        guarded=not too_old(version),
        dtypes=accepted(version),
        dtypes_source=accepted_source(version),
        flags={flag: has_flag(version, flag) for flag in flags_that_changed()},
        calculate_kv_scales=calculate_kv_scales_status(version),
        auto=_auto(version),
        precedence=_precedence(version),
        scale_names=recognised_forms(version),
        scale_owners=scale_owners(version),
        log_fields=_log_fields(version),
        log_prefix=log_prefix(version),
        series={meaning: series_names(meaning, version) for meaning in meanings()},
        other_series=other_series(version),
        info_labels=info_labels(version),
        stale_labels=stale_labels(version),
        ready_message=ready_message(version),
        echo=echoes(version),
    )


def all_engine_facts() -> tuple[EngineFacts, ...]:
    """The facts about every examined version, oldest first."""
    return tuple(engine_facts(version) for version in EXAMINED)


def _auto(version: str) -> dict[str, Ruling]:
    found: dict[str, Ruling] = {}
    scheme = compressed_tensors_scheme(version)
    if scheme is not None:
        effect = {"ignored": "the model's dtype"}.get(scheme.effect, "fp8_e4m3")
        found["compressed-tensors kv_cache_scheme"] = Ruling(effect=effect, reason=scheme.reason, source=scheme.source)
    for algorithm in ("FP8", "NVFP4"):
        resolved = modelopt_dtype(version, algorithm)
        effect = "the model's dtype" if resolved is None or resolved[0] == "auto" else resolved[0]
        reason = "ModelOpt's KV algorithm is read for weights only" if resolved is None else resolved[1].reason
        source = modelopt_source() if resolved is None else resolved[1].source
        unusable = nvfp4_unusable(version) if effect == "nvfp4" else None
        if unusable is not None:
            effect, reason, source = "nvfp4, which does not start", unusable.reason, unusable.source
        found[f"ModelOpt {algorithm}"] = Ruling(effect=effect, reason=reason, source=source)
    sidecar = "read if config.json has no quantization_config" if sidecar_is_read(version) else "not read"
    found["hf_quant_config.json"] = Ruling(effect=sidecar, reason="", source=modelopt_source())
    for method, fact in never_resolving_methods().items():
        found[method] = Ruling(effect="the model's dtype", reason=fact.reason, source=fact.source)
    for rule in model_rules(version):
        if "auto" in rule.requested:
            found[f"model {rule.model}"] = Ruling(effect=rule.result, reason=rule.reason, source=rule.source)
    cpu = cpu_rule(version)
    if cpu is not None:
        found["the CPU platform"] = Ruling(effect=_CPU[cpu.effect], reason=cpu.reason, source=cpu.source)
    return found


def _precedence(version: str) -> tuple[str, ...]:
    lines = []
    scheme = compressed_tensors_scheme(version)
    if scheme is not None:
        lines.append(
            {
                "ignored": "a typed value wins over a compressed-tensors kv_cache_scheme, which changes nothing",
                "always": "a compressed-tensors kv_cache_scheme wins over a typed value",
                "if_auto": "a typed value wins over a compressed-tensors kv_cache_scheme",
            }[scheme.effect]
        )
    lines.append("a typed value wins over ModelOpt's declaration")
    limit = sixteen_bit_not_honoured(version, "bfloat16", compressed_tensors_scheme=False)
    values = accepted(version) or ()
    if limit is not None:
        lines.append(f"a typed bfloat16 does not run: {limit.reason}")
    elif "bfloat16" not in values:
        lines.append("16 bit cannot be typed: only auto gives it")
    if not skip_layers(version).available:
        lines.append("every layer has the same dtype: no --kv-cache-dtype-skip-layers")
    return tuple(lines)


def _log_fields(version: str) -> dict[str, int]:
    """How many known start-up lines of this version tell each field."""
    counts: dict[str, int] = {}
    for line in log_lines():
        if line.belongs_to(version):
            counts[line.field] = counts.get(line.field, 0) + 1
    return dict(sorted(counts.items()))


def summary_row(facts: EngineFacts) -> dict[str, Any]:
    """One version in one line: what an operator decides by."""
    if not facts.examined:
        return {"version": facts.version, "note": facts.note}
    scheme = facts.auto["compressed-tensors kv_cache_scheme"]
    typed = compressed_tensors_scheme(facts.version)
    over = ", even over a typed value" if typed is not None and typed.effect == "always" else ""
    return {
        "version": facts.version,
        "dtypes": len(facts.dtypes or ()),
        "typed_16_bit": not any("16 bit" in line or "bfloat16 does not run" in line for line in facts.precedence),
        "compressed_tensors": scheme.effect + over,
        "modelopt_fp8": facts.auto["ModelOpt FP8"].effect,
        "modelopt_nvfp4": facts.auto["ModelOpt NVFP4"].effect,
        "calculate_kv_scales": facts.calculate_kv_scales,
        "skip_layers": facts.flags["--kv-cache-dtype-skip-layers"],
        "tokens_in_metrics": "kv_cache_size_tokens" in facts.info_labels,
        "guarded": facts.guarded,
    }
