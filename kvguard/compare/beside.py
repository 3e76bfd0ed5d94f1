"""What stands beside a verdict: speeds, and findings that no verdict rests on. Pure."""

from __future__ import annotations

from kvguard.compare.counters import counter_findings, unequal_prefixes
from kvguard.compare.models import Answered, ArmFile
from kvguard.compare.outcome import Speed
from kvguard.compare.streams import changes, phases


def speed_of(arm: ArmFile, reference: ArmFile) -> Speed:
    """Throughput, and prefill and decode apart; not compared where prefix caching differs."""
    ours, theirs = phases(arm.streamed), phases(reference.streamed)
    void = unequal_prefixes(arm.counters, reference.counters)
    return Speed(
        runs=tuple(run.tokens / run.seconds for run in arm.throughput if run.seconds > 0),
        requests=arm.throughput[0].requests if arm.throughput else 0,
        phases=ours,
        changes=changes(ours, theirs) if arm is not reference and not void else (),
        void=void,
    )


def findings_of(arm: ArmFile, reference: ArmFile) -> tuple[str, ...]:
    """What is worth knowing, one sentence each."""
    found = list(counter_findings(arm.counters, reference.counters))
    limits = {(item.task, item.id): item.max_tokens for item in reference.plan.items}
    theirs = {(row.task, row.item, row.sample): row for row in reference.answers}
    counts: dict[str, int] = {}
    for row in arm.answers:
        other = theirs.get((row.task, row.item, row.sample))
        ended = other is not None and other.finish == "stop"
        if row.finish == "length" and ended and not cut(row, other, limits[row.task, row.item]):
            counts[row.task] = counts.get(row.task, 0) + 1
    for task, count in counts.items():
        found.append(f"{task}: {count} answers run on to max_tokens, where the 16-bit arm's end by themselves")
    return tuple(found)


def cut(row: Answered, other: Answered | None, max_tokens: int) -> bool:
    """Whether the limit, and not the cache, ended this answer.

    One that runs to the limit where the 16-bit arm (`other`) ended within half of it runs on by itself; a collapsed one too.
    """
    if row.finish != "length" or row.collapse:
        return False
    return other is None or other.finish != "stop" or 2 * other.tokens > max_tokens
