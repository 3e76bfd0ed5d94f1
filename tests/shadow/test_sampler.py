"""Which requests are probed, and when: unbiased by weight, never in a client's way, every loss counted."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvguard.shadow.models import PROMPT_STRATA, TURN_STRATA, Stratum
from kvguard.shadow.sampler import NOT_INCLUDED, OTHER_ADAPTERS, Item, Sampler, inclusion_probability
from kvguard.shadow.settings import Settings
from kvguard.shadow.tally import Count, Drop

SHORT = Stratum("0-256", "1")
LONG = Stratum("4097+", "1")
STRATA = [Stratum(prompt, turns) for prompt in PROMPT_STRATA for turns in TURN_STRATA]
IDLE: dict[str, float] = {"waiting": 0, "kv_pinned": 0.1, "running": 1}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def seeded(seed: int) -> Random:
    return Random(seed)


def sampler(clock: Clock | None = None, seed: int = 1, batch_tokens: int | None = 2048, **fields: Any) -> Sampler[str]:
    settings = Settings(**({"rate": 1.0} | fields))
    made: Sampler[str] = Sampler(settings, clock or Clock(), seeded(seed), batch_tokens=batch_tokens, batch_sequences=8)
    for total in (0.0, 1e6):  # so that gaps between tokens forbid nothing
        made.generated(total)
    return made


def drops(of: Sampler[str]) -> dict[Drop, int]:
    return {cause: count.requests for row in of.rows() for cause, count in row.dropped.items()}


def start(of: Sampler[str], now: float = 0.0, **load: float | None) -> Item[str] | None:
    return of.next(now, **(IDLE | load))


# --- the coin ---


def test_probabilities_follow_the_stratum() -> None:
    settings = Settings(rate=0.01, prompt_multipliers=(1, 2, 4, 16), turn_multipliers=(1, 2, 4))
    assert inclusion_probability(settings, SHORT) == 0.01
    assert inclusion_probability(settings, Stratum("1025-4096", "5+")) == pytest.approx(0.16)
    assert inclusion_probability(Settings(rate=0.9), LONG) == 1.0


def test_weighted_totals_are_unbiased() -> None:
    """Over 300 seeds, the mean of Σ y/p misses the true Σ y by less than four of its standard errors, in each stratum."""
    settings = {"rate": 0.05, "queue_items": 10_000}
    chooser = seeded(2)
    requests = [(stratum, 1.0 + 5 * STRATA.index(stratum) + chooser.random()) for stratum in chooser.choices(STRATA, k=600)]
    estimates: dict[Stratum, list[float]] = {stratum: [] for stratum in STRATA}
    for seed in range(300):
        sample = sampler(seed=seed, **settings)
        totals = dict.fromkeys(STRATA, 0.0)
        for stratum, value in requests:
            decision = sample.offer(stratum, 10, "")
            if decision.include:
                totals[stratum] += value / decision.probability
        for stratum in STRATA:
            estimates[stratum].append(totals[stratum])
    for stratum, found in estimates.items():
        truth = sum(value for at, value in requests if at == stratum)
        mean = math.fsum(found) / len(found)
        error = math.sqrt(math.fsum((one - mean) ** 2 for one in found) / (len(found) - 1) / len(found))
        assert error > 0 or inclusion_probability(Settings(rate=0.05), stratum) == 1
        assert abs(mean - truth) <= 4 * error + 1e-9, stratum


def test_the_weight_is_the_inverse_probability() -> None:
    sample = sampler(rate=0.25, seed=5)
    while not sample.offer(SHORT, 10, "").include:
        pass
    item = start(sample)
    assert item is not None
    assert item.weight == 4.0


@given(seed=st.integers(0, 1000), busy=st.lists(st.booleans(), min_size=30, max_size=30))
def test_the_coin_does_not_know_the_load(seed: int, busy: list[bool]) -> None:
    idle, loaded = sampler(seed=seed, rate=0.4), sampler(Clock(), seed=seed, rate=0.4, queue_items=1)
    for index, wait in enumerate(busy):
        first, second = idle.offer(SHORT, 10, ""), loaded.offer(SHORT, 10, "")
        assert (first.include, first.probability) == (second.include, second.probability)
        item = start(loaded, waiting=float(wait))
        if item is not None and index % 3 == 0:
            loaded.failed(item)


# --- bounds and load ---


def test_the_queue_is_bounded_in_requests_and_bytes() -> None:
    sample = sampler(queue_items=2, queue_bytes=100)
    assert [sample.offer(SHORT, 10, "", size).reason for size in (60, 41, 40, 0)] == ["", "queue_full", "", "queue_full"]
    start(sample)
    assert sample.offer(SHORT, 10, "", 60).reason == ""


@pytest.mark.parametrize(
    ("load", "cause"),
    [
        ({"waiting": 1}, Drop.WAITING),
        ({"kv_pinned": 0.81}, Drop.KV_PINNED),
        ({"running": 8}, Drop.BATCH_FULL),
        ({"waiting": None}, Drop.LOAD_UNKNOWN),
        ({"kv_pinned": None}, Drop.LOAD_UNKNOWN),
        ({"running": None}, Drop.LOAD_UNKNOWN),
        ({"kv_pinned": float("nan")}, Drop.LOAD_UNKNOWN),
    ],
)
def test_load_holds_probes_and_age_drops_them_by_that_name(load: dict[str, float | None], cause: Drop) -> None:
    clock = Clock()
    sample = sampler(clock, max_age_s=60)
    sample.offer(SHORT, 100, "")
    assert start(sample, 1.0, **load) is None
    assert sample.clearance(1.0, 100, **(IDLE | load)) is cause
    assert drops(sample) == {}
    assert start(sample, 61.0) is None
    (row,) = sample.rows()
    assert row.dropped == {cause: Count(1, 100)}
    assert row.coverage == 0.0


def test_eighty_percent_pinned_is_still_allowed() -> None:
    sample = sampler()
    sample.offer(SHORT, 10, "payload")
    item = start(sample, kv_pinned=0.8, running=7)
    assert item is not None
    assert item.payload == "payload"


def test_one_probe_at_a_time_in_order_of_arrival() -> None:
    sample = sampler()
    for name in "ab":
        sample.offer(SHORT, 10, name)
    first = start(sample)
    assert first is not None
    assert first.payload == "a"
    assert start(sample) is None
    sample.done(first, tokens=10, pass_seconds=0.01, engine_seconds=0.01)
    second = start(sample)
    assert second is not None
    assert second.payload == "b"
    with pytest.raises(ValueError, match="not running"):
        sample.done(first, tokens=10, pass_seconds=0.01, engine_seconds=0.01)


def test_what_nobody_took_is_dropped_for_its_age() -> None:
    clock = Clock()
    sample = sampler(clock, max_age_s=5)
    sample.offer(SHORT, 10, "old")
    clock.now = 5.1
    sample.offer(SHORT, 10, "new")
    assert drops(sample) == {Drop.AGE: 1}
    item = start(sample, 5.1)
    assert item is not None
    assert item.payload == "new"


# --- length and stall ---


def test_longer_than_a_batch_or_the_stall_is_dropped_and_the_next_one_goes() -> None:
    sample = sampler(batch_tokens=4000, prior_ms_per_token=0.1, max_stall_ms=200)
    for tokens, name in ((4001, "longer than a batch"), (3000, "300 ms"), (1500, "150 ms")):
        sample.offer(SHORT, tokens, name)
    item = start(sample)
    assert item is not None
    assert item.payload == "150 ms"
    assert drops(sample) == {Drop.TOO_LONG: 1, Drop.STALL: 1}
    assert sample.clearance(0.0, 4001, **IDLE) is Drop.TOO_LONG
    assert sample.clearance(0.0, 3000, **IDLE) is Drop.STALL
    assert sample.clearance(0.0, 1500, **IDLE) is None


def test_measured_passes_move_the_limit() -> None:
    sample = sampler(prior_ms_per_token=1.0, max_stall_ms=200, engine_share=1.0)
    assert sample.clearance(0.0, 1000, **IDLE) is Drop.STALL
    sample.measured(1000, 0.05)
    assert sample.clearance(0.0, 1000, **IDLE) is None
    sample.offer(SHORT, 1000, "")
    item = start(sample)
    assert item is not None
    sample.done(item, tokens=1000, pass_seconds=0.3, engine_seconds=0.3)
    assert sample.clearance(0.0, 1000, **IDLE) is Drop.STALL


def test_another_engines_pass_stalls_nothing() -> None:
    sample = sampler(batch_tokens=None, prior_ms_per_token=1000)
    sample.offer(LONG, 100_000, "")
    item = start(sample)
    assert item is not None
    sample.done(item, tokens=100_000, pass_seconds=30.0, engine_seconds=0.0)
    sample.offer(LONG, 100_000, "")
    assert start(sample, 1.0) is not None


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 30), st.booleans()), max_size=60),
    st.floats(0.01, 0.4),
)
def test_no_pass_is_longer_than_the_stall_when_time_is_as_forecast(
    arrivals: list[tuple[int, float, bool]], ms_per_token: float
) -> None:
    clock = Clock()
    sample = sampler(clock, prior_ms_per_token=0.4, max_stall_ms=200, batch_tokens=2048)
    for tokens, wait, busy in arrivals:
        clock.now += wait
        sample.offer(SHORT, tokens, "")
        item = start(sample, clock.now, waiting=float(busy))
        if item is not None:
            assert not busy
            seconds = max(item.tokens, 128) * ms_per_token / 1000
            assert seconds <= 0.2 + 1e-9
            assert item.tokens <= 2048
            sample.done(item, tokens=item.tokens, pass_seconds=seconds, engine_seconds=seconds)


# --- budget ---


@given(
    costs=st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 0.2)), max_size=80),
    share=st.sampled_from([0.005, 0.02]),
)
def test_the_share_of_engine_time_is_not_exceeded(costs: list[tuple[float, float]], share: float) -> None:
    clock = Clock()
    sample = sampler(clock, engine_share=share, probes_per_minute=60, queue_items=10_000, max_age_s=3600)
    spent: list[tuple[float, float]] = []
    for wait, seconds in costs:
        clock.now += wait
        sample.offer(SHORT, 200, "")
        item = start(sample, clock.now)
        if item is not None:
            spent.append((clock.now, seconds))
            sample.done(item, tokens=200, pass_seconds=seconds, engine_seconds=seconds)
    for begin, _ in spent:
        within = [seconds for at, seconds in spent if begin <= at < begin + 60]
        assert len(within) <= 60
        # What a probe costs beyond its forecast is known only afterwards: one overrun of at most 0.2 s.
        assert sum(within) <= 60 * share + 0.2


def test_a_spent_minute_holds_and_the_next_one_goes_on() -> None:
    sample = sampler(probes_per_minute=2, max_age_s=600)
    for _ in range(3):
        sample.offer(SHORT, 10, "")
    for _ in range(2):
        item = start(sample)
        assert item is not None
        sample.done(item, tokens=10, pass_seconds=0.001, engine_seconds=0.001)
    assert start(sample, 59.9) is None
    assert start(sample, 60.0) is not None


def test_the_cost_beside_the_pass_is_learned_and_never_blocks_for_good() -> None:
    sample = sampler(engine_share=0.02, max_age_s=3600)
    for _ in range(3):
        sample.offer(SHORT, 10, "")
    first = start(sample)
    assert first is not None
    sample.done(first, tokens=10, pass_seconds=0.01, engine_seconds=5.0)
    assert start(sample, 249.0) is None
    second = start(sample, 250.0)
    assert second is not None
    sample.done(second, tokens=10, pass_seconds=0.01, engine_seconds=0.01)
    assert start(sample, 311.0) is not None


# --- failure, stop ---


def test_one_failure_stops_probes_until_the_time_is_over() -> None:
    clock = Clock()
    sample = sampler(clock, retry_after_s=300, max_age_s=60)
    sample.offer(SHORT, 10, "")
    sample.offer(SHORT, 10, "")
    item = start(sample)
    assert item is not None
    sample.failed(item)
    assert sample.breaker == "tripped"
    assert start(sample, 1.0) is None
    assert sample.clearance(1.0, 10, **IDLE) is Drop.BREAKER
    assert sample.offer(SHORT, 10, "").reason == "breaker"
    clock.now = 300.0
    assert sample.offer(SHORT, 10, "trial").reason == ""
    assert drops(sample) == {Drop.FAILED: 1, Drop.BREAKER: 2}
    trial = start(sample, 300.0)
    assert trial is not None
    sample.failed(trial)
    clock.now = 899.0
    assert sample.offer(SHORT, 10, "").reason == "breaker"
    sample.reset_breaker()
    assert sample.offer(SHORT, 10, "").reason == ""


def test_an_answer_that_cannot_be_scored_trips_nothing() -> None:
    sample = sampler()
    sample.offer(SHORT, 10, "")
    item = start(sample)
    assert item is not None
    sample.drop(item, Drop.REPLAY)
    assert sample.breaker == "closed"
    assert drops(sample) == {Drop.REPLAY: 1}


def test_shutdown_drops_what_waits_and_what_comes() -> None:
    sample = sampler()
    for _ in range(3):
        sample.offer(SHORT, 10, "")
    running = start(sample)
    assert running is not None
    sample.close()
    assert sample.offer(SHORT, 10, "").reason == "shutdown"
    assert start(sample) is None
    assert sample.clearance(0.0, 10, **IDLE) is Drop.SHUTDOWN
    assert drops(sample) == {Drop.SHUTDOWN: 3}
    sample.done(running, tokens=10, pass_seconds=0.01, engine_seconds=0.01)
    (row,) = sample.rows()
    assert (row.done, row.running, row.queued) == (Count(1, 10), Count(), Count())
    assert row.coverage == 0.25


def test_adapters_beyond_the_first_few_share_strata() -> None:
    sample = sampler()
    for index in range(30):
        sample.offer(Stratum("0-256", "1", f"lora-{index}"), 10, "")
    names = [row.stratum.adapter for row in sample.rows()]
    assert len(names) == 9
    assert names[-1] == OTHER_ADAPTERS


def test_no_prompt_in_the_representation() -> None:
    sample = sampler()
    sample.offer(SHORT, 10, "secret")
    assert "secret" not in repr(start(sample))


class Accounts(RuleBasedStateMachine):
    """Whatever happens, each offered request and its tokens are in exactly one place, and the bounds hold."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.sampler: Sampler[str] = sampler(
            self.clock, rate=0.3, queue_items=5, queue_bytes=50, max_age_s=30, retry_after_s=20, engine_share=0.1
        )
        self.running: Item[str] | None = None
        self.offered = 0
        self.tokens = 0

    @rule(stratum=st.sampled_from(STRATA), tokens=st.integers(1, 3000), size=st.integers(0, 30))
    def offer(self, stratum: Stratum, tokens: int, size: int) -> None:
        decision = self.sampler.offer(stratum, tokens, "", size)
        assert decision.include == (decision.reason != NOT_INCLUDED)
        self.offered += 1
        self.tokens += tokens

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(waiting=st.sampled_from([0, 0, 1]), kv_pinned=st.sampled_from([0.5, 0.9]), running=st.sampled_from([0, 8, None]))
    def next(self, waiting: float, kv_pinned: float, running: float | None) -> None:
        item = self.sampler.next(self.clock.now, waiting, kv_pinned, running)
        if item is not None:
            assert self.running is None
            assert (waiting, kv_pinned, running) == (0, 0.5, 0)
            assert self.clock.now - item.offered_at <= 30
            self.running = item

    @precondition(lambda self: self.running is not None)
    @rule(how=st.sampled_from(["done", "failed", "drop"]), seconds=st.floats(0, 0.5))
    def end(self, how: str, seconds: float) -> None:
        assert self.running is not None
        if how == "done":
            self.sampler.done(self.running, tokens=self.running.tokens, pass_seconds=seconds, engine_seconds=seconds)
        elif how == "failed":
            self.sampler.failed(self.running, seconds)
        else:
            self.sampler.drop(self.running, Drop.REPLAY, seconds)
        self.running = None

    @precondition(lambda self: self.offered > 20)
    @rule()
    def close(self) -> None:
        self.sampler.close()

    @invariant()
    def balance(self) -> None:
        rows = self.sampler.rows()
        for row in rows:
            places = [row.not_included, row.queued, row.running, row.done, *row.dropped.values()]
            assert sum(count.requests for count in places) == row.offered.requests
            assert sum(count.tokens for count in places) == row.offered.tokens
            assert all(count.requests >= 0 and count.tokens >= 0 for count in places)
        assert sum(row.offered.requests for row in rows) == self.offered
        assert sum(row.offered.tokens for row in rows) == self.tokens
        assert sum(row.queued.requests for row in rows) <= 5
        assert sum(row.running.requests for row in rows) == (self.running is not None)


