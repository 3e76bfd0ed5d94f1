"""What kvguard costs: lateness and CPU time are measured while requests are in flight, and only then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from kvguard.telemetry.metrics import ProxyMetrics
from kvguard.telemetry.pulse import EVERY, Pulse


class Sink:
    """A summary and a counter."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def observe(self, amount: float) -> None:
        self.seen.append(amount)

    def inc(self, amount: float = 1) -> None:
        self.seen.append(amount)


class Loop:
    """A loop whose time the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Callable[..., None], tuple[object, ...]]] = []
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., None], *arguments: object) -> None:
        self.due.append((when, callback, arguments))

    def go(self, late: float) -> None:
        """Do what is due next, this late."""
        when, callback, arguments = self.due.pop(0)
        self.now = when + late
        callback(*arguments)


def test_lateness_and_cpu_time_are_measured_while_a_request_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, delay, cpu, spent = Loop(monkeypatch), Sink(), Sink(), [3.0]
    pulse = Pulse(delay, cpu, lambda: spent[0])
    pulse.request_started()
    pulse.request_started()
    assert [when for when, _, _ in loop.due] == [100.0 + EVERY]
    loop.go(late=0.0)
    spent[0] = 3.5
    loop.go(late=0.125)
    assert delay.seen == [0.0, 0.125]
    assert cpu.seen == [3.0, 0.5]
    pulse.request_ended()
    loop.go(late=0.0)
    assert len(loop.due) == 1, "one is still in flight"
    pulse.request_ended()
    loop.go(late=0.0)
    assert loop.due == [], "an idle kvguard measures nothing"
    pulse.request_started()
    assert len(loop.due) == 1


def test_a_loop_that_is_held_up_is_late() -> None:
    registry = CollectorRegistry()
    metrics = ProxyMetrics(registry)

    def value(name: str) -> float:
        found = registry.get_sample_value(name)
        assert found is not None
        return found

    async def hold_up() -> None:
        metrics.request_started("/v1/models")
        time.sleep(EVERY + 0.2)  # noqa: ASYNC251 (that is what holds it up)
        while not value("kvguard_proxy_delay_seconds_count"):
            await asyncio.sleep(0.01)
        metrics.finished("/v1/models", "GET", 200, 0.5, "ok")

    asyncio.run(hold_up())
    assert value("kvguard_proxy_delay_seconds_sum") >= 0.19
    assert value("kvguard_proxy_cpu_seconds_total") > 0


def test_outside_a_loop_requests_are_counted_all_the_same() -> None:
    registry = CollectorRegistry()
    metrics = ProxyMetrics(registry)
    metrics.request_started("/v1/models")
    metrics.finished("/v1/models", "GET", 200, 0.5, "ok")
    assert registry.get_sample_value("kvguard_proxy_delay_seconds_count") == 0
    assert registry.get_sample_value("kvguard_proxy_request_duration_seconds_count") == 1
