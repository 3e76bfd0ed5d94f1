"""The management port's part for shadow probes: what they found, probes on demand, and formats that live ones try."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from kvguard.proxy.documents import Problem, document
from kvguard.shadow.references import IN_ENGINE, NO_CHOICES
from kvguard.shadow.what_if import MOST, WhatIf
from kvguard.vocabulary import Frozen

SHADOW_OFF = "shadow probes are off, or the engine is not serving yet: start with `kvguard serve --shadow in-engine`"

_ANSWER: dict[str, Any] = {"response_model": dict[str, Any], "responses": {404: {"model": Problem}}}


class Probe(Frozen):
    """A one-shot probe. Prompts are kept in memory until they are answered, and nowhere else."""

    prompts: tuple[Annotated[str, Field(max_length=200_000)], ...] = Field(min_length=1, max_length=500)
    formats: tuple[WhatIf, ...] = Field(default=(), max_length=MOST)
    greedy: bool = False
    max_tokens: int = Field(default=64, ge=1, le=4096)


class Watch(Frozen):
    """Formats that live probes try from now on, in place of those before; none: they try none."""

    formats: tuple[WhatIf, ...] = Field(default=(), max_length=MOST)


ProbeOnce = Callable[[Probe], Awaitable[dict[str, Any] | None]]
WatchFormats = Callable[[Watch], str]


def shadow_router(
    shadow: Callable[[], dict[str, Any] | None],
    probe: ProbeOnce | None,
    watch: WatchFormats | None,
    ranges: Callable[[], dict[str, Any] | None],
) -> APIRouter:
    """The routes under /shadow; the callables are `management.management_app`'s."""
    router = APIRouter(tags=["shadow"])

    @router.get(
        "/shadow",
        **_ANSWER,
        summary="Quality estimates by stratum, fidelity, controls and the alarm; no prompts",
    )
    async def shadow_report() -> Response:
        return document(shadow(), SHADOW_OFF)

    @router.post(
        "/shadow/probe",
        **_ANSWER,
        summary="Probe these prompts now; estimates only come back",
    )
    async def shadow_probe(question: Probe) -> Response:
        report = shadow() or {}
        if question.formats and report.get("reference", IN_ENGINE) != IN_ENGINE:
            return document(None, NO_CHOICES)
        found = await probe(question) if probe is not None else None
        why = f"shadow probes are {report['state']}: {report['reason']}" if report.get("reason") else SHADOW_OFF
        return document(found, why)

    @router.get(
        "/shadow/ranges",
        **_ANSWER,
        summary="What keys and values of probed requests span, by layer and head, where the policy lets it be measured",
    )
    async def shadow_ranges() -> Response:
        return document(ranges(), "not measured: the policy needs `shadow: {measure_ranges: true}`, and --shadow in-engine")

    @router.put(
        "/shadow/whatif",
        **_ANSWER,
        summary="Let live probes also try these formats; /shadow has the estimates under `whatif`",
    )
    async def shadow_whatif(wanted: Watch) -> Response:
        why = watch(wanted) if watch is not None else SHADOW_OFF
        return document(None if why else shadow(), why)

    return router
