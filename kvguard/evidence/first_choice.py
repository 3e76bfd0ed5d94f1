"""Which 8-bit cache to try first on a device: fp8 or int8, from what the facts say of both."""

from __future__ import annotations

from kvguard.checkpoint.models import Declared
from kvguard.evidence.prediction import Prediction, predict
from kvguard.facts.devices import Device
from kvguard.facts.versions import KNOWN, examined
from kvguard.vocabulary import Frozen, ScaleState

FP8, INT8 = "fp8_e4m3", "int8_per_token_head"


class FirstChoice(Frozen):
    """The dtype to try first, None when neither is known to run, and why. What it does to answers has to be measured."""

    dtype: str | None
    reasons: tuple[str, ...]


def first_choice(version: str, declared: Declared, device: Device | None) -> FirstChoice:
    """fp8 where it runs, because checkpoints carry its scales and most backends have it; else int8 where that runs."""
    if not examined(version):
        return FirstChoice(dtype=None, reasons=(f"vLLM {version} was not examined; the facts cover {KNOWN}",))
    if device is None:
        return FirstChoice(dtype=None, reasons=("it depends on the device: name it with --device",))
    fp8, int8 = (predict(version, name, declared, device=device) for name in (FP8, INT8))
    if fp8.dtype == FP8:
        return FirstChoice(dtype=FP8, reasons=tuple(_for_fp8(fp8, int8, version, device)))
    reason = f"{FP8}: {_why(fp8, FP8)}"
    if int8.dtype == INT8:
        itself = f"{INT8} computes a scale for each token and head, 8 bytes a head, on the Triton backend only"
        return FirstChoice(dtype=INT8, reasons=(reason, itself))
    return FirstChoice(dtype=None, reasons=(reason, f"{INT8}: {_why(int8, INT8)}"))


def _for_fp8(fp8: Prediction, int8: Prediction, version: str, device: Device) -> list[str]:
    reasons = [f"vLLM {version} stores fp8 on {device.name}, 1 byte a value"]
    if fp8.scales is ScaleState.CHECKPOINT:
        reasons.append("the checkpoint has calibrated scales for it, which int8 does not use")
    elif int8.dtype == INT8:
        reasons.append(f"its scales would be {fp8.scales}; {INT8} computes its own: measure both")
    if int8.dtype != INT8:
        reasons.append(f"{INT8}: {_why(int8, INT8)}")
    return reasons


def _why(found: Prediction, name: str) -> str:
    return found.reason if found.dtype == "unknown" else f"{found.dtype} runs instead of {name}: {found.reason}"
