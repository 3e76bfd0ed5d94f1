"""Whether an engine still runs what was established, as data: what differs, since when it counts, what it does. Pure.

Fail-static: a reading that is weaker than the established one and says nothing against it changes no verdict. It only
makes the verdict stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from pydantic import Field

from kvguard.evidence.tensors import TensorReading
from kvguard.policy.models import DriftPolicy, OnDrift
from kvguard.record.digest import scales_digest
from kvguard.record.normalize import normalize_layers
from kvguard.vocabulary import (
    Check,
    CheckResult,
    Confidence,
    Effective,
    Frozen,
    ScaleState,
    canonical_dtype,
    is_quantized,
    width_bits,
)

FIELDS = ("kv_cache_dtype", "kv_scales", "scale_values", "sixteen_bit_layers", "attention_backend", "engine_version", "policy")
"""What can drift; each is a label of kvguard_drift_total."""

_IN_A_ROW = 2
T = TypeVar("T")


class Change(Frozen):
    """One field that is not what it was: `before` as established, `after` as found now."""

    field: str
    before: str
    after: str


class Established(Frozen):
    """What one verification showed, as far as drift is about it. `failed` names the enforced checks that failed.

    `scale_values` is the scales' digest, None when they were not read.
    """

    effective: Effective
    engine_version: str = ""
    scale_values: str | None = None
    failed: tuple[str, ...] = ()


class Drift(Frozen):
    """Where drift stands. `counts` are findings by field, one for each time a field began to differ.

    `in_a_row`: verifications, up to now, that found drift by evidence that the policy acts on. `stale` is why the last
    verification could not confirm the verdict, "" when it could.
    """

    changes: tuple[Change, ...] = ()
    in_a_row: int = 0
    counts: Mapping[str, int] = Field(default_factory=dict)
    stale: str = ""

    def words(self) -> str:
        """What differs, in one line."""
        return "; ".join(f"{change.field}: {change.before} was established, now {change.after}" for change in self.changes)


def established(
    effective: Effective, checks: Iterable[Check], *, engine_version: str, tensors: TensorReading | None
) -> Established:
    """What a verification showed, for comparison with others."""
    values = None
    if tensors is not None and is_quantized(effective.dtype):
        layers = ({"rank": rank.rank, **layer.model_dump(mode="json")} for rank, layer in tensors.layers())
        values = scales_digest(normalize_layers(layers))
    return Established(
        effective=effective,
        engine_version=engine_version,
        scale_values=values,
        failed=tuple(sorted({c.name for c in checks if c.enforced and c.result is CheckResult.FAIL})),
    )


def compare(before: Established, after: Established) -> tuple[Change, ...]:
    """Fields that both verifications know and that differ; a policy check that passed and now fails is one too."""
    old, new = before.effective, after.effective
    pairs = {
        "kv_cache_dtype": (old.dtype, new.dtype) if _differ(old.dtype, new.dtype) else None,
        "kv_scales": _known(old.scales, new.scales, ScaleState.UNKNOWN),
        "scale_values": _known(before.scale_values, after.scale_values, None),
        "sixteen_bit_layers": _layers(old, new),
        "attention_backend": _known(", ".join(old.attention_backends), ", ".join(new.attention_backends), ""),
        "engine_version": _known(before.engine_version, after.engine_version, ""),
        "policy": _newly_failed(before.failed, after.failed),
    }
    return tuple(Change(field=name, before=str(pair[0]), after=str(pair[1])) for name, pair in pairs.items() if pair)


def weaker(before: Established, after: Established) -> str:
    """Why `after` cannot confirm `before`, "" when it can."""
    old, new = before.effective, after.effective
    if not new.confidence.reaches(old.confidence):
        return f"the KV cache dtype was {old.confidence}, and is only {new.confidence} now"
    if old.scales is not ScaleState.UNKNOWN and new.scales is ScaleState.UNKNOWN:
        return "the scales could not be read again"
    return ""


def consider(drift: Drift, before: Established, after: Established | None, problem: str, policy: DriftPolicy) -> Drift:
    """Where drift stands after one more verification; `after` None when nothing could be read, `problem` says why."""
    if after is None:
        return drift.model_copy(update={"stale": problem or "nothing could be read"})
    changes, doubt = compare(before, after), weaker(before, after)
    stale = "; ".join(filter(None, (doubt, problem if doubt else "")))
    if not changes and doubt:
        return drift.model_copy(update={"stale": stale})
    counts = dict(drift.counts)
    for name in {change.field for change in changes} - {change.field for change in drift.changes}:
        counts[name] = counts.get(name, 0) + 1
    acts = bool(changes) and after.effective.confidence.reaches(Confidence(policy.min_confidence))
    return Drift(changes=changes, in_a_row=drift.in_a_row + 1 if acts else 0, counts=counts, stale=stale)


def unready(drift: Drift, policy: DriftPolicy) -> str:
    """Why drift makes the engine unready, "" when by policy it does not, or not yet."""
    if policy.action is not OnDrift.UNREADY or drift.in_a_row < _IN_A_ROW:
        return ""
    return f"drift: {drift.words()}"


def awaits_confirmation(drift: Drift, policy: DriftPolicy) -> bool:
    """Whether one more verification decides about readiness."""
    return policy.action is OnDrift.UNREADY and 0 < drift.in_a_row < _IN_A_ROW


def _differ(old: str, new: str) -> bool:
    """Whether two dtypes cannot both be true. A bare width ("8-bit") agrees with every dtype of that width."""
    old, new = canonical_dtype(old), canonical_dtype(new)
    if "unknown" in (old, new):
        return False
    if old.endswith("-bit") or new.endswith("-bit"):
        return width_bits(old) != width_bits(new)
    return old != new


def _known(old: T, new: T, unknown: T) -> tuple[T, T] | None:
    return (old, new) if old != new and unknown not in (old, new) else None


def _layers(old: Effective, new: Effective) -> tuple[str, str] | None:
    proven = old.confidence is Confidence.PROVEN and new.confidence is Confidence.PROVEN
    if not proven or old.sixteen_bit_layers == new.sixteen_bit_layers:
        return None
    return ", ".join(old.sixteen_bit_layers) or "none", ", ".join(new.sixteen_bit_layers) or "none"


def _newly_failed(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, str] | None:
    fresh = [name for name in new if name not in old]
    return ("met", f"{', '.join(fresh)} violated") if fresh else None
