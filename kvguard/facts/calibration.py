"""How each vLLM version gets KV scales: what `--calculate-kv-scales` really does, and how a checkpoint carries them."""

from __future__ import annotations

from typing import Any, Literal

from kvguard.facts.kv_dtypes import Fact, flag_entry
from kvguard.facts.versions import entry_for, in_range, read_data

FlagResult = Literal["real", "dummy", "crashes", "ignored", "absent"]
AttachForm = Literal["compressed_tensors_block", "compressed_tensors_scheme", "modelopt_algorithm", "tensors_only"]

_FACTS: dict[str, Any] = read_data("calibration")

E4M3_LARGEST = float(_FACTS["e4m3"]["largest"])
"""The largest number e4m3 holds; what is larger saturates."""

E4M3_SMALLEST_NORMAL = float(_FACTS["e4m3"]["smallest_normal"])
"""Below it e4m3 has fewer than three bits of mantissa."""

E4M3_SMALLEST = float(_FACTS["e4m3"]["smallest"])
"""The smallest positive number e4m3 holds; what is smaller is lost."""


class Flag(Fact):
    """What `--calculate-kv-scales` does: it calibrates on the first "real" batch or on a "dummy" one, it "crashes" the
    start, it is "ignored", or it is "absent" from the version."""

    result: FlagResult


class ScaleNames(Fact):
    """How an architecture's scale tensors are named: `pattern` with {attention} (the module's full name) and {side}."""

    attention: str
    pattern: str


def calculate_flag(version: str, *, platform: str | None, eager: bool) -> Flag | None:
    """What the flag does on a platform ("cpu", else any) in eager or compiled mode; None for a version that was not read."""
    entry = flag_entry(version, platform, "eager" if eager else "compiled")
    return None if entry is None else Flag.model_validate({name: entry[name] for name in ("result", "reason", "source")})


def flag_ignored(
    version: str, *, dynamic_dtype: bool, query_scale: bool, compressed_tensors_scheme: bool, hybrid: bool
) -> Flag | None:
    """Why the flag has no effect for this cache format, stated by name, and checkpoint, or None."""
    holds = {
        "dynamic_dtype": dynamic_dtype,
        "query_scale": query_scale,
        "compressed_tensors_scheme": compressed_tensors_scheme,
        "hybrid": hybrid,
    }
    for entry in _FACTS["flag_ignored"]:
        if holds.get(entry["when"]) and in_range(version, entry["versions"]):
            return Flag(result="ignored", reason=entry["reason"], source=entry["source"])
    return None


def pass_missing(version: str) -> Fact | None:
    """Why the reference pass cannot run inside this version, or None."""
    entry = _FACTS["pass"]
    return None if in_range(version, entry["versions"]) else Fact(reason=entry["reason"], source=entry["source"])


def attach_form(version: str, method: str | None) -> tuple[AttachForm, str] | None:
    """How a checkpoint of this quantization method (None: dense) is made to load KV scales, and the source."""
    fitting = [entry for entry in _FACTS["attach"] if entry["method"] == (method or "")]
    entry = entry_for(version, fitting)
    return None if entry is None else (entry["form"], str(entry["source"]))


def keeps_model_dtype(method: str | None) -> bool:
    """Whether the loader of this quantization method (None: dense) keeps KV scales in the model's dtype, not in float32."""
    return (method or "") in _FACTS["scales_in_model_dtype"]["methods"]


def scale_names(version: str, architecture: str | None) -> ScaleNames | None:
    """The names under which this version reads an architecture's scales; None where nobody read or ran it."""
    entry = entry_for(version, (entry for entry in _FACTS["names"] if architecture in entry["architectures"]))
    if entry is None:
        return None
    return ScaleNames(
        attention=entry["attention"], pattern=entry["name"], reason=str(entry["checked"]), source=str(entry["source"])
    )