TestAccounts = Accounts.TestCase


def test_the_self_check_s_passes_lengthen_one_gap_in_a_thousand() -> None:
    sample = sampler(Clock())
    assert [sample.clearance(0.0, 10, 0.0, 0.1, 7.0) for _ in range(6)] == [None] * 5 + [Drop.GAPS]
    assert sample.clearance(0.0, 10, 0.0, 0.1, 0.0) is None, "nothing runs"


def test_passes_and_replays_lengthen_one_gap_in_a_thousand() -> None:
    sample = sampler(Clock(), max_age_s=3600)
    sample.generated(0.0)
    for _ in range(3):
        sample.offer(SHORT, 10, "")
    assert sample.promising(0.0, in_flight=7)
    first = start(sample, running=7.0)
    assert first is not None
    sample.replayed(7.0, 64)
    assert [sample.clearance(0.0, 10, 0.0, 0.1, 7.0) for _ in range(3)] == [None] * 3
    sample.done(first, tokens=10, pass_seconds=0.001, engine_seconds=0.001)
    assert start(sample, running=1.0) is None
    assert not sample.promising(0.0, in_flight=1)
    assert sample.promising(0.0, in_flight=0)
    owed = 7 * (1 + 6.4) + 7 * 3 - 32
    sample.generated(1000.0 * owed - 100)
    assert start(sample, running=1.0) is None
    sample.generated(1000.0 * owed + 100)
    assert sample.promising(0.0, in_flight=1)
    assert start(sample, running=1.0) is not None
    assert not sample.promising(0.0, in_flight=0), "one at a time"


def test_what_always_runs_beside_others_is_dropped_for_their_gaps() -> None:
    clock = Clock()
    sample = sampler(clock, max_age_s=30, gap_share=1e-9)
    sample.generated(0.0)
    sample.offer(SHORT, 10, "")
    clock.now = 31.0
    while sample._gaps.affords(1):
        sample._gaps.spend(1)
    sample.offer(SHORT, 10, "")
    assert start(sample, clock.now, running=1.0) is None
    clock.now = 62.0
    assert start(sample, clock.now, running=1.0) is None
    assert drops(sample)[Drop.GAPS] == 1


def test_what_no_load_would_allow_is_dropped_before_the_engine_is_asked() -> None:
    sample = sampler(max_stall_ms=1)
    sample.offer(SHORT, 100, "")
    assert not sample.promising(0.0, in_flight=0)
    assert (drops(sample), sample.queued) == ({Drop.STALL: 1}, 0)
