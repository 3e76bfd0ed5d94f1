"""Prefill and decode apart, from streams of one request at a time, and whether a stream arrived as one block. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from kvguard.compare.models import Streamed
from kvguard.vocabulary import Frozen

LEAST_TOKENS = 32
"""Below it a rate is mostly the noise of its ends."""

_LEAST_EVENTS = 3
_TOGETHER = 2e-4
_MOST_TOGETHER = 0.9


class Phase(Frozen):
    """One prompt length. `prefill` prompt tokens and `decode` tokens in a second (medians over runs), None where `why` says."""

    prompt_tokens: int
    prefill: float | None
    decode: float | None
    why: str = ""


def arrived_as_one(times: Sequence[float]) -> bool:
    """Whether nearly all events came with the one before (`times` in seconds): something between holds the stream back."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return len(times) >= _LEAST_EVENTS and sum(gap < _TOGETHER for gap in gaps) > _MOST_TOGETHER * len(gaps)


def phases(streams: Sequence[Streamed]) -> tuple[Phase, ...]:
    """A phase for each prompt, in their order. A rate is never made from a buffered stream, or from few tokens."""
    return tuple(_phase([one for one in streams if one.text == text]) for text in dict.fromkeys(one.text for one in streams))


def _phase(runs: Sequence[Streamed]) -> Phase:
    prompt, fewest = runs[0].prompt_tokens, min(run.tokens for run in runs)
    if all(run.buffered for run in runs):
        return Phase(prompt_tokens=prompt, prefill=None, decode=None, why="the stream arrived as one block: it is buffered")
    good = [run for run in runs if not run.buffered]
    prefill = median([run.prompt_tokens / run.first for run in good if run.first > 0] or [0.0]) or None
    if fewest < LEAST_TOKENS:
        why = f"{fewest} tokens, fewer than the {LEAST_TOKENS} that a rate takes"
        return Phase(prompt_tokens=prompt, prefill=prefill, decode=None, why=why)
    rates = [(run.tokens - 1) / (run.last - run.first) for run in good if run.last > run.first]
    return Phase(prompt_tokens=prompt, prefill=prefill, decode=median(rates) if rates else None)


def changes(arm: Sequence[Phase], reference: Sequence[Phase]) -> tuple[str, ...]:
    """Each length's prefill and decode against the 16-bit arm's, never as one number."""
    found = []
    for ours, theirs in zip(arm, reference, strict=False):
        parts = [
            f"{name} {100 * (a / b - 1):+.1f} %" if a and b else f"{name} not told"
            for name, a, b in (("prefill", ours.prefill, theirs.prefill), ("decode", ours.decode, theirs.decode))
        ]
        why = ours.why or theirs.why
        found.append(f"{ours.prompt_tokens:,} prompt tokens: {', '.join(parts)}{f' ({why})' if why else ''}")
    return tuple(found)
