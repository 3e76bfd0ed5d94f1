"""Streams of probed requests, resampled by request from a table of per-request means, and what the alarm makes of them.

`python tests/shadow_streams.py [streams]` prints the tables of docs/statistics.md.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvguard.shadow.models import COST, UNEXPLAINED, Observation, RequestScore, Stratum
from kvguard.shadow.sequential import AlarmTest, Status, begin, update

SAMPLES = json.loads((Path(__file__).parent / "shadow/samples/request_means.json").read_text())
TOKENS: list[int] = SAMPLES["tokens"]
HEALTHY: list[float] = SAMPLES["fp8_e4m3_unexplained"]
BASELINE = sum(HEALTHY) / len(HEALTHY)
TOLERANCE = max(0.5 * BASELINE, 0.02)  # as the runner sets it
TEST = AlarmTest(baseline=BASELINE, tolerance=TOLERANCE)
BASE = Stratum("0-256", "1")
PROBES = (40, 100, 200, 400)
EXCESSES = (0.5, 1.0, 2.0, 3.0)


def scored(mean: float, tokens: int = 32, flips: int = 0, collapse: str = "") -> RequestScore:
    """A request with this mean |Δ|; the other figures play no part."""
    return RequestScore(tokens, -mean * tokens, mean * tokens, flips, 0 if flips else None, 0.0, 0.0, 0.0, collapse)


def seen(mean: float, weight: float = 1.0, **score: object) -> Observation:
    return Observation(weight, BASE, {UNEXPLAINED: scored(mean, **score)})  # type: ignore[arg-type]


def scaled(mean: float, values: Sequence[float] = HEALTHY) -> list[Observation]:
    """The table's requests, all scaled so that their mean is `mean`."""
    factor = mean * len(values) / sum(values)
    return [seen(value * factor, tokens=tokens) for value, tokens in zip(values, TOKENS, strict=True)]


def costly(table: str) -> list[Observation]:
    """The requests with their costs in `table`; unexplained is a healthy engine's: its own scales explain the rest."""
    return [
        Observation(1.0, BASE, {COST: scored(cost, tokens), UNEXPLAINED: scored(rest, tokens)})
        for cost, rest, tokens in zip(SAMPLES[table], HEALTHY, TOKENS, strict=True)
    ]


@dataclass(frozen=True)
class Outcome:
    """When each stream alarmed (count of requests), None for never."""

    alarmed: tuple[int | None, ...]

    def share(self, within: int) -> float:
        return sum(at is not None and at <= within for at in self.alarmed) / len(self.alarmed)

    def median(self) -> float:
        known = sorted(float("inf") if at is None else at for at in self.alarmed)
        return known[len(known) // 2]


def first_alarm(stream: Iterator[Observation] | Sequence[Observation], test: AlarmTest = TEST) -> int | None:
    state = begin(test, blind="")
    for count, observation in enumerate(stream, 1):
        state = update(state, observation)
        if state.status is Status.REGRESSION:
            return count
    return None


def simulate(
    requests: Sequence[Observation], streams: int, length: int, test: AlarmTest = TEST, seed: int = 1, healthy: int = 0
) -> Outcome:
    """Streams of `healthy` healthy requests and then `length` of `requests`; alarms are counted from the change."""
    dice = random.Random(seed)
    before = scaled(BASELINE)
    found = []
    for _ in range(streams):
        stream = dice.choices(before, k=healthy) + dice.choices(requests, k=length)
        at = first_alarm(stream, test)
        found.append(None if at is None else at - healthy)
    return Outcome(tuple(found))


def false_alarms(streams: int, length: int = 500) -> dict[str, float]:
    """Share of streams that ever alarm: engines as healthy as the table, and engines exactly at the bound."""
    return {
        "healthy": simulate(scaled(BASELINE), streams, length).share(length),
        "at the bound": simulate(scaled(TEST.bound), streams, length).share(length),
    }


def power(streams: int) -> dict[float, Outcome]:
    """By excess over the bound in tolerances."""
    return {excess: simulate(scaled(TEST.bound + excess * TOLERANCE), streams, max(PROBES)) for excess in EXCESSES}


def main(streams: int) -> None:
    print(f"{streams} streams, baseline {BASELINE:.3f}, tolerance {TOLERANCE:.3f}, bound {TEST.bound:.3f}, alpha {TEST.alpha}")
    for name, share in false_alarms(streams).items():
        print(f"| {name} | {share:.2%} |")
    for excess, outcome in power(streams).items():
        cells = " | ".join(f"{outcome.share(within):.2f}" for within in PROBES)
        print(f"| {excess:g} | {TEST.bound + excess * TOLERANCE:.3f} | {cells} | {outcome.median():g} |")
    late = simulate(scaled(TEST.bound + 2 * TOLERANCE), max(streams // 10, 1), 400, healthy=2000)
    print(f"2 tolerances over the bound after 2000 healthy requests: median delay {late.median():g}")
    for name in ("fp8_e4m3_cost", "fp8_e5m2_cost", "ruined_cost"):
        outcome = simulate(costly(name), streams // 10, 100)
        print(f"| {name} | {min(SAMPLES[name]):.2f} to {max(SAMPLES[name]):.2f} | {outcome.share(5):.4f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
