"""Shadow probes in the life of a guarded engine: started when it serves, stopped when it drains, never in its way."""

from __future__ import annotations

import traceback

import structlog

from kvguard.engine.client import EngineClient, model_cards
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence.metrics import EngineFigures
from kvguard.evidence.replies import Limits
from kvguard.guard.board import Board
from kvguard.guard.settings import SHADOW_IN_ENGINE, SHADOW_OFF, Settings
from kvguard.guard.surface import Surface
from kvguard.policy.models import ShadowPolicy
from kvguard.shadow.references import External, InEngine
from kvguard.shadow.runner import Reference, Shadow
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
) -> None:
    """Probe until cancelled, when that is on. Whatever goes wrong is logged, and never a client's concern."""
    if settings.shadow == SHADOW_OFF:
        return
    try:
        await _probe_traffic(client, secret, settings, board, surface, limits, model, accepted)
    except Exception as error:  # a bug in probing must not end serving; what the error says could hold a prompt
        where = "".join(traceback.format_tb(error.__traceback__))
        log.error("shadow probing ended unexpectedly; serving goes on without it", error=type(error).__name__, traceback=where)


async def _probe_traffic(
    client: EngineClient,
    secret: str,
    settings: Settings,
    board: Board,
    surface: Surface,
    limits: Limits,
    model: str,
    accepted: ShadowPolicy,
) -> None:
    async def figures() -> EngineFigures:
        """The engine's load now; empty when its metrics cannot be read."""
        try:
            page = metrics_evidence.parse_metrics((await client.metrics_text()).body or b"")
        except UsageError:
            return EngineFigures()
        return metrics_evidence.gauges(page, board.status.effective, limits.max_num_seqs)

    other = None if settings.shadow == SHADOW_IN_ENGINE else EngineClient(settings.shadow)
    reference: Reference = InEngine(client, secret) if other is None else External(other, board.status.engine_version)
    names = [str(card["id"]) for card in model_cards(await client.models()) if not card.get("parent")]
    shadow = Shadow(
        client,
        reference,
        settings.shadow_settings,
        served_model=names[0] if names else model,
        base_models=names,
        baseline=accepted.baseline,
        tolerance=accepted.tolerance,
        dtype=board.status.effective.dtype,
        batch_tokens=limits.max_num_batched_tokens if other is None else None,
        batch_sequences=limits.max_num_seqs,
        figures=figures,
    )
    board.shadow = shadow
    surface.set_tap(shadow.tap)
    try:
        await shadow.run()
    finally:
        surface.set_tap(None)
        if other is not None:
            await other.close()
