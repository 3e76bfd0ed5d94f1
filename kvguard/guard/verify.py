"""One verification of a running engine: ask every source, reconcile, keep what was read."""

from __future__ import annotations

import asyncio
import secrets

from kvguard.checkpoint.models import Declared
from kvguard.engine.client import EngineClient
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence import tensors as tensor_evidence
from kvguard.evidence.cache_size import measure
from kvguard.evidence.capacity import CapacityReading
from kvguard.evidence.log import LogReader
from kvguard.evidence.prediction import Prediction
from kvguard.evidence.reconcile import reconcile
from kvguard.evidence.tensors import TensorReading
from kvguard.vocabulary import Claim, Effective, Frozen, UsageError


class Evidence(Frozen):
    """What one verification read. `problems` say which source could not be read, and why."""

    effective: Effective
    claims: tuple[Claim, ...]
    capacity: CapacityReading
    tensors: TensorReading | None
    problems: tuple[str, ...]


async def verify_engine(
    client: EngineClient,
    *,
    secret: str | None,
    log: LogReader,
    version: str,
    declared: Declared | None,
    prediction: Prediction | None,
    calculated: bool,
    allowed_sixteen_bit: tuple[str, ...],
    given_bytes: int | None = None,
    calibrated: bool = False,
) -> Evidence:
    """Read tensors (when a `secret` opens the inside), metrics and log; compute capacity; reconcile.

    `given_bytes` overrides what metrics and log say about the cache's size in bytes. Never raises for a source that
    cannot be read: it is named in `problems`.
    """
    problems: list[str] = []
    tensors, page = await asyncio.gather(_read_tensors(client, secret, problems), _read_metrics(client, problems))
    metrics_claims = metrics_evidence.claims(page) if page is not None else ()
    log_claims = log.claims(version)
    reading = measure(
        tensors=tensors,
        metrics_claims=metrics_claims,
        log_claims=log_claims,
        geometry=declared.geometry if declared else None,
        given_bytes=given_bytes,
    )
    effective = reconcile(
        tensors=tensors,
        capacity=reading,
        metrics_claims=metrics_claims,
        log_claims=log_claims,
        declared=declared,
        predicted_dtype=prediction.dtype if prediction else None,
        predicted_scales=prediction.scales if prediction else None,
        calculated=calculated,
        allowed_sixteen_bit=allowed_sixteen_bit,
        calibrated=calibrated,
    )
    tensor_claims = tensor_evidence.claims(tensors) if tensors is not None else ()
    return Evidence(
        effective=effective,
        claims=(*tensor_claims, reading.claim, *metrics_claims, *log_claims),
        capacity=reading,
        tensors=tensors,
        problems=tuple(problems),
    )


async def asleep(client: EngineClient) -> str:
    """Why the workers must not be asked now: reading scales that are unmapped while an engine sleeps would end it.

    "" when it is awake, or has no /is_sleeping (outside development mode nobody can put it to sleep over HTTP).
    """
    answer = await client.get_json("/is_sleeping")
    if answer.status is None:
        return f"the engine did not say whether it sleeps: {answer.problem}"
    sleeping = answer.body.get("is_sleeping") if answer.ok and isinstance(answer.body, dict) else False
    return "the engine sleeps; it is verified again when it wakes" if sleeping is True else ""


async def _read_tensors(client: EngineClient, secret: str | None, problems: list[str]) -> TensorReading | None:
    if secret is None:
        return None
    answer = await client.evidence(secret, secrets.token_hex(8))
    if answer.problem:
        problems.append(f"tensors: {answer.problem}")
    return answer.reading


async def _read_metrics(client: EngineClient, problems: list[str]) -> metrics_evidence.MetricsPage | None:
    answer = await client.metrics_text()
    if not answer.ok:
        problems.append(f"metrics: {answer.problem}")
        return None
    try:
        return metrics_evidence.parse_metrics(answer.body)
    except UsageError as error:
        problems.append(f"metrics: {error}")
        return None
