"""The drift watch on a clock of its own: when it verifies, what it posts, and that nothing in it ends serving."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvguard.evidence.capacity import CapacityReading
from kvguard.guard.board import Board
from kvguard.guard.drift import Drift
from kvguard.guard.file_watch import fingerprints, watch_files
from kvguard.guard.gate import Gate
from kvguard.guard.rewatch import CONFIRM, GAP, DriftWatch, Verified
from kvguard.guard.state import Event, State
from kvguard.guard.verify import Evidence
from kvguard.policy.models import DriftPolicy, OnDrift
from kvguard.vocabulary import Check, CheckResult, Confidence, Effective, ScaleState


def verified(
    dtype: str = "fp8_e4m3",
    confidence: str = "proven",
    *,
    failed: str = "",
    unverified: str = "",
    problems: tuple[str, ...] = (),
) -> Verified:
    scales = ScaleState.CHECKPOINT if dtype == "fp8_e4m3" else ScaleState.NOT_QUANTIZED
    if confidence == "unknown":
        dtype, scales = "unknown", ScaleState.UNKNOWN
    effective = Effective(dtype=dtype, confidence=Confidence(confidence), scales=scales)
    results = {failed: CheckResult.FAIL, unverified: CheckResult.UNVERIFIED}
    checks = tuple(Check(name=n, result=r, required="", found="", where="") for n, r in results.items() if n)
    evidence = Evidence(effective=effective, claims=(), capacity=CapacityReading(), tensors=None, problems=problems)
    return Verified(evidence=evidence, checks=checks, engine_version="0.32.0")


FP8, SIXTEEN = verified(), verified("bfloat16")


class Clock:
    """Time that moves when everything sleeps. `slept` are the pauses that ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    async def pause(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, woken))
        await woken

    async def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            due = sorted((at, index) for index, (at, woken) in enumerate(self._sleepers) if not woken.done())
            if not due or due[0][0] > end:
                self.now = end
                return
            self.now = due[0][0]
            self._sleepers.pop(due[0][1])[1].set_result(None)


class Watched:
    """A watch on an engine that shows `now`."""

    def __init__(self, first: Verified = FP8, policy: DriftPolicy | None = None, every: float = 60.0) -> None:
        self.clock = Clock()
        self.board = Board(Gate())
        self.board.move(Event.ENGINE_HEALTHY, "")
        self.board.update(effective=first.effective, last_verified=0.0)
        self.board.move(Event.VERDICT_ALLOWS, "serving")
        self.now: Verified | str | Exception = first
        self.verified_at: list[float] = []
        self.records: list[tuple[str, int]] = []
        self.watch = DriftWatch(
            self.board,
            first,
            self._verify,
            self._record,
            policy or DriftPolicy(),
            every=every,
            clock=lambda: self.clock.now,
            pause=self.clock.pause,
        )

    async def _verify(self) -> Verified | str:
        self.verified_at.append(self.clock.now)
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    def _record(self, found: Verified, drift: Drift) -> None:
        self.records.append((found.effective.dtype, len(drift.changes)))

    @property
    def header(self) -> str:
        return dict(self.board.gate.snapshot.headers)[b"x-kvguard-kv-cache-dtype"].decode()


def watching(scenario: Callable[[Watched], Awaitable[None]], **more: Any) -> list[Any]:
    """Run a scenario beside a watch; returns what was logged."""

    async def both() -> None:
        one = Watched(**more)
        running = asyncio.create_task(one.watch.run())
        await scenario(one)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with capture_logs() as logs:
        asyncio.run(both())
    return logs


def test_the_timer_verifies_and_an_unchanged_engine_changes_nothing() -> None:
    async def scenario(one: Watched) -> None:
        await one.clock.pass_time(200)
        assert one.verified_at == [60, 120 + GAP, 180 + 2 * GAP]
        assert one.board.status.last_verified == one.verified_at[-1]
        assert one.records == []
        assert one.board.status.state is State.SERVING

    assert watching(scenario) == []


