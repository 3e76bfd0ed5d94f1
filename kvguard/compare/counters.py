"""The engine's own counters of an arm, and what in them explains a difference that is not the cache's. Pure."""

from __future__ import annotations

import math

from kvguard.evidence.metrics import MetricsPage
from kvguard.vocabulary import Frozen

_LEAST_DRAFTED = 1000
_LESS_ACCEPTED = 0.05
_OTHER_HITS = 0.05


class Counters(Frozen):
    """Since the engine's start, over its data-parallel engines; None: the engine does not say.

    `drafted` and `accepted` are tokens of speculative decoding, `prefix_queries` and `prefix_hits` tokens looked up in and
    found in the prefix cache, `block_size` tokens: no shorter prefix is ever found.
    """

    preemptions: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    prefix_caching: bool | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    block_size: int | None = None

    def without_counts(self) -> Counters:
        """Of an engine that was asked only a part, the rest by an earlier start: what it counted is of no use."""
        return Counters(prefix_caching=self.prefix_caching, block_size=self.block_size)

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that the model accepted."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def hits(self) -> float | None:
        """The share of prompt tokens that came from the prefix cache."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries and self.prefix_hits is not None else None


def read_counters(page: MetricsPage) -> Counters:
    """The counters of an engine's metrics page."""
    labels = [sample.labels for sample in page.first_named("cache_config_info")[1]]
    said = {each.get("enable_prefix_caching") for each in labels}
    sizes = {each.get("block_size", "") for each in labels}
    size = next(iter(sizes)) if len(sizes) == 1 else ""
    return Counters(
        preemptions=_sum(page, "preemptions_total"),
        drafted=_sum(page, "drafted_total"),
        accepted=_sum(page, "accepted_total"),
        prefix_caching={"True": True, "False": False}.get(str(next(iter(said)))) if len(said) == 1 else None,
        prefix_queries=_sum(page, "prefix_queries_total"),
        prefix_hits=_sum(page, "prefix_hits_total"),
        block_size=int(size) if size.isascii() and size.isdigit() and len(size) < 10 else None,
    )


def _sum(page: MetricsPage, meaning: str) -> float | None:
    values = [sample.value for sample in page.first_named(meaning)[1]]
    return math.fsum(values) if values and all(math.isfinite(value) and value >= 0 for value in values) else None


def unequal_prefixes(arm: Counters, reference: Counters) -> str:
    """Why speeds are not comparable: prefix caching is off in one arm, or warm in one; "" otherwise.

    No hits at all is no finding: prefixes shorter than a block are never found, and kvguard's own questions share none.
    """
    if None not in (arm.prefix_caching, reference.prefix_caching) and arm.prefix_caching != reference.prefix_caching:
        on = "on" if arm.prefix_caching else "off"
        there = "on" if reference.prefix_caching else "off"
        return f"prefix caching is {on}, and {there} in the 16-bit arm: state --enable-prefix-caching for both"
    ours, theirs = arm.hits, reference.hits
    if ours is not None and theirs is not None and abs(ours - theirs) > _OTHER_HITS:
        blocks = f" (blocks of {arm.block_size} tokens, there {reference.block_size})" if arm.block_size else ""
        return f"{ours:.0%} of prompt tokens came from the prefix cache, {theirs:.0%} in the 16-bit arm{blocks}"
    return ""


def counter_findings(arm: Counters, reference: Counters) -> tuple[str, ...]:
    """What the counters say about speed and drafts, one sentence each. Quality verdicts rest on none of it."""
    found = []
    if prefixes := unequal_prefixes(arm, reference):
        found.append(f"speeds are not compared: {prefixes}")
    ours, theirs = arm.acceptance, reference.acceptance
    if ours is not None and theirs is not None:
        enough = min(arm.drafted or 0, reference.drafted or 0) >= _LEAST_DRAFTED
        if enough and theirs - ours >= _LESS_ACCEPTED:
            found.append(
                f"{ours:.1%} of drafted tokens are accepted, {theirs:.1%} in the 16-bit arm: decoding is slower for it, and "
                "answers are not worse; look at the scales of the draft model's layers"
            )
    if (arm.preemptions or 0) != (reference.preemptions or 0) and None not in (arm.preemptions, reference.preemptions):
        found.append(
            f"requests were preempted {arm.preemptions:,.0f} times, {reference.preemptions:,.0f} in the 16-bit arm: throughput "
            "holds what the larger cache saves, not the kernels' speed alone"
        )
    return tuple(found)
