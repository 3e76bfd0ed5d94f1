"""Gathers what the guard knows into the run record."""

from __future__ import annotations

from typing import Any

from kvguard import __version__
from kvguard.evidence.tensors import TensorReading
from kvguard.guard.prepare import Prepared
from kvguard.policy.models import Policy, policy_digest
from kvguard.record.build import RecordInput, Subject
from kvguard.record.statement import Change, Plan, Verdict
from kvguard.vocabulary import Check, Claim, Effective


def record_input(
    prepared: Prepared,
    policy: Policy | None,
    *,
    changes: tuple[Change, ...],
    argv: tuple[str, ...],
    observed: tuple[Claim, ...],
    effective: Effective,
    checks: tuple[Check, ...],
    verdict: Verdict,
    refusal: str | None,
    tensors: TensorReading | None,
    undigested: dict[str, Any],
) -> RecordInput:
    """One engine start as the record's input. `argv` is the command as written."""
    engine = prepared.engine
    return RecordInput(
        subjects=tuple(Subject(name=item.name, sha256=item.sha256, kind=item.kind) for item in prepared.digests),
        engine={
            "package": engine.package,
            "version": engine.version,
            "full_version": engine.full_version,
            "python": engine.python_version,
        },
        kvguard_version=__version__,
        requested=prepared.requested,
        declared=prepared.declared.claims,
        predicted=prepared.resolution.prediction.claims,
        observed=observed,
        effective=effective,
        checks=checks,
        policy=policy.model_dump(mode="json") if policy is not None else None,
        policy_digest=policy_digest(policy) if policy is not None else None,
        plan=Plan(changes=changes, argv=argv, refusal=refusal),
        verdict=verdict,
        layers=_layers(tensors),
        expected_ranks=tensors.expected_ranks if tensors else None,
        ranks=len(tensors.replies) if tensors else 0,
        undigested=undigested,
    )


def _layers(tensors: TensorReading | None) -> tuple[dict[str, Any], ...]:
    if tensors is None:
        return ()
    return tuple({"rank": rank.rank, **layer.model_dump(mode="json")} for rank, layer in tensors.layers())