def test_without_a_timer_only_signs_count() -> None:
    async def scenario(one: Watched) -> None:
        await one.clock.pass_time(10_000)
        assert one.verified_at == []
        one.watch.ask("config.json changed on disk")
        await one.clock.pass_time(0)
        assert one.verified_at == [10_000]

    assert watching(scenario, every=0.0)[0]["because"] == "config.json changed on disk"


def test_drift_is_posted_once_and_its_end_too() -> None:
    async def scenario(one: Watched) -> None:
        one.now = SIXTEEN
        await one.clock.pass_time(200)
        status = one.board.status
        assert (status.state, status.unready, one.header) == (State.DRIFTED, "", "bfloat16")
        assert status.reason.startswith("drifted: kv_cache_dtype: fp8_e4m3 was established, now bfloat16")
        assert status.drift_counts == {"kv_cache_dtype": 1, "kv_scales": 1}
        assert one.records == [("bfloat16", 2)]
        one.now = FP8
        await one.clock.pass_time(70)
        assert (one.board.status.state, one.header, one.board.status.drift) == (State.SERVING, "fp8_e4m3", "")
        assert one.records == [("bfloat16", 2), ("fp8_e4m3", 0)]

    logs = watching(scenario)
    found = [(log["field"], log["before"], log["after"]) for log in logs if log["event"] == "drift"]
    assert found == [("kv_cache_dtype", "fp8_e4m3", "bfloat16"), ("kv_scales", "checkpoint", "not_quantized")]
    assert [log["event"] for log in logs].count("drift is over") == 1


@pytest.mark.parametrize(
    "unread",
    [
        "the workers did not answer within 60 s",
        RuntimeError("a bug"),
        verified(confidence="unknown", problems=("tensors: the channel to the workers stays closed",)),
    ],
)
def test_what_cannot_be_read_keeps_the_verdict_and_goes_stale(unread: Any) -> None:
    async def scenario(one: Watched) -> None:
        one.now = unread
        await one.clock.pass_time(200)
        status = one.board.status
        assert (status.state, status.last_verified, one.header) == (State.SERVING, 0.0, "fp8_e4m3")
        assert status.stale
        one.now = FP8
        await one.clock.pass_time(70)
        assert one.board.status.stale == ""
        assert one.records == []

    logs = watching(scenario)
    assert [log["event"] for log in logs].count("the verdict could not be confirmed; it stands as it was") == 1
    assert logs[-1]["event"] == "the verdict is confirmed again"


def test_unready_is_confirmed_soon_and_ends_with_the_drift() -> None:
    async def scenario(one: Watched) -> None:
        one.now = SIXTEEN
        await one.clock.pass_time(61)
        assert (one.board.status.state, one.watch.unready) == (State.DRIFTED, "")
        await one.clock.pass_time(GAP + CONFIRM)
        assert one.watch.unready.startswith("drift: kv_cache_dtype")
        one.now = FP8
        await one.clock.pass_time(70)
        assert one.watch.unready == ""

    watching(scenario, policy=DriftPolicy(action=OnDrift.UNREADY))


def test_many_reports_of_change_are_one_verification_at_a_time() -> None:
    async def scenario(one: Watched) -> None:
        for _ in range(10):
            for _ in range(100):
                one.watch.request_changed("/v1/load_lora_adapter", answered=False)
                one.watch.request_changed("/v1/load_lora_adapter", answered=True)
            await one.clock.pass_time(GAP)
        assert len(one.verified_at) <= 11
        assert one.verified_at[0] == 0.0

    logs = watching(scenario)
    assert logs[0]["because"] == "/v1/load_lora_adapter was answered"


def test_workers_are_not_asked_while_a_request_puts_them_to_sleep() -> None:
    async def scenario(one: Watched) -> None:
        one.watch.request_changed("/sleep", answered=False)
        one.watch.ask("something else")
        await one.clock.pass_time(30)
        assert one.verified_at == []
        one.watch.request_changed("/sleep", answered=True)
        await one.clock.pass_time(2)
        assert len(one.verified_at) >= 1

    watching(scenario)


