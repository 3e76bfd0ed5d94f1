"""A reference that goes away and comes back, as itself or as something else: probes wait, and the report says why."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvguard.reference.models import Decode, Standing
from kvguard.shadow import runner
from kvguard.shadow.document import report_document
from kvguard.shadow.models import Stratum
from kvguard.shadow.prompts import SELF_CHECK
from kvguard.shadow.references import Scored
from kvguard.shadow.runner import Shadow, cancel
from kvguard.telemetry.shadow_metrics import ShadowCollector
from shadow_fakes import FakeReference, Probing

GONE = Standing(absent=True)
EQUAL = Standing(equality="by its run record sha256:12")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_IDLE", "_ASK_FIRST", "_ASK_AGAIN"):
        monkeypatch.setattr(runner, name, 0)


def live(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


@dataclass
class Other(FakeReference):
    """An engine beside the primary, there or not."""

    choices_possible: bool = False
    comes_and_goes: bool = True
    standing: Standing = field(default_factory=lambda: EQUAL)
    asked_for: int = 0
    adapters_asked: list[str] = field(default_factory=list)

    def leaves(self, why: str = "other: connection refused", standing: Standing = GONE) -> None:
        self.why_not, self.problem, self.standing = why, "the reference engine: connection refused", standing

    def returns(self, standing: Standing = EQUAL) -> None:
        self.why_not, self.problem, self.standing = "", "", standing

    async def unavailable(self) -> str:
        self.asked_for += 1
        return self.why_not

    async def run(self, decode: Decode, choices: Any) -> Scored:
        self.adapters_asked.append(decode.adapter)
        return await super().run(decode, choices)


class Waiting(Probing):
    """A Shadow whose reference may be away at its start."""

    def __init__(self, reference: Other, **settings: Any) -> None:
        super().__init__(reference, **settings)
        self.other = reference

    async def __aenter__(self) -> Waiting:
        self.task = asyncio.create_task(self.shadow.run())
        await self.until(lambda: self.other.asked_for > 2 or self.shadow._open)
        return self

    async def probed(self, requests: int) -> None:
        before = self.report.probes
        for _ in range(requests):
            self.client_asks()
        await self.until(lambda: self.report.probes == before + requests)


def test_absent_at_the_start_probing_begins_when_it_appears() -> None:
    async def scenario() -> None:
        other = Other()
        other.leaves()
        async with Waiting(other) as probing:
            assert (probing.report.state, probing.report.reason) == ("waiting", "other: connection refused")
            assert (probing.engine.asked, probing.report.equality, probing.report.lost) == ([], "", 0)
            probing.client_asks()
            assert probing.report.rows == (), "nothing is drawn before there is a reference"
            other.returns()
            await probing.until(lambda: probing.shadow._open)
            assert (probing.report.state, probing.report.equality) == ("blind", "by its run record sha256:12")
            await probing.probed(3)

    live(scenario())


@pytest.mark.parametrize(("standing", "state"), [(GONE, "waiting"), (Standing(), "refused")])
def test_it_goes_and_comes_back(standing: Standing, state: str) -> None:
    async def scenario() -> None:
        other = Other()
        async with Waiting(other) as probing:
            await probing.probed(2)
            other.leaves("why", standing)
            probing.client_asks()
            await probing.until(lambda: probing.report.state == state)
            assert (probing.report.reason, probing.report.lost) == ("why", 1)
            for _ in range(5):
                probing.client_asks()
            await asyncio.sleep(0)
            drops = probing.drops()
            assert (drops["failed"], drops["reference"]) == (1, 5), "each by its cause"
            assert probing.report.probes == 2
            asked = other.asked_for
            await probing.until(lambda: other.asked_for > asked + 3)
            assert probing.report.lost == 1, "one absence counts once"
            other.returns()
            await probing.until(lambda: probing.report.state == "blind")
            await probing.probed(3)
            assert probing.drops() == drops, "the breaker is closed again"

    live(scenario())


def test_an_absence_is_seen_without_any_request() -> None:
    async def scenario() -> None:
        other = Other()
        async with Waiting(other) as probing:
            other.leaves()
            probing.clock.now += 60
            await probing.until(lambda: probing.report.state == "waiting")
            assert report_document(probing.report)["reason"] == "other: connection refused"

    live(scenario())


def test_what_waits_for_its_turn_when_it_goes_is_dropped_by_that_name() -> None:
    async def scenario() -> None:
        other = Other()
        async with Waiting(other) as probing:
            probing.load = probing.load.__class__(running=1.0, waiting=5.0, kv_pinned_ratio=0.1)
            for _ in range(3):
                probing.client_asks()
            other.leaves()
            probing.clock.now += 5
            await probing.until(lambda: probing.report.state == "waiting")
            assert probing.drops() == {"reference": 3}

    live(scenario())


def test_a_pass_that_fails_while_it_is_there_trips_the_breaker_for_a_time() -> None:
    async def scenario() -> None:
        other = Other()
        async with Waiting(other, retry_after_s=30) as probing:
            other.problem = "the reference engine: HTTP 400 without a readable answer"
            probing.client_asks()
            await probing.until(lambda: probing.drops().get("failed") == 1)
            other.problem = ""
            probing.client_asks()
            assert probing.drops()["breaker"] == 1
            assert probing.report.state == "blind"
            probing.clock.now += 31
            await probing.probed(1)

    live(scenario())


def test_a_self_check_that_loses_its_reference_is_made_up_for() -> None:
    async def scenario() -> None:
        other = Other()
        probing = Waiting(other)
        task = asyncio.create_task(probing.shadow.run())
        await probing.until(lambda: len(other.asked) == 3)
        other.leaves()
        await probing.until(lambda: probing.report.state == "waiting")
        assert probing.report.lost == 0, "there was no probing to lose it from"
        other.returns()
        await probing.until(lambda: probing.shadow._open)
        assert probing.report.fidelity is not None
        assert probing.report.fidelity.requests == len(SELF_CHECK) - 1
        await cancel(task)

    live(scenario())


def test_a_self_check_without_any_score_is_repeated() -> None:
    async def scenario() -> None:
        other = Other(problem="the reference engine: HTTP 500 without a readable answer")
        probing = Waiting(other)
        task = asyncio.create_task(probing.shadow.run())
        await probing.until(lambda: probing.report.state == "refused")
        assert "HTTP 500" in probing.report.reason
        other.returns()
        await probing.until(lambda: probing.shadow._open)
        assert probing.report.fidelity is not None
        await cancel(task)

    live(scenario())


def test_what_is_too_long_for_it_is_no_failure() -> None:
    async def scenario() -> None:
        other = Other(standing=Standing(max_tokens=23))  # a prompt of 3 and an answer of 20
        async with Waiting(other) as probing:
            probing.client_asks()
            await probing.until(lambda: bool(probing.drops()))
            assert probing.drops() == {"too_long": 1}
            assert (other.asked_for, other.at_once) == (1, 1)

    live(scenario())


def test_adapters_that_both_have_are_probed_as_strata_of_their_own() -> None:
    async def scenario() -> None:
        other = Other(standing=Standing(adapters=frozenset({"french"})))
        async with Waiting(other) as probing:
            probing.client_asks(model="french")
            await probing.until(lambda: probing.report.probes == 1)
            assert probing.engine.asked[-1]["model"] == "french", "replayed with the adapter"
            assert (other.adapters_asked[0], other.adapters_asked[-1]) == ("", "french")
            assert set(probing.report.sums["cost"]) == {Stratum("0-256", "1", "french")}
            probing.client_asks(model="german")
            assert probing.report.skipped == {"adapter": 1}
            other.leaves()
            probing.clock.now += 60
            await probing.until(lambda: probing.report.state == "waiting")
            other.returns(Standing(adapters=frozenset({"german"})))
            await probing.until(lambda: probing.report.state == "blind")
            probing.client_asks(model="german")
            probing.client_asks(model="french")
            await probing.until(lambda: probing.report.probes == 2)
            assert probing.report.skipped == {"adapter": 2}, "as the reference is now"

    live(scenario())


def test_the_pass_inside_the_engine_has_no_adapters() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.client_asks(model="french")
            assert probing.report.skipped == {"adapter": 1}

    live(scenario())


def test_metrics_say_whether_there_is_a_reference() -> None:
    def page(shadow: Shadow) -> str:
        registry = CollectorRegistry()
        registry.register(ShadowCollector(lambda: shadow.report))
        return generate_latest(registry).decode()

    async def scenario() -> None:
        other = Other()
        async with Waiting(other) as probing:
            assert "kvguard_shadow_reference_up 1.0" in page(probing.shadow)
            other.leaves()
            probing.clock.now += 60
            await probing.until(lambda: probing.report.state == "waiting")
            assert "kvguard_shadow_reference_up 0.0" in page(probing.shadow)
            assert "kvguard_shadow_reference_lost_total 1.0" in page(probing.shadow)

    live(scenario())
