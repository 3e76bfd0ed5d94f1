"""Accelerators as an input of prediction: their names, and what a version does with a cache dtype on them."""

from __future__ import annotations

import re

from packaging.version import Version

from kvguard.facts.kv_dtypes import Fact
from kvguard.facts.versions import in_range, read_data
from kvguard.vocabulary import Frozen, UsageError

_SM = re.compile(r"(?:sm|cc)[_ ]?(\d{2,3})[af]?")
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")
_GFX = re.compile(r"gfx[0-9a-f]{3,5}")


class Device(Frozen):
    """One kind of accelerator. `platform`: cuda, rocm, cpu or xpu; `capability` "9.0"; `architecture` "gfx942"."""

    name: str
    platform: str
    capability: str = ""
    architecture: str = ""

    def matches(self, pattern: str) -> bool:
        """Whether this is the device of a pattern: "any", "cuda", "cuda:10", "rocm:gfx94", or a list with commas."""
        return any(self._is(part.strip()) for part in pattern.split(","))

    def examined(self, version: str) -> bool:
        """Whether this version's sources were read for this kind of device; of others everything is unknown."""
        detail = self.capability or self.architecture
        return any(
            entry["platform"] == self.platform and detail in entry["names"] and in_range(version, entry["versions"])
            for entry in read_data("devices")["examined"]
        )

    def below(self, capability: str) -> bool:
        """Whether this is an NVIDIA device of a lower compute capability."""
        return bool(self.capability) and Version(self.capability) < Version(capability)

    def _is(self, pattern: str) -> bool:
        platform, _, detail = pattern.partition(":")
        if platform not in ("any", self.platform):
            return False
        return not detail or self.capability.split(".")[0] == detail or self.architecture.startswith(detail or "-")


def find_device(text: str) -> Device:
    """A device by name ("h100", "RTX 4090", "mi300x", "cpu"), as "sm90", "9.0" or "gfx942". UsageError for others."""
    plain = re.sub(r"[\s_-]", "", text.lower()).removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")
    known = read_data("devices")["devices"]
    if plain in known:
        return Device(name=plain, **known[plain])
    if match := _SM.fullmatch(text.strip().lower()):
        digits = match[1]
        return Device(name=f"sm{digits}", platform="cuda", capability=f"{int(digits[:-1])}.{digits[-1]}")
    if match := _CAPABILITY.fullmatch(text.strip()):
        return Device(name=f"sm{match[1]}{match[2]}", platform="cuda", capability=match[0])
    if _GFX.fullmatch(plain):
        return Device(name=plain, platform="rocm", architecture=plain)
    raise UsageError(f"--device {text!r}: not a known device; known are {', '.join(known)}, sm90 or 9.0, gfx942")


def cuda_device(name: str, capability: str) -> Device | None:
    """The device that NVIDIA's tools call `name` ("NVIDIA H100 80GB HBM3") and give a compute capability ("9.0").

    The capability decides; the name is ours where one of ours is in theirs, else "sm90". None: that is no capability.
    """
    if not _CAPABILITY.fullmatch(capability.strip()):
        return None
    found = find_device(capability.strip())
    words = re.findall(r"[a-z0-9]+", name.lower())
    runs = {"".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)}
    known = read_data("devices")["devices"]
    ours = [key for key in known if key in runs and known[key].get("capability") == found.capability]
    return found.model_copy(update={"name": max(ours, key=len)}) if ours else found


def rocm_device(architecture: str) -> Device:
    """The device of an AMD architecture ("gfx942"). UsageError for what is none."""
    found = find_device(architecture)
    if not found.architecture:
        raise UsageError(f"{architecture!r}: not an AMD architecture, such as gfx942")
    return found


class DeviceRule(Fact):
    """What a device does to a cache dtype. `result`: "as_is", "fails" or "unknown"; `do` is the way out."""

    result: str
    do: str = ""


def device_rule(version: str, device: Device, dtype: str, *, mla: bool, traits: frozenset[str]) -> DeviceRule | None:
    """The first rule about this canonical dtype on this device, None when there is none."""
    for entry in read_data("devices")["rules"]:
        if dtype not in entry["dtypes"] or not in_range(version, entry["versions"]) or not device.matches(entry["device"]):
            continue
        if entry.get("mla", mla) != mla or entry.get("trait", "") not in ("", *traits):
            continue
        if "below" in entry and not device.below(entry["below"]):
            continue
        return DeviceRule(result=entry["result"], reason=entry["reason"], do=entry.get("do", ""), source=entry["source"])
    return None


class ModelDtypeRule(Fact):
    """What a device makes of a model's dtype. `dtype`: what it becomes, or "unknown"; `typed_fails`: `--dtype` is refused."""

    dtype: str
    typed_fails: bool
    do: str = ""


def model_dtype_rule(version: str, device: Device | None, dtype: str | None, model_type: str | None) -> ModelDtypeRule | None:
    """The rule about a model of this canonical dtype on this device, None when the dtype stays."""
    if device is None or dtype is None:
        return None
    for entry in read_data("devices")["model_dtypes"]:
        if dtype != entry["dtype"] or not in_range(version, entry["versions"]):
            continue
        if not device.matches(entry["device"]) or not device.below(entry["below"]):
            continue
        becomes = "unknown" if model_type in entry.get("not_for", ()) else entry["becomes"]
        return ModelDtypeRule(
            dtype=becomes,
            typed_fails=entry["typed"] == "fails",
            do=entry.get("do", ""),
            reason=entry["reason"],
            source=entry["source"],
        )
    return None


def doubled_scales(device: Device | None) -> Fact | None:
    """Why loaded scales are doubled on this device, or None."""
    entry = read_data("devices")["fnuz"]
    return Fact(reason=entry["reason"], source=entry["source"]) if device and device.matches(entry["device"]) else None
