"""A guard beside an engine that somebody else started: verdicts, restarts, drift, and the engine left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from checkpoint_fakes import SMOLLM2, write
from kvguard.guard import attached, presence
from kvguard.guard.attached import Attached, Target
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.settings import Settings
from kvguard.guard.state import State
from kvguard.policy.parse import parse_policy
from kvguard.record.store import load_statement
from plain_engine import PlainEngine

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
TRAP = {
    **SMOLLM2,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": SCHEME,
    },
}
FP8 = "kv_cache: {dtype: fp8_e4m3}\n"


class Surface:
    """A data plane with nothing in flight."""

    alive, in_flight = True, 0

    def __init__(self) -> None:
        self.accepting = True

    def stop_accepting(self) -> None:
        self.accepting = False

    def wait_idle(self, timeout_s: float) -> bool:
        return True

    def set_tap(self, tap: Any) -> None:
        """Nothing passes here."""


class Life:
    """One attached guard, and the engine that is there now."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = str(write(directory / "model", TRAP, {}))
        self.engine = PlainEngine(self.root)
        self.termination_log = directory / "last"
        self.board = Board(Gate())
        self.surface = Surface()
        self.guard: Attached | None = None
        self.logs: list[Any] = []

    def live(
        self, scenario: Callable[[], Awaitable[None]], policy: str = "", target: dict[str, Any] | None = None, **settings: Any
    ) -> int:
        async def both() -> int:
            times = {"refresh": 0.02, "settle": 0.0, "grace": 5.0, "reverify": 0.2, **settings}
            self.guard = Attached(
                # Without the engine's log or command nobody says how many ranks its bytes are for.
                Target(address=self.engine.url, **(target or {"kv_bytes": 1 << 30})),
                parse_policy(policy.encode(), "p.yaml") if policy else None,
                Settings(record_directory=self.directory / "records", termination_log=self.termination_log, **times),
                self.board,
                self.surface,
                env={"HOME": str(self.directory)},
                argv=("kvguard", "attach"),
            )
            self.running = asyncio.create_task(self.guard.run())
            await scenario()
            return await asyncio.wait_for(self.running, 120)

        with capture_logs() as self.logs:
            return asyncio.run(both())

    async def until(self, reached: Callable[[], Any]) -> None:
        for _ in range(3000):
            if reached():
                return
            if self.running.done():
                self.running.result()
                break
            await asyncio.sleep(0.02)
        raise AssertionError(f"not reached; {self.board.status}; {self.logs}")

    async def state(self, wanted: State) -> None:
        await self.until(lambda: self.board.status.state is wanted)

    async def swap(self, dtype: str, **more: Any) -> None:
        self.engine = await asyncio.to_thread(self.engine.swap, dtype, **more)

    def stop(self) -> None:
        assert self.guard is not None
        self.guard.request_stop()

    @property
    def dtype(self) -> str:
        return dict(self.board.gate.snapshot.headers)[b"x-kvguard-kv-cache-dtype"].decode()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text())["predicate"] for path in sorted((self.directory / "records").glob("*.json"))]


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr(attached, "_LOOK_EVERY", 0.02)
    monkeypatch.setattr(attached, "_TRY_AGAIN", 0.05)
    one = Life(tmp_path)
    yield one
    one.engine.end()


async def nothing() -> None:
    """The guard ends by itself."""


def test_it_is_verified_from_outside_and_served_and_left_alone(life: Life) -> None:
    async def scenario() -> None:
        await life.state(State.SERVING)
        assert life.dtype == "fp8_e4m3"
        await life.until(lambda: life.board.status.gauges.kv_tokens_total == 93184)
        life.stop()

    assert life.live(scenario, FP8) == 0
    assert life.board.status.state is State.STOPPED
    assert not life.surface.accepting
    assert life.engine.answer("/health")[0] == 200
    [path] = (life.directory / "records").glob("*.json")
    statement = load_statement(path)
    assert (statement.effective.dtype, statement.effective.confidence) == ("fp8_e4m3", "corroborated")
    assert statement.predicate.verdict == "serve"
    assert {subject.name for subject in statement.subject} >= {"config.json"}
    assert statement.predicate.engine == {"version": "0.32.0", "attached": True}


