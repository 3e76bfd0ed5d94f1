"""/shadow and /shadow/probe on the management port."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kvguard.guard.gate import Status
from kvguard.proxy.management import management_app
from kvguard.proxy.shadow_routes import Probe, Watch


class Port:
    def __init__(self) -> None:
        self.report: dict[str, Any] | None = None
        self.found: dict[str, Any] | None = None
        self.asked: list[Probe] = []
        self.app = management_app(
            Status,
            lambda: None,
            lambda: None,
            list,
            CollectorRegistry(),
            shadow=lambda: self.report,
            probe=self._probe,
            watch=self._watch,
            ranges=lambda: self.ranges,
        )
        self.watched: list[Watch] = []
        self.why_not = ""
        self.ranges: dict[str, Any] | None = None

    def _watch(self, wanted: Watch) -> str:
        self.watched.append(wanted)
        return self.why_not

    async def _probe(self, question: Probe) -> dict[str, Any] | None:
        self.asked.append(question)
        return self.found

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://kvguard") as client:
                return await client.request(method, path, json=body)

        return asyncio.run(go())


@pytest.fixture
def port() -> Port:
    return Port()


def test_the_report_is_there_once_probing_is(port: Port) -> None:
    assert "--shadow in-engine" in port.ask("GET", "/shadow").json()["detail"]
    port.report = {"state": "probing", "reason": "", "baseline": float("nan")}
    assert port.ask("GET", "/shadow").json() == {"state": "probing", "reason": "", "baseline": "NaN"}


def test_a_probe_is_asked_with_defaults(port: Port) -> None:
    port.found = {"requests": 1}
    answer = port.ask("POST", "/shadow/probe", {"prompts": ["a"], "formats": [{"format": "fp8_e5m2"}]})
    assert (answer.status_code, answer.json()) == (200, {"requests": 1})
    [question] = port.asked
    assert (question.max_tokens, question.greedy, question.formats[0].rounding) == (64, False, "nearest")


def test_only_the_pass_inside_the_engine_can_try_formats(port: Port) -> None:
    port.found, port.report = {"requests": 1}, {"reference": "external", "reason": ""}
    answer = port.ask("POST", "/shadow/probe", {"prompts": ["a"], "formats": [{"format": "fp8_e5m2"}]})
    assert (answer.status_code, answer.json()["detail"].endswith("use `--shadow in-engine`")) == (404, True)
    assert port.asked == []
    assert port.ask("POST", "/shadow/probe", {"prompts": ["a"]}).status_code == 200
    port.report = {"reference": "in-engine"}
    assert port.ask("POST", "/shadow/probe", {"prompts": ["a"], "formats": [{"format": "fp8_e5m2"}]}).status_code == 200


def test_live_probes_try_the_formats_asked_for(port: Port) -> None:
    port.report = {"whatif": {}}
    given = {"k": [0.5, [0.25, 1]], "v": [1, 2]}
    formats = [{"format": "fp8_e4m3", "scales": given}, {"format": "int8_per_token_head"}]
    answer = port.ask("PUT", "/shadow/whatif", {"formats": formats})
    assert (answer.status_code, answer.json()) == (200, {"whatif": {}})
    choices = [one.choice() for one in port.watched[0].formats]
    assert (choices[0].label, choices[0].as_question()["scales"]) == ("fp8_e4m3 nearest, scales given", given)
    assert (choices[1].label, choices[1].format, choices[1].scales) == ("int8_per_token_head nearest", "int8", "per_token_head")
    assert port.ask("PUT", "/shadow/whatif", {"formats": []}).status_code == 200
    port.why_not = "shadow probes are checking"
    assert port.ask("PUT", "/shadow/whatif", {"formats": []}).json() == {"detail": port.why_not}


def test_ranges_are_there_once_the_policy_lets_them_be_measured(port: Port) -> None:
    assert "measure_ranges" in port.ask("GET", "/shadow/ranges").json()["detail"]
    port.ranges = {"sequences": 3}
    assert port.ask("GET", "/shadow/ranges").json() == {"sequences": 3}


def test_why_there_is_no_probe(port: Port) -> None:
    question = {"prompts": ["a"]}
    answer = port.ask("POST", "/shadow/probe", question)
    assert (answer.status_code, "shadow probes are off" in answer.json()["detail"]) == (404, True)
    port.report = {"state": "refused", "reason": "the reference pass would not be exact: layer 1: MLA"}
    detail = port.ask("POST", "/shadow/probe", question).json()["detail"]
    assert detail == "shadow probes are refused: the reference pass would not be exact: layer 1: MLA"


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"prompts": []},
        {"prompts": "a"},
        {"prompts": [3]},
        {"prompts": ["a"] * 501},
        {"prompts": ["a" * 200_001]},
        {"prompts": ["a"], "max_tokens": 0},
        {"prompts": ["a"], "max_tokens": 4097},
        {"prompts": ["a"], "formats": [{"format": "int4"}]},
        {"prompts": ["a"], "formats": [{"format": "fp8_e4m3", "scales": "mine"}]},
        {"prompts": ["a"], "formats": [{"format": "fp8_e4m3"}] * 9},
    ],
)
def test_questions_that_are_refused(port: Port, body: Any) -> None:
    assert port.ask("POST", "/shadow/probe", body).status_code == 422
    assert port.asked == []
