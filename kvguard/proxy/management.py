"""The management port: probes, metrics, and the documents that say what this engine runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import Field
from pydantic_core import to_json

import kvguard
from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.proxy.status_page import content_security_policy, status_page
from kvguard.shadow.references import IN_ENGINE, NO_CHOICES
from kvguard.shadow.what_if import MOST, WhatIf
from kvguard.vocabulary import Check, Effective, Frozen

READY_STATES = frozenset({State.SERVING, State.DRIFTED})
"""States in which new requests should be sent here. Draining still answers them, and is not ready."""

_GRACE_S = 1


class Alive(Frozen):
    """The process lives."""

    status: str = "alive"


class Ready(Frozen):
    """Where the guard stands, and why."""

    state: State
    reason: str


class Problem(Frozen):
    """Why there is no such document."""

    detail: str


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
        return _json(Alive())

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
        return _json(Ready(state=now.state, reason=now.unready or now.reason), 200 if ready else 503)

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
        return _document(record(), "the run record is written once the engine is verified or refused")

    @app.get(
        "/policy",
        response_model=dict[str, Any],
        responses={404: {"model": Problem}},
        tags=["documents"],
        summary="The policy in force",
    )
    async def active_policy() -> Response:
        return _document(policy(), "no policy was given: only the integrity of the KV cache is checked")

    @app.get("/evidence", response_model=Evidence, tags=["documents"], summary="Claims, effective value and checks")
    async def all_evidence() -> Response:
        now = status()
        return _json(
            Evidence(
                state=now.state,
                drift=now.drift,
                stale=now.stale,
                effective=now.effective,
                checks=now.checks,
                claims=evidence(),
            )
        )

    @app.get(
        "/shadow",
        response_model=dict[str, Any],
        responses={404: {"model": Problem}},
        tags=["shadow"],
        summary="Quality estimates by stratum, fidelity, controls and the alarm; no prompts",
    )
    async def shadow_report() -> Response:
        return _document(shadow(), _SHADOW_OFF)

    @app.post(
        "/shadow/probe",
        response_model=dict[str, Any],
        responses={404: {"model": Problem}},
        tags=["shadow"],
        summary="Probe these prompts now; estimates only come back",
    )
    async def shadow_probe(question: Probe) -> Response:
        report = shadow() or {}
        if question.formats and report.get("reference", IN_ENGINE) != IN_ENGINE:
            return _document(None, NO_CHOICES)
        found = await probe(question) if probe is not None else None
        why = f"shadow probes are {report['state']}: {report['reason']}" if report.get("reason") else _SHADOW_OFF
        return _document(found, why)

    @app.get(
        "/shadow/ranges",
        response_model=dict[str, Any],
        responses={404: {"model": Problem}},
        tags=["shadow"],
        summary="What keys and values of probed requests span, by layer and head, where the policy lets it be measured",
    )
    async def shadow_ranges() -> Response:
        return _document(ranges(), "not measured: the policy needs `shadow: {measure_ranges: true}`, and --shadow in-engine")

    @app.put(
        "/shadow/whatif",
        response_model=dict[str, Any],
        responses={404: {"model": Problem}},
        tags=["shadow"],
        summary="Let live probes also try these formats; /shadow has the estimates under `whatif`",
    )
    async def shadow_whatif(wanted: Watch) -> Response:
        why = watch(wanted) if watch is not None else _SHADOW_OFF
        return _document(None if why else shadow(), why)

    return app


_SHADOW_OFF = "shadow probes are off, or the engine is not serving yet: start with `kvguard serve --shadow in-engine`"


def _document(document: dict[str, Any] | None, why_missing: str) -> Response:
    return _json(Problem(detail=why_missing), 404) if document is None else _json(document)


def _json(value: Any, status_code: int = 200) -> Response:
    # FastAPI's own encoder refuses NaN and infinity, which scales can be.
    return Response(to_json(value, inf_nan_mode="strings"), status_code, media_type="application/json")


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: signals are the lifecycle's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_management(app: FastAPI, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve on the current loop until `stop` is set (or this task is cancelled), then finish within a second."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving
