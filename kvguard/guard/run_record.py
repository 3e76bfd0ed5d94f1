"""Gathers what the guard knows into the run record."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from kvguard import __version__
from kvguard.engine.checkpoint_files import FileDigest
from kvguard.engine.connectors import connectors_of
from kvguard.evidence.tensors import RankReply, TensorReading
from kvguard.guard.board import Board
from kvguard.guard.drift import Change as DriftChange
from kvguard.guard.prepare import Prepared
from kvguard.policy.models import Policy, policy_digest
from kvguard.record.build import RecordInput, Subject, build_record
from kvguard.record.digest import content_digest
from kvguard.record.statement import Change, Plan, Verdict
from kvguard.record.store import write_record
from kvguard.vocabulary import Check, Claim, Effective, Frozen, Json, UsageError

log = structlog.get_logger("kvguard")


class Known(Frozen):
    """What is known of an engine besides its evidence: itself, its checkpoint's files, what was asked, declared, predicted."""

    engine: dict[str, Any]
    digests: tuple[FileDigest, ...] = ()
    requested: tuple[Claim, ...] = ()
    declared: tuple[Claim, ...] = ()
    predicted: tuple[Claim, ...] = ()
    calibration: dict[str, Json] | None = None
    connectors: tuple[Json, ...] = ()


def known_of(prepared: Prepared) -> Known:
    """What is known of an engine that kvguard starts."""
    engine = prepared.engine
    return Known(
        engine={
            "package": engine.package,
            "version": engine.version,
            "full_version": engine.full_version,
            "python": engine.python_version,
        },
        digests=prepared.digests,
        requested=prepared.requested,
        declared=prepared.declared.claims,
        predicted=prepared.resolution.prediction.claims,
        calibration=prepared.calibration,
        connectors=connectors_of(prepared.command),
    )


def record_input(
    prepared: Prepared | Known,
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
    known = prepared if isinstance(prepared, Known) else known_of(prepared)
    return RecordInput(
        subjects=tuple(Subject(name=item.name, sha256=item.sha256, kind=item.kind) for item in known.digests),
        engine=known.engine,
        kvguard_version=__version__,
        requested=known.requested,
        declared=known.declared,
        predicted=known.predicted,
        observed=observed,
        effective=effective,
        checks=checks,
        policy=policy.model_dump(mode="json") if policy is not None else None,
        policy_digest=policy_digest(policy) if policy is not None else None,
        plan=Plan(changes=changes, argv=argv, refusal=refusal),
        verdict=verdict,
        calibration=known.calibration,
        connectors=known.connectors,
        layers=_layers(tensors),
        expected_ranks=tensors.expected_ranks if tensors else None,
        ranks=len(tensors.replies) if tensors else 0,
        undigested=undigested,
    )


def drift_document(changes: tuple[DriftChange, ...]) -> tuple[dict[str, Json], ...]:
    """What drifted, as a record holds it."""
    return tuple(change.model_dump(mode="json") for change in changes)


def post_record(board: Board, given: RecordInput, directory: Path) -> None:
    """Build the record, write it, and show it. Failing to write it is reported and closes nothing that is already open."""
    record = build_record(given)
    now = datetime.now(UTC)
    try:
        path = write_record(record, directory, now.strftime("%Y%m%dT%H%M%S.%fZ"))
    except (OSError, UsageError) as error:
        log.error("run record could not be written", directory=str(directory), error=str(error))
        path = None
    board.record = record
    board.claims = (*given.requested, *given.declared, *given.predicted, *given.observed)
    board.update(
        record_digest=content_digest(record),
        record_path=str(path or ""),
        policy_digest=record["predicate"]["policy_digest"] or "",
        scales_digest=record["predicate"]["scales_digest"] or "",
    )


def _layers(tensors: TensorReading | None) -> tuple[dict[str, Any], ...]:
    if tensors is None:
        return ()
    return tuple({"rank": _number(rank), **layer.model_dump(mode="json")} for rank, layer in tensors.layers())


def _number(reply: RankReply) -> int | None:
    """The rank's number over all data-parallel engines, each of which counts its own from 0."""
    if reply.rank is None or (reply.dp_size or 1) < 2:
        return reply.rank
    return (reply.dp_rank or 0) * (reply.tp_size or 1) * (reply.pp_size or 1) + reply.rank
