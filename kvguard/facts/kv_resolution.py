"""What each vLLM version makes of a checkpoint's KV declaration when it decides the cache dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvguard.facts.devices import Device
from kvguard.facts.kv_dtypes import FP8_E5M2, Fact
from kvguard.facts.versions import entry_for, in_range, read_data
from kvguard.vocabulary import Frozen, canonical_dtype

COMPRESSED_TENSORS = "compressed-tensors"


class Effect(Fact):
    """A rule that applies to one version; what its `effect` may be is said where it is returned."""

    effect: str


def _effect(version: str, entries: list[Mapping[str, Any]], key: str = "effect") -> Effect | None:
    entry = entry_for(version, entries)
    return None if entry is None else Effect(effect=entry[key], reason=entry["reason"], source=entry["source"])


def compressed_tensors_scheme(version: str) -> Effect | None:
    """What a `kv_cache_scheme` does: "ignored", "always" (also over an explicit value) or "if_auto"."""
    return _effect(version, read_data("kv_resolution")["compressed_tensors_scheme"])


def compressed_tensors_refusal(version: str, scheme: Mapping[str, Any]) -> Fact | None:
    """Why this version refuses to start with such a `kv_cache_scheme` object, or None when it takes it."""
    entry = entry_for(version, read_data("kv_resolution")["compressed_tensors_validation"])
    if entry is None:
        return None
    wrong = (scheme.get("type") != "float", scheme.get("num_bits") != 8)
    if all(wrong) if entry["type_and_bits"] == "both_wrong" else any(wrong):
        found = f"type {scheme.get('type')!r} and num_bits {scheme.get('num_bits')!r}"
        return Fact(reason=f"needs type 'float' and num_bits 8, found {found}", source=entry["source"])
    if scheme.get("strategy") not in entry["strategies"]:
        wanted = " or ".join(repr(name) for name in entry["strategies"])
        return Fact(reason=f"needs strategy {wanted}, found {scheme.get('strategy')!r}", source=entry["source"])
    if not scheme.get("symmetric"):
        return Fact(reason=f"needs symmetric true, found {scheme.get('symmetric')!r}", source=entry["source"])
    return None


def modelopt_dtype(version: str, algorithm: Any) -> tuple[str, Fact] | None:
    """The cache dtype `auto` becomes for a ModelOpt declaration, and the fact; None in versions without the rule.

    `algorithm` is the value vLLM's resolver finds: an object (kv_cache_scheme) or a name (kv_cache_quant_algo).
    "auto" means that the resolver warns and leaves the cache at the model's dtype.
    """
    rule = read_data("kv_resolution")["modelopt"]
    if not in_range(version, rule["versions"]):
        return None
    nvfp4 = in_range(version, rule["nvfp4"])
    name = algorithm.lower() if isinstance(algorithm, str) else None
    if isinstance(algorithm, Mapping) and algorithm.get("type") == "float":
        bits = algorithm.get("num_bits")
        # 0.32.0 utils/torch_utils.py:470: `dynamic` must be literally false, and only for 8 bit.
        name = "fp8" if bits == 8 and algorithm.get("dynamic") is False else "nvfp4" if bits == 4 else None
    if name == "fp8" or (name == "nvfp4" and nvfp4):
        return canonical_dtype(name), Fact(reason=rule["reason"], source=rule["source"])
    wanted = 'an 8-bit float object needs "dynamic": false, a name must be FP8' + (" or NVFP4" if nvfp4 else "")
    return "auto", Fact(reason=f"vLLM warns and leaves auto for {algorithm!r}: {wanted}", source=rule["source"])


class ModelOptMethod(Frozen):
    """The `quant_method` vLLM infers for a ModelOpt config; `refused` when it knows no such algorithm."""

    method: str | None
    refused: str | None = None
    source: str


def modelopt_method(version: str, *, producer: str | None, legacy_key: bool, quant_algo: str | None) -> ModelOptMethod | None:
    """What quant_method becomes for `producer.name` and `quantization.quant_algo`; None when nothing is inferred.

    `legacy_key`: the nested object has `modelopt_quant_config`.
    """
    entry = entry_for(version, read_data("kv_resolution")["modelopt_quant_method"])
    if entry is None or quant_algo is None or not (producer == "modelopt" or (legacy_key and entry["legacy_key"])):
        return None
    algorithm = quant_algo if entry["exact"] else quant_algo.upper()
    for method in ("modelopt", "modelopt_fp4"):
        if algorithm in entry[method]:
            return ModelOptMethod(method=method, source=entry["source"])
    return ModelOptMethod(method=None, refused=f"unknown ModelOpt quant_algo {quant_algo!r}", source=entry["source"])


def sidecar_is_read(version: str) -> bool:
    """Whether hf_quant_config.json stands in for a missing quantization_config."""
    return in_range(version, read_data("kv_resolution")["sidecar"]["versions"])


def infers_model_dtype(version: str) -> bool:
    """Whether a config without a dtype takes that of its vision or encoder config, else that of the stored tensors."""
    return in_range(version, read_data("kv_resolution")["inferred_model_dtype"]["versions"])


def never_resolves(quant_method: str) -> Fact | None:
    """Why a KV declaration of this quantization method never changes the cache dtype, or None."""
    entry = read_data("kv_resolution")["never"]
    if quant_method not in entry["methods"]:
        return None
    return Fact(reason=f"{entry['methods'][quant_method]}: {entry['reason']}", source=entry["source"])


def never_resolving_methods() -> dict[str, Fact]:
    """Quantization methods whose KV declaration no version lets change the cache dtype."""
    methods = read_data("kv_resolution")["never"]["methods"]
    return {method: fact for method in methods if (fact := never_resolves(method)) is not None}


def modelopt_source() -> str:
    """Where ModelOpt's resolver was read."""
    return str(read_data("kv_resolution")["modelopt"]["source"])


