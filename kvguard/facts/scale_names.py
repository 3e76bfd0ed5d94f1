"""Names of KV scale tensors in checkpoints, and which quantization methods load them, by vLLM version."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

from kvguard.facts.kv_dtypes import Fact
from kvguard.facts.versions import in_range, read_data
from kvguard.vocabulary import Frozen

Part = Literal["k", "v", "kv", "q"]


class ScaleName(Frozen):
    """A tensor name read as a KV scale: its layer, whether for keys, values, both or queries, and the form's id."""

    layer: int
    part: Part
    form: str


@cache
def _patterns() -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    return tuple((entry["id"], entry["gives"], re.compile(entry["pattern"])) for entry in read_data("kv_scales")["names"])


@cache
def _other() -> tuple[re.Pattern[str], re.Pattern[str]]:
    facts = read_data("kv_scales")
    return re.compile(facts["query"]["pattern"]), re.compile(facts["not_language_model"]["pattern"])


_LAYER = re.compile(r"(?:^|\.)(\d{1,6})\.")
_PART = re.compile(r"([kv])(?:_scale|_cache\.scale|_proj\.output_scale|_fake_quantizer\.qscale_act)$")


def scale_name(name: str) -> ScaleName | None:
    """What a checkpoint tensor's name says, in any examined version; None when it is no KV scale.

    Weight scales (`k_proj.weight_scale`), vision, audio and draft layers are not KV scales of the model.
    """
    if not name.endswith(("scale", "qscale_act")):
        return None
    layer = _LAYER.search(name)
    query, elsewhere = _other()
    if layer is None or elsewhere.search(name):
        return None
    for form, gives, pattern in _patterns():
        if pattern.search(name):
            letter = _PART.search(name)
            part: Part = "kv" if gives == "kv" else "v" if letter and letter[1] == "v" else "k"
            return ScaleName(layer=int(layer[1]), part=part, form=form)
    return ScaleName(layer=int(layer[1]), part="q", form="query") if query.search(name) else None


def form_is_recognised(version: str, form: str, quant_method: str) -> bool | None:
    """Whether this version maps tensors named in this form to KV scales for this quantization method; None: not read."""
    entry = next(entry for entry in read_data("kv_scales")["names"] if entry["id"] == form)
    if in_range(version, entry.get("not_read", "0.0.0")):
        return None
    methods = entry.get("only_methods")
    if methods is None:
        return in_range(version, entry["versions"])
    return quant_method in methods and in_range(version, methods[quant_method])


def recognised_forms(version: str) -> dict[str, tuple[str, ...]]:
    """The name forms this version maps to KV scales, each with the quantization methods that do ("any": all of them)."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in read_data("kv_scales")["names"]:
        methods = entry.get("only_methods")
        if methods is None:
            if in_range(version, entry["versions"]):
                found[entry["id"]] = ("any",)
        elif fitting := tuple(method for method, versions in methods.items() if in_range(version, versions)):
            found[entry["id"]] = fitting
    return found


def scale_owners(version: str) -> dict[str, dict[str, bool]]:
    """Quantization methods that load KV scales in this version, for ordinary and for MLA attention."""
    return {
        entry["method"]: {
            "attention": in_range(version, entry["attention"]),
            "mla": entry["mla"] is not None and in_range(version, entry["mla"]),
        }
        for entry in read_data("kv_scales")["owners"]
        if in_range(version, entry["attention"])
    }


def owns_kv_scales(version: str, quant_method: str | None, *, mla: bool, algorithm_declared: bool) -> bool:
    """Whether this quantization method loads KV scales for the model's attention layers.

    `algorithm_declared`: the checkpoint declares a KV algorithm (ModelOpt's mixed precision needs one).
    """
    for entry in read_data("kv_scales")["owners"]:
        if entry["method"] == quant_method:
            versions = entry["mla"] if mla else entry["attention"]
            needed = entry.get("needs_declared_algorithm", False)
            return versions is not None and in_range(version, versions) and (algorithm_declared or not needed)
    return False


def owners_source() -> str:
    """Where the list of methods that own KV scales was read."""
    return str(read_data("kv_scales")["owners_source"])


def _versioned(version: str, key: str) -> Fact | None:
    entry = read_data("kv_scales")[key]
    return Fact(reason=entry["reason"], source=entry["source"]) if in_range(version, entry["versions"]) else None


def dropped_by_model(version: str, architecture: str | None) -> Fact | None:
    """Why this model class is reported to lose the checkpoint's KV scales, or None."""
    for entry in read_data("kv_scales")["dropped_by_model"]:
        if architecture in entry["architectures"] and in_range(version, entry["versions"]):
            return Fact(reason=entry["reason"], source=entry["source"])
    return None


def per_head_refusal(version: str, quant_method: str | None, strategy: str | None) -> Fact | None:
    """Why scales with a value for each head cannot be loaded under this method and scheme, or None when they can."""
    entry = read_data("kv_scales")["per_head"]
    fits = quant_method == entry["method"] and strategy == entry["strategy"]
    allowed = fits and in_range(version, entry["versions"])
    return None if allowed else Fact(reason=entry["reason"], source=entry["source"])


def unexpected_without_quant_config(version: str) -> Fact | None:
    """Why scale tensors in a checkpoint without quantization_config stop the loader, or None."""
    return _versioned(version, "unexpected_without_quant_config")


def host_copy_stays_one(version: str, quant_method: str | None) -> Fact | None:
    """Why the host copies of loaded scales stay at 1.0 (compressed-tensors, some versions), or None."""
    return _versioned(version, "host_copy") if quant_method == read_data("kv_scales")["host_copy"]["method"] else None
