"""What the start-up log's scale warnings add to the checkpoint's files, where no tensor was read."""

from __future__ import annotations

from collections.abc import Sequence

from kvguard.checkpoint.models import Declared
from kvguard.vocabulary import Claim, ScaleState

_UNIT, _NOT_LOADED = "unit scales", "scale tensors not loaded"


def lost_by_log(declared: Declared | None, log_claims: Sequence[Claim]) -> str:
    """A sentence when the engine's own warning proves that scales in the files were not loaded, else "".

    The warning of scale 1.0 proves that only if the files have a scale other than 1.0 for every layer: it is printed
    once, for one layer or for all, and for scales that are truly 1.0. No warning proves nothing.
    """
    if declared is None or declared.scales.state is not ScaleState.CHECKPOINT:
        return ""
    values = [value for side in (declared.scales.k, declared.scales.v) for layer in side.values() for value in layer]
    for claim in log_claims:
        if claim.field != "scales_warning":
            continue
        if claim.value == _NOT_LOADED or (claim.value == _UNIT and 1.0 not in values):
            layers = len(declared.scales.k.keys() | declared.scales.v.keys())
            return f"the files have scales for all {layers} layers, and {claim.where} says that at least one layer runs at 1.0"
    return ""
