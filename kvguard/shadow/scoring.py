"""One request's decode against one reference pass: sums of differences, flips, bounds of the divergence, collapse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from kvguard.shadow.models import Decode, Pass, RequestScore
from kvguard.vocabulary import UsageError

LOG_FLOOR = -100.0
"""Logprobs are floored here, so that a masked token (-inf; vLLM's HTTP API writes -9999) cannot make a sum infinite."""

LOG_SLACK = 1e-3
"""A float32 log-softmax may come out this much above 0; more is not a probability."""

TAIL_FLOOR = 1e-6
"""Least mass of the reference's tail cell: below it 1 − Σp is float32 rounding. Raising it only lowers the KL bound."""

RUN = 16
"""Equal tokens in a row that are a collapse."""

SHARE, SHARE_OF = 0.8, 24
"""So are that share of one token among at least that many tokens."""


def collapse(decode: Decode) -> str:
    """How the decode is broken by its own look: "nan logprob", "positive logprob", "repeated token", or "".

    Repetition can be what the user asked for; `sequential.update` asks the 16-bit pass before it alarms.
    """
    broken = next((why for values in _by_position(decode) for why in map(_invalid, values) if why), "")
    return broken or ("repeated token" if _repeats(decode.ids) else "")


def token_deltas(decode: Decode, reference: Pass, tokens: int) -> tuple[float, ...]:
    """|Δ logprob| of the first `tokens` tokens, floored as in `score`."""
    pairs = zip(decode.logprobs[:tokens], reference.logprobs[:tokens], strict=True)
    return tuple(abs(max(a, LOG_FLOOR) - max(b, LOG_FLOOR)) for a, b in pairs)


def score(decode: Decode, reference: Pass) -> RequestScore:
    """Compare them over the tokens before the first one whose decode logprob is no probability.

    UsageError when the two do not describe the same tokens, or when the reference itself is NaN or positive:
    that probe says nothing about the engine.
    """
    _same_tokens(decode, reference)
    tokens = next((i for i, values in enumerate(_by_position(decode)) if any(map(_invalid, values))), len(decode.ids))
    delta = [
        max(ours, LOG_FLOOR) - max(theirs, LOG_FLOOR)
        for ours, theirs in zip(decode.logprobs[:tokens], reference.logprobs, strict=False)
    ]
    flipped = [i for i in range(tokens) if max(decode.top[i], key=lambda pair: pair[1])[0] != reference.top1[i]]
    bounds = [_known_divergence(decode.top[i], reference.at[i]) for i in range(tokens)]
    return RequestScore(
        tokens=tokens,
        sum_delta=math.fsum(delta),
        sum_abs_delta=math.fsum(map(abs, delta)),
        flips=len(flipped),
        first_flip=flipped[0] if flipped else None,
        tv_low=math.fsum(low for low, _, _ in bounds),
        tv_high=math.fsum(high for _, high, _ in bounds),
        kl_low=math.fsum(kl for _, _, kl in bounds),
        collapse=collapse(decode),
    )


def between(decode: Decode, made: Pass, exact: Pass) -> RequestScore:
    """What one pass would change against the exact one, on the tokens of a decode that neither of them made.

    On an engine that is quantized itself this is what another format costs; its own decode would tell of both at once.
    """
    tops: list[tuple[tuple[int, float], ...]] = []
    ats: list[tuple[float | None, ...]] = []
    for i, top in enumerate(decode.top):
        known = [(token, ours, theirs) for (token, _), ours, theirs in zip(top, made.at[i], exact.at[i], strict=True)]
        pairs = sorted(((token, ours, theirs) for token, ours, theirs in known if ours is not None), key=lambda pair: -pair[1])
        if made.top1[i] not in [token for token, _, _ in pairs]:  # likelier than all that were asked for
            pairs.insert(0, (made.top1[i], pairs[0][1] if pairs else made.logprobs[i], None))
        tops.append(tuple((token, ours) for token, ours, _ in pairs))
        ats.append(tuple(theirs for _, _, theirs in pairs))
    return score(replace(decode, logprobs=made.logprobs, top=tuple(tops)), replace(exact, at=tuple(ats)))


def divergence(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """(least, greatest total variation, least KL(ours ‖ theirs)) of two distributions known at some ids only.

    Arguments are logprobs of the same ids. Everything else is one tail cell with the remaining mass. Merging ids into
    a cell never raises a divergence, which gives both lower bounds; inside the tail the two can differ by half the sum
    of their masses at most, which gives the upper one.
    """
    p = [math.exp(max(value, LOG_FLOOR)) for value in ours]
    q = [math.exp(max(value, LOG_FLOOR)) for value in theirs]
    p_tail, q_tail = max(0.0, 1.0 - math.fsum(p)), max(0.0, 1.0 - math.fsum(q))
    known = 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))
    kl = math.fsum(a * (max(x, LOG_FLOOR) - max(y, LOG_FLOOR)) for a, x, y in zip(p, ours, theirs, strict=True))
    if p_tail > 0:
        kl += p_tail * math.log(p_tail / max(q_tail, TAIL_FLOOR))
    return known + 0.5 * abs(p_tail - q_tail), min(1.0, known + 0.5 * (p_tail + q_tail)), max(0.0, kl)


def _known_divergence(top: Sequence[tuple[int, float]], at: Sequence[float | None]) -> tuple[float, float, float]:
    """The divergence at one position; ids whose reference logprob is not known belong to the tail of both."""
    pairs = [(ours, theirs) for (_, ours), theirs in zip(top, at, strict=True) if theirs is not None]
    return divergence([ours for ours, _ in pairs], [theirs for _, theirs in pairs])


def _by_position(decode: Decode) -> list[tuple[float, ...]]:
    return [(own, *(value for _, value in top)) for own, top in zip(decode.logprobs, decode.top, strict=False)]


def _invalid(logprob: float) -> str:
    if math.isnan(logprob):
        return "nan logprob"
    return "positive logprob" if logprob > LOG_SLACK else ""


def _repeats(ids: Sequence[int]) -> bool:
    longest = max((sum(1 for _ in run) for _, run in groupby(ids)), default=0)
    commonest = max(Counter(ids).values(), default=0)
    return longest >= RUN or (len(ids) >= SHARE_OF and commonest >= SHARE * len(ids))


def _same_tokens(decode: Decode, reference: Pass) -> None:
    want = len(decode.ids)
    found = {
        "decode logprobs": len(decode.logprobs),
        "decode top": len(decode.top),
        "reference logprobs": len(reference.logprobs),
        "reference top1": len(reference.top1),
        "reference at": len(reference.at),
    }
    for name, length in found.items():
        if length != want:
            raise UsageError(f"probe: {want} generated tokens but {length} positions in {name} of pass {reference.label!r}")
    for i, (ours, theirs) in enumerate(zip(decode.top, reference.at, strict=True)):
        if not ours or len(ours) != len(theirs):
            raise UsageError(
                f"probe: position {i} needs the same top-k ids on both sides, k ≥ 1: "
                f"decode has {len(ours)}, pass {reference.label!r} has {len(theirs)}"
            )
        for value in (reference.logprobs[i], *(known for known in theirs if known is not None)):
            if why := _invalid(value):
                raise UsageError(f"probe: pass {reference.label!r} gives a {why} at position {i}: the reference is broken")
