"""The management port's answers."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.proxy.management import management_app
from kvguard.proxy.management_server import serve_management
from kvguard.proxy.server import bind
from kvguard.telemetry.metrics import GuardCollector
from kvguard.vocabulary import Check, CheckResult, Claim, Effective, Source, Stage


class Guard:
    """What the lifecycle would hand in, changeable by the test."""

    def __init__(self) -> None:
        self.status = Status()
        self.record: dict[str, Any] | None = None
        self.policy: dict[str, Any] | None = None
        self.evidence: list[dict[str, Any]] = []
        self.registry = CollectorRegistry()
        self.registry.register(GuardCollector(lambda: self.status))
        self.app = management_app(
            lambda: self.status, lambda: self.record, lambda: self.policy, lambda: self.evidence, self.registry
        )

    def get(self, path: str, **headers: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://kvguard") as client:
                return await client.get(path, headers=headers)

        return asyncio.run(ask())


@pytest.fixture
def guard() -> Guard:
    return Guard()


@pytest.mark.parametrize("state", list(State))
def test_liveness_is_200_in_every_state_and_readiness_only_while_serving(guard, state):
    guard.status = Status(state=state, reason="because")
    assert guard.get("/livez").status_code == 200
    ready = guard.get("/readyz")
    assert ready.status_code == (200 if state in (State.SERVING, State.DRIFTED) else 503)
    assert ready.json() == {"state": state.value, "reason": "because"}


def test_documents_are_404_until_they_exist(guard):
    for path in ("/record", "/policy"):
        missing = guard.get(path)
        assert missing.status_code == 404
        assert missing.json()["detail"]
    guard.record = {"_type": "https://in-toto.io/Statement/v1", "predicate": {"scale": float("nan")}}
    guard.policy = {"kv_cache": {"dtype": ["fp8_e4m3"]}}
    assert guard.get("/record").json() == {
        "_type": "https://in-toto.io/Statement/v1",
        "predicate": {"scale": "NaN"},
    }
    assert guard.get("/policy").json() == guard.policy


def test_evidence_shows_claims_effective_and_checks(guard):
    claim = Claim(stage=Stage.OBSERVED, source=Source.TENSORS, field="k_scale", value=float("inf"), where="rank 0")
    guard.evidence = [claim.model_dump()]
    guard.status = Status(
        state=State.REFUSED,
        effective=Effective(dtype="fp8_e4m3", supported_by=(claim,), bytes_per_token=float("nan")),
        checks=(Check(name="dtype", result=CheckResult.FAIL, required="bfloat16", found="fp8_e4m3", where="rank 0"),),
    )
    answer = guard.get("/evidence")
    assert answer.status_code == 200
    document = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["state"] == "refused"
    assert document["effective"]["dtype"] == "fp8_e4m3"
    assert document["effective"]["bytes_per_token"] == "NaN"
    assert document["checks"][0]["result"] == "fail"
    assert document["claims"][0]["value"] == "Infinity"
    assert document["claims"][0]["source"] == "tensors"


def test_metrics_speak_the_scrapers_format(guard):
    plain = guard.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert 'kvguard_state{state="starting"} 1.0' in plain.text
    modern = guard.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    assert modern.text.endswith("# EOF\n")


def test_schema_describes_every_document(guard):
    schema = guard.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/",
        "/livez",
        "/readyz",
        "/metrics",
        "/record",
        "/policy",
        "/evidence",
        "/shadow",
        "/shadow/probe",
        "/shadow/ranges",
        "/shadow/whatif",
    }
    assert {"Ready", "Evidence", "Effective", "Check", "Problem"} <= set(schema["components"]["schemas"])
    assert "503" in schema["paths"]["/readyz"]["get"]["responses"]
    assert guard.get("/docs").status_code == 200


def test_serves_on_a_socket_until_told_to_stop(guard):
    import signal

    async def live() -> int:
        listener = bind("127.0.0.1", 0)
        host, port = listener.getsockname()
        stop = asyncio.Event()
        before = signal.getsignal(signal.SIGTERM)
        serving = asyncio.create_task(serve_management(guard.app, listener, stop))
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=5), base_url=f"http://{host}:{port}") as client:
            answer = await client.get("/livez")
            assert signal.getsignal(signal.SIGTERM) is before
            stop.set()
            await asyncio.wait_for(serving, 60)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), timeout=1)
        return answer.status_code

    assert asyncio.run(live()) == 200


def test_cancelling_stops_it_too(guard):
    async def live() -> bool:
        listener = bind("127.0.0.1", 0)
        serving = asyncio.create_task(serve_management(guard.app, listener, asyncio.Event()))
        await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait({serving}, timeout=60)
        return serving.cancelled() and listener.fileno() == -1

    assert asyncio.run(live())