def test_what_cannot_be_more_than_an_echo_says_so(life: Life) -> None:
    """A GPU engine's metrics have no bytes; its log here names the dtype, and proves nothing."""
    life.engine.kv_bytes = False
    log = life.directory / "engine.log"
    log.write_text(
        "(APIServer pid=1) INFO 11-29 15:11:07 [api_server.py:1] vLLM API server version 0.32.0\n"
        "(APIServer pid=1) INFO 11-29 15:11:07 [cache.py:1] Using fp8_e4m3 data type to store kv cache. It reduces the GPU "
        "memory footprint and boosts the performance. Meanwhile, it may cause accuracy drop without a proper scaling factor\n"
    )

    async def scenario() -> None:
        await life.state(State.SERVING)
        life.stop()

    assert life.live(scenario, target={"log": log}) == 0
    assert (life.board.status.effective.dtype, life.board.status.effective.confidence) == ("fp8_e4m3", "echoed")


def test_blocks_summed_over_two_engines_are_not_taken_for_fp8(life: Life) -> None:
    """Before 0.24.0 a page has blocks only, added up over data-parallel engines: those of 16-bit at DP 2 are FP8's at DP 1."""
    labels = 'block_size="128",cache_dtype="auto",kv_cache_memory_bytes="1073741824",num_gpu_blocks="728"'
    page = "".join(f'vllm:cache_config_info{{{labels},engine="{number}"}} 1.0\n' for number in range(2))
    life.engine.says = {"/metrics": (200, page.encode()), "/version": (200, b'{"version": "0.22.0"}')}

    async def scenario() -> None:
        await life.state(State.SERVING)
        life.stop()

    assert life.live(scenario) == 0
    effective = life.board.status.effective
    assert (effective.dtype, effective.confidence, effective.kv_tokens) == ("bfloat16", "corroborated", 46592)


def test_a_violation_is_refused_and_the_engine_goes_on(life: Life) -> None:
    assert life.live(nothing, "kv_cache: {dtype: 16bit}\n") == 3
    assert life.termination_log.read_text().startswith("refused by policy: kv_cache_dtype fail")
    assert life.records()[-1]["verdict"] == "refuse"
    assert life.engine.answer("/health")[0] == 200


def test_holding_serves_the_next_engine_that_fits(life: Life) -> None:
    async def scenario() -> None:
        await life.state(State.REFUSED)
        assert not life.board.gate.snapshot.open
        await life.swap("bfloat16")
        await life.state(State.SERVING)
        assert life.dtype == "bfloat16"
        life.stop()

    assert life.live(scenario, "kv_cache: {dtype: 16bit}\non_violation: hold\n") == 0
    assert [record["verdict"] for record in life.records()] == ["hold", "serve"]


def test_stopped_while_holding(life: Life) -> None:
    async def scenario() -> None:
        await life.state(State.REFUSED)
        life.stop()

    assert life.live(scenario, "kv_cache: {dtype: 16bit}\non_violation: hold\n") == 3


def test_garbage_is_no_start(life: Life) -> None:
    body = {
        "choices": [{"text": "x", "logprobs": {"tokens": ["a"] * 12, "token_logprobs": [-0.1] * 12}, "token_ids": [7] * 12}]
    }
    life.engine.says = {"/v1/completions": (200, json.dumps(body).encode())}
    assert life.live(nothing, FP8) == 4
    assert "canaries" in life.termination_log.read_text()


def test_an_engine_that_never_comes(life: Life) -> None:
    life.engine.says = {"/health": (503, b"")}
    assert life.live(nothing, start_timeout=0.3) == 4
    assert "no healthy engine at http://127.0.0.1" in life.termination_log.read_text()


def test_stopped_before_it_came(life: Life) -> None:
    life.engine.says = {"/health": (503, b"")}

    async def scenario() -> None:
        await asyncio.sleep(0.1)
        life.stop()

    assert life.live(scenario) == 0