class CpuRule(Effect):
    """The CPU platform's rule: "e4m3_to_e5m2", "all_to_auto", "quantized_to_auto" or "none".

    `runs` lists the values its attention backend computes with; empty: only the model's dtype.
    """

    runs: tuple[str, ...] = ()


def cpu_rule(version: str) -> CpuRule | None:
    """What the CPU platform does to the KV cache dtype."""
    entry = entry_for(version, read_data("kv_resolution")["cpu"])
    if entry is None:
        return None
    runs = tuple(entry.get("runs", ()))
    return CpuRule(effect=entry["effect"], reason=entry["reason"], source=entry["source"], runs=runs)


class ModelRule(Fact):
    """One rule of a model's own code: the trait it goes by, the canonical values it meets, and what they become."""

    model: str
    requested: tuple[str, ...]
    result: str


def model_rules(version: str) -> tuple[ModelRule, ...]:
    """Every rule of model classes in this version, as it stands without knowing the device."""
    keys = ("model", "requested", "result", "reason", "source")
    return tuple(
        ModelRule.model_validate({key: entry[key] for key in keys})
        for entry in read_data("kv_resolution")["model_rules"]
        if in_range(version, entry["versions"])
    )


class ModelEffect(Effect):
    """A dtype, "auto" (the model's dtype) or "unknown". `front_end`: decided where log and metrics show it."""

    front_end: bool = False


def model_rule(version: str, traits: frozenset[str], requested: str, device: Device | None = None) -> ModelEffect | None:
    """What a rule of the model's own code makes of a value.

    `traits` are names of `Declared.traits`; `requested` is a canonical dtype or "auto". Where the rule depends on the
    hardware, `device` decides, and without one the effect is "unknown". None: the value stays as it is.
    """
    for entry in read_data("kv_resolution")["model_rules"]:
        if entry["model"] not in traits or requested not in entry["requested"] or not in_range(version, entry["versions"]):
            continue
        for choice in entry.get("by_device", ()) if device else ():
            if device and device.matches(choice["device"]) and in_range(version, choice.get("versions", entry["versions"])):
                if choice["result"] == "as_is":
                    return None
                reason = choice.get("reason", entry["reason"])
                return _model_effect(entry, choice["result"], reason)
        return _model_effect(entry, entry["result"], entry["reason"])
    return None


def _model_effect(entry: Mapping[str, Any], result: str, reason: str) -> ModelEffect:
    return ModelEffect(effect=result, reason=reason, source=entry["source"], front_end=entry.get("front_end", False))


def e5m2_refusal(version: str, *, compressed_tensors_without_scheme: bool) -> Fact | None:
    """Why `fp8_e5m2` is refused when the quantization method owns KV scales, or None when it is allowed."""
    entry = read_data("kv_resolution")["e5m2_with_scales"]
    allowed = entry["compressed_tensors_without_scheme_allowed"]
    if not in_range(version, entry["versions"]) or (compressed_tensors_without_scheme and in_range(version, allowed)):
        return None
    return Fact(reason=f"{entry['reason']} ({FP8_E5M2} was requested)", source=entry["source"])
