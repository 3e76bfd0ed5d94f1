"""Kernel fidelity: which arithmetic explains the engine's decode. A finding in figures, never an error.

The same decodes are scored against the exact pass and against passes that store keys and values as the engine's
format would, in each way of rounding and with the query or the softmax quantized too. A candidate explains the decode
when it leaves less than `SHARE` of what the exact pass leaves, and significantly less, request by request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvguard.reference.models import EXACT, Choice
from kvguard.shadow.distributions import t_quantile
from kvguard.shadow.models import Observation
from kvguard.shadow.statistics import Measure, sums_of
from kvguard.vocabulary import Frozen

SHARE = 0.7
"""Residual of the winner over that of the exact pass, at most."""

NEITHER = "neither"
UNTESTED = "untested"

_FLOATS = ("fp8_e4m3", "fp8_e5m2")


class Fidelity(Frozen):
    """What explains the engine's decode.

    `explained_by` is a candidate's label, `16bit` on an engine that does not quantize, or `neither`; `untested` where the
    reference has nothing to compare with. `residuals` is the
    mean over requests of |Δ logprob| against each candidate, in nats by token. `requests` is how many were scored.
    """

    explained_by: str
    residuals: dict[str, float]
    requests: int
    reason: str

    @property
    def known(self) -> bool:
        """Whether something explains the decode."""
        return self.explained_by not in (NEITHER, UNTESTED)


def candidates(dtype: str) -> tuple[Choice, ...]:
    """The passes to compare for a cache of this dtype; for a 16-bit one, what it must *not* look like."""
    formats = (dtype,) if dtype in _FLOATS else ("fp8_e4m3",)
    found = [EXACT]
    for name in formats:
        for rounding in ("nearest", "truncate"):
            found.append(Choice(label=f"{name} {rounding}", format=name, rounding=rounding))
            if dtype in _FLOATS:
                found.append(Choice(label=f"{name} {rounding}, query", format=name, rounding=rounding, query=True))
                found.append(Choice(label=f"{name} {rounding}, softmax", format=name, rounding=rounding, probabilities=True))
    return tuple(found)


def judge_fidelity(observations: Sequence[Observation], dtype: str) -> Fidelity:
    """The candidate that explains the decode best, if it does. Observations carry a score for each candidate's label."""
    labels = [choice.label for choice in candidates(dtype)]
    residuals = {label: value for label in labels if (value := _residual(observations, label)) is not None}
    if len(residuals) < 2 or len(observations) < 2:
        alone = residuals and len(observations) >= 2
        reason = "the reference has no fake-quantized passes to compare with" if alone else "too few requests were scored"
        found = UNTESTED if alone else NEITHER
        return Fidelity(explained_by=found, residuals=residuals, requests=len(observations), reason=reason)
    best = min(residuals, key=lambda label: residuals[label])
    shown = ", ".join(f"{label} {value:.4f}" for label, value in sorted(residuals.items(), key=lambda item: item[1]))
    # On a 16-bit engine the exact pass must beat what a quantized cache would give, else the pass is not a reference.
    rival = EXACT.label if best != EXACT.label else min(set(residuals) - {best}, key=lambda label: residuals[label])
    quantized = dtype in _FLOATS
    convincing = residuals[best] <= SHARE * residuals[rival] and _significant(observations, best, rival)
    fits = convincing and (best != EXACT.label) == quantized
    reason = f"mean |Δ logprob|: {shown}" if fits else f"nothing explains a {dtype} cache; mean |Δ logprob|: {shown}"
    return Fidelity(explained_by=best if fits else NEITHER, residuals=residuals, requests=len(observations), reason=reason)


def choice_named(label: str, dtype: str) -> Choice:
    """The candidate with this label."""
    return next(choice for choice in candidates(dtype) if choice.label == label)


def _residual(observations: Sequence[Observation], label: str) -> float | None:
    return sums_of(observations, label).estimate(Measure.REQUEST_ABS_DELTA).value


def _significant(observations: Sequence[Observation], best: str, rival: str) -> bool:
    """Paired by request, one-sided at 97.5 %: the rival leaves more."""
    differences = []
    for seen in observations:
        ours, theirs = _mean(seen, best), _mean(seen, rival)
        if ours is not None and theirs is not None:
            differences.append(theirs - ours)
    if len(differences) < 2:
        return False
    count = len(differences)
    mean = sum(differences) / count
    variance = sum((value - mean) ** 2 for value in differences) / (count - 1)
    return mean > t_quantile(0.975, count - 1) * math.sqrt(variance / count)


def _mean(seen: Observation, label: str) -> float | None:
    return seen.scores[label].mean_abs_delta if label in seen.scores else None