def test_a_swapped_engine_is_drift_until_it_is_put_back(life: Life) -> None:
    policy = FP8 + "drift: {action: unready, min_confidence: corroborated}\n"

    async def scenario() -> None:
        await life.state(State.SERVING)
        first = life.board.status.record_digest
        await life.swap("bfloat16")
        await life.state(State.DRIFTED)
        assert life.dtype == "bfloat16"
        await life.until(lambda: life.board.status.unready)
        assert "kv_cache_dtype: fp8_e4m3 was established, now bfloat16" in life.board.status.unready
        assert life.board.status.drift_counts["kv_cache_dtype"] == 1
        assert life.board.status.drift_counts["policy"] == 1
        await life.swap("fp8_e4m3")
        await life.until(lambda: life.board.status.state is State.SERVING and not life.board.status.unready)
        assert life.dtype == "fp8_e4m3"
        assert life.board.status.record_digest == first
        life.stop()

    assert life.live(scenario, policy) == 0
    records = life.records()
    assert [record["verdict"] for record in records] == ["serve", "warn", "serve"]
    assert {"field": "kv_cache_dtype", "before": "fp8_e4m3", "after": "bfloat16"} in records[1]["drift"]
    assert "drift" not in records[2]


def test_the_gate_is_closed_while_the_engine_is_away(life: Life) -> None:
    async def scenario() -> None:
        await life.state(State.SERVING)
        port = life.engine.port
        await asyncio.to_thread(life.engine.end)
        await life.state(State.STARTING)
        assert not life.board.gate.snapshot.open
        assert "nobody listens" in life.board.status.reason
        life.engine = PlainEngine(life.root, port=port, started=2000.0)
        await life.state(State.SERVING)
        life.stop()

    assert life.live(scenario, FP8) == 0
    assert len(life.records()) == 1  # the same again is no news


def test_an_engine_that_stays_away_has_died(life: Life) -> None:
    async def scenario() -> None:
        await life.state(State.SERVING)
        life.engine.says = {"/health": (503, b"")}

    assert life.live(scenario, FP8, restart_timeout=0.3) == 5
    assert life.termination_log.read_text().startswith("the engine died while it was served")


@pytest.mark.parametrize("sign", ["process", "counters"])
def test_a_restart_that_no_connection_noticed_is_seen_in_the_metrics(life: Life, sign: str) -> None:
    async def scenario() -> None:
        await life.state(State.SERVING)
        await asyncio.sleep(0.2)
        life.engine.dtype = "bfloat16"
        if sign == "process":
            life.engine.started += 1
        else:
            life.engine.generated = 0
        await life.state(State.DRIFTED)
        life.stop()

    assert life.live(scenario, FP8, reverify=0) == 0
    why = {"process": "its process began at another time", "counters": "its counters began again"}
    assert any(log.get("because") == why[sign] for log in life.logs)


def test_a_busy_engine_is_not_a_lost_one(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_DEAD_AFTER", 10**9)

    async def scenario() -> None:
        await life.state(State.SERVING)
        life.engine.says = {"/health": (503, b""), "/metrics": (500, b"")}
        await life.until(lambda: life.board.status.stale)
        assert life.board.status.state is State.SERVING
        assert life.dtype == "fp8_e4m3"
        life.engine.says = {}
        await life.until(lambda: not life.board.status.stale)
        life.stop()

    assert life.live(scenario, FP8) == 0


def test_changed_files_and_changing_requests_are_signs(life: Life) -> None:
    async def scenario() -> None:
        await life.state(State.SERVING)
        config = Path(life.root) / "config.json"
        config.write_text(config.read_text() + " ")
        await life.until(lambda: any("changed on disk" in log.get("because", "") for log in life.logs))
        assert life.guard is not None
        life.guard.request_changed("/wake_up", answered=True)
        await life.until(lambda: any("/wake_up" in log.get("because", "") for log in life.logs))
        assert life.board.status.state is State.SERVING
        life.stop()

    assert life.live(scenario, FP8, reverify=0) == 0


def test_a_sleeping_engine_is_not_asked(life: Life) -> None:
    async def scenario() -> None:
        await life.state(State.SERVING)
        life.engine.says = {"/is_sleeping": (200, b'{"is_sleeping": true}'), "/metrics": (500, b"")}
        await life.until(lambda: life.board.status.stale)
        assert life.board.status.stale == "the engine sleeps; it is verified again when it wakes"
        life.stop()

    assert life.live(scenario, FP8) == 0


def test_the_checkpoint_that_is_not_found_is_said(life: Life) -> None:
    life.engine.root = "ORG/not-here"

    async def scenario() -> None:
        await life.state(State.SERVING)
        life.stop()

    assert life.live(scenario) == 0
    assert any("give --checkpoint" in log.get("what", "") for log in life.logs)
    assert life.board.status.effective.confidence == "unknown"
