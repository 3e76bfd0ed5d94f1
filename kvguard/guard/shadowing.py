"""Shadow probes in the life of a guarded engine: started when it serves, stopped when it drains, never in its way."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import structlog

from kvguard.engine.client import EngineClient
from kvguard.engine.run_directory import RunDirectory
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence.metrics import EngineFigures
from kvguard.evidence.replies import Limits
from kvguard.guard.board import Board
from kvguard.guard.launched import LaunchedReference, launched
from kvguard.guard.reference_start import ReferenceStart
from kvguard.guard.settings import SHADOW_IN_ENGINE, SHADOW_OFF, Settings
from kvguard.guard.surface import Surface
from kvguard.policy.models import ShadowPolicy
from kvguard.reference.external import Primary, bases_and_adapters, model_names
from kvguard.reference.their_record import read_their_record
from kvguard.shadow.references import External, InEngine, Reference
from kvguard.shadow.runner import Shadow
from kvguard.vocabulary import UsageError

log = structlog.get_logger("kvguard")


async def probe_traffic(
    client: EngineClient,
    secret: str,
    settings: Settings,
    board: Board,
    surface: Surface,
    *,
    limits: Limits,
    model: str,
    accepted: ShadowPolicy,
    launch: ReferenceStart | None = None,
    run_directory: RunDirectory | None = None,
) -> None:
    """Probe until cancelled, when that is on. Whatever goes wrong is logged, and never a client's concern.

    `launch` is the reference that is started here, in `run_directory`, and ended before this returns.
    """
    if settings.shadow == SHADOW_OFF:
        return
    try:
        bases, _ = bases_and_adapters(await client.models())
        primary = Primary(board.status.engine_version, model_names(bases), board.record)
        names = [str(card["id"]) for card in bases]
        async with _reference(
            client, secret, settings, primary, launch, run_directory, ranges=accepted.measure_ranges
        ) as reference:
            await _probe_traffic(client, reference, settings, board, surface, limits, names or [model], accepted)
    except Exception as error:  # a bug in probing must not end serving; what the error says could hold a prompt
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("shadow probing ended unexpectedly; serving goes on without it", error=type(error).__name__, traceback=where)


@asynccontextmanager
async def _reference(
    client: EngineClient,
    secret: str,
    settings: Settings,
    primary: Primary,
    launch: ReferenceStart | None,
    run_directory: RunDirectory | None,
    *,
    ranges: bool,
) -> AsyncIterator[Reference]:
    """The reference that the settings name, for as long as this block lasts."""
    if settings.shadow == SHADOW_IN_ENGINE:
        yield InEngine(client, secret, ranges=ranges)
    elif launch is not None and run_directory is not None:
        kept = LaunchedReference(launch, run_directory, primary.record or {}, start_limit=settings.start_timeout)
        async with launched(kept) as reference:
            yield reference
    else:
        record = settings.shadow_record
        async with EngineClient(settings.shadow, settings.shadow_key or None) as other:
            yield External(other, primary, partial(read_their_record, record) if record else None)


async def _probe_traffic(
    client: EngineClient,
    reference: Reference,
    settings: Settings,
    board: Board,
    surface: Surface,
    limits: Limits,
    names: list[str],
    accepted: ShadowPolicy,
) -> None:
    async def figures() -> EngineFigures:
        """The engine's load now; empty when its metrics cannot be read."""
        try:
            page = metrics_evidence.parse_metrics((await client.metrics_text()).body or b"")
        except UsageError:
            return EngineFigures()
        return metrics_evidence.gauges(page, board.status.effective, limits.max_num_seqs)

    shadow = Shadow(
        client,
        reference,
        settings.shadow_settings.model_copy(update={"require_opt_in": True})
        if accepted.require_opt_in
        else settings.shadow_settings,
        served_model=names[0],
        base_models=names,
        baseline=accepted.baseline,
        tolerance=accepted.tolerance,
        dtype=board.status.effective.dtype,
        batch_tokens=None if reference.comes_and_goes else limits.max_num_batched_tokens,
        batch_sequences=limits.max_num_seqs,
        figures=figures,
        in_flight=lambda: surface.in_flight,
        generated=lambda: board.status.gauges.generated_total,
    )
    board.shadow = shadow
    surface.set_tap(shadow.tap)
    rules = settings.shadow_settings
    log.info("shadow probes on", reference=reference.name, rate=rules.rate, engine_share=rules.engine_share)
    try:
        await shadow.run()
    finally:
        surface.set_tap(None)