def test_a_client_that_stalls_its_request_does_not_stop_the_watch() -> None:
    async def scenario(one: Watched) -> None:
        one.watch.request_changed("/sleep", answered=False)
        await one.clock.pass_time(60 + 61)
        assert one.verified_at == [120]

    watching(scenario)


def test_requests_that_change_nothing_are_no_signs() -> None:
    async def scenario(one: Watched) -> None:
        one.watch.request_changed("/v1/completions", answered=True)
        await one.clock.pass_time(10)
        assert one.verified_at == []

    watching(scenario)


# An engine that was away


def away(one: Watched) -> None:
    one.board.move(Event.ENGINE_LOST, "lost")
    assert (one.board.status.state, one.board.gate.snapshot.open) == (State.STARTING, False)
    one.board.move(Event.ENGINE_HEALTHY, "back")


def test_back_as_it_was() -> None:
    async def scenario(one: Watched) -> None:
        away(one)
        assert one.watch.resume(FP8)
        assert (one.board.status.state, one.records) == (State.SERVING, [])

    watching(scenario)


def test_back_as_another_is_drift_and_putting_it_back_ends_it() -> None:
    async def scenario(one: Watched) -> None:
        for _ in range(2):
            away(one)
            assert one.watch.resume(SIXTEEN)
            assert (one.board.status.state, one.header) == (State.DRIFTED, "bfloat16")
        assert one.records == [("bfloat16", 2)]
        away(one)
        assert one.watch.resume(FP8)
        assert (one.board.status.state, one.header) == (State.SERVING, "fp8_e4m3")
        assert one.board.status.drift_counts["kv_cache_dtype"] == 1

    watching(scenario)


def test_back_and_not_readable_keeps_the_gate_closed_where_a_policy_requires_it() -> None:
    async def scenario(one: Watched) -> None:
        away(one)
        assert not one.watch.resume(verified(confidence="unknown", unverified="confidence"))
        assert (one.board.status.state, one.board.gate.snapshot.open) == (State.VERIFYING, False)
        assert one.board.status.stale.startswith("not verified since the engine was started again")
        assert one.watch.resume(FP8)

    watching(scenario)


def test_back_and_less_readable_says_only_what_was_seen() -> None:
    async def scenario(one: Watched) -> None:
        away(one)
        assert one.watch.resume(verified(confidence="unknown"))
        assert (one.board.status.state, one.header) == (State.SERVING, "unknown")
        assert one.board.status.stale

    watching(scenario)


def test_a_violation_that_was_served_with_a_warning_and_is_cured_is_no_drift() -> None:
    async def scenario(one: Watched) -> None:
        away(one)
        assert one.watch.resume(FP8)
        assert (one.board.status.state, one.header, one.watch.drift.changes) == (State.SERVING, "fp8_e4m3", ())
        assert one.records == [("fp8_e4m3", 0)]

    assert watching(scenario, first=verified("bfloat16", failed="kv_cache_dtype"))[0]["event"] == "the policy is met now"


# Files


def test_files_that_change_are_named_once(tmp_path: Any) -> None:
    async def scenario() -> None:
        clock = Clock()
        said: list[str] = []
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_text("x")
        task = asyncio.create_task(watch_files(str(tmp_path), fingerprints(str(tmp_path)), said.append, 5.0, clock.pause))

        async def later() -> None:
            await clock.pass_time(5)
            await asyncio.sleep(0.05)  # the directory is read on a thread
            await clock.pass_time(5)
            await asyncio.sleep(0.05)

        await asyncio.sleep(0.05)
        await later()
        assert said == []
        (tmp_path / "config.json").write_text('{"changed": 1}')
        (tmp_path / "hf_quant_config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_text("y")
        await later()
        assert said == ["config.json, hf_quant_config.json changed on disk"]
        moved = tmp_path.rename(tmp_path.with_name("moved"))
        await later()
        moved.rename(tmp_path)
        await later()
        assert len(said) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
