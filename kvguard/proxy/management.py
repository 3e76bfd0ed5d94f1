"""The management port: probes, metrics, and the documents that say what this engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

import kvguard
from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.proxy.documents import Problem, as_json, document
from kvguard.proxy.shadow_routes import ProbeOnce, WatchFormats, shadow_router
from kvguard.proxy.status_page import content_security_policy, status_page
from kvguard.vocabulary import Check, Effective, Frozen

READY_STATES = frozenset({State.SERVING, State.DRIFTED})
"""States in which new requests should be sent here. Draining still answers them, and is not ready."""


class Alive(Frozen):
    """The process lives."""

    status: str = "alive"


class Ready(Frozen):
    """Where the guard stands, and why."""

    state: State
    reason: str


class Evidence(Frozen):
    """The claims of every source, what they support together, and the checks against the policy.

    `drift` is what differs from what was established, `stale` why the last verification could not confirm the verdict.
    """

    state: State
    drift: str
    stale: str
    effective: Effective
    checks: tuple[Check, ...]
    claims: list[dict[str, Any]]


def management_app(
    status: Callable[[], Status],
    record: Callable[[], dict[str, Any] | None],
    policy: Callable[[], dict[str, Any] | None],
    evidence: Callable[[], list[dict[str, Any]]],
    registry: CollectorRegistry,
    *,
    shadow: Callable[[], dict[str, Any] | None] = lambda: None,
    probe: ProbeOnce | None = None,
    watch: WatchFormats | None = None,
    ranges: Callable[[], dict[str, Any] | None] = lambda: None,
) -> FastAPI:
    """The app; the callables are asked at each request and must not block. NaN and infinity become JSON strings.

    `shadow` gives the report of shadow probing, `probe` runs a one-shot probe; both give None while probing is off.
    `watch` sets the formats that live probes try, and gives why it cannot, "" when it did. `ranges` is what keys and
    values of probed requests span, None where that is not measured.
    """
    app = FastAPI(
        title="kvguard management",
        version=kvguard.__version__,
        description="Probes, metrics and evidence of one guarded vLLM engine. Requests go to the API port.",
    )

    @app.get(
        "/",
        responses={200: {"content": {"text/html": {}}}},
        response_class=Response,
        tags=["documents"],
        summary="The status page: verdict, evidence, memory, batch and quality, for people",
    )
    async def page() -> Response:
        html = status_page(status(), evidence(), has_policy=policy() is not None, shadow=shadow())
        headers = {
            "content-security-policy": content_security_policy(),
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(html, headers=headers, media_type="text/html")

    @app.get("/livez", response_model=Alive, tags=["probes"], summary="200 while the process lives, draining included")
    async def livez() -> Response:
        return as_json(Alive())

    @app.get(
        "/readyz",
        response_model=Ready,
        responses={503: {"model": Ready, "description": "not verified, refused, draining or stopped"}},
        tags=["probes"],
        summary="200 while verified and open to new requests",
    )
    async def readyz() -> Response:
        now = status()
        ready = now.state in READY_STATES and not now.unready
        return as_json(Ready(state=now.state, reason=now.unready or now.reason), 200 if ready else 503)

    @app.get(
        "/metrics",
        responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
        response_class=Response,
        tags=["metrics"],
        summary="Prometheus metrics, in the format the scraper asks for",
    )
    async def metrics(request: Request) -> Response:
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(registry), headers={"content-type": content_type})

    @app.get(
        "/record",
        response_model=dict[str, Any],
        responses={404: {"model": Problem}},
        tags=["documents"],
        summary="The run record (in-toto statement)",
    )
    async def run_record() -> Response:
        return document(record(), "the run record is written once the engine is verified or refused")

    @app.get(
        "/policy",
        response_model=dict[str, Any],
        responses={404: {"model": Problem}},
        tags=["documents"],
        summary="The policy in force",
    )
    async def active_policy() -> Response:
        return document(policy(), "no policy was given: only the integrity of the KV cache is checked")

    @app.get("/evidence", response_model=Evidence, tags=["documents"], summary="Claims, effective value and checks")
    async def all_evidence() -> Response:
        now = status()
        return as_json(
            Evidence(
                state=now.state,
                drift=now.drift,
                stale=now.stale,
                effective=now.effective,
                checks=now.checks,
                claims=evidence(),
            )
        )

    app.include_router(shadow_router(shadow, probe, watch, ranges))
    return app
