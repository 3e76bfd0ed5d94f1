"""What a probe measured, as data. Token ids and logprobs stay out of `repr`, so that no log or traceback shows a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvguard.reference.models import Decode, Pass

__all__ = ["Decode", "Observation", "Pass", "RequestScore", "Stratum", "stratum"]

PROMPT_STRATA = ("0-256", "257-1024", "1025-4096", "4097+")
"""Prompt length in tokens."""

TURN_STRATA = ("1", "2-4", "5+")
"""User turns of the conversation; 1 for a plain completion."""

COST = "cost"
"""The engine against the 16-bit pass: what the format costs. Reported, never an alarm by itself."""

UNEXPLAINED = "unexplained"
"""The engine against the pass fake-quantized with the engine's own format, scales and rounding. This one alarms."""


@dataclass(frozen=True, slots=True)
class RequestScore:
    """One request's decode against one pass. Sums over its `tokens` scored tokens, in nats where not counts.

    sum_delta      Σ (decode logprob − pass logprob) of the generated ids; for ids drawn from the engine at temperature 1
                   it estimates the summed KL divergence of the engine from the pass
    sum_abs_delta  Σ |the same|
    flips          positions whose most probable id differs
    first_flip     0-based position of the first of them; None: censored after `tokens` positions
    tv_low, tv_high  Σ of a lower and an upper bound of the total variation distance
    kl_low         Σ of a lower bound of KL(engine ‖ pass)
    collapse       "", "repeated token", "nan logprob" or "positive logprob"
    """

    tokens: int
    sum_delta: float
    sum_abs_delta: float
    flips: int
    first_flip: int | None
    tv_low: float
    tv_high: float
    kl_low: float
    collapse: str = ""

    @property
    def mean_abs_delta(self) -> float | None:
        """|Δ logprob| averaged over this request's tokens; None when no token could be scored."""
        return self.sum_abs_delta / self.tokens if self.tokens else None

    @property
    def flip_rate(self) -> float | None:
        """Flips by token; None when no token could be scored."""
        return self.flips / self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True)
class Stratum:
    """A kind of request: one of PROMPT_STRATA, one of TURN_STRATA, and the adapter's name ("" is the base model)."""

    prompt: str
    turns: str
    adapter: str = ""


def stratum(prompt_tokens: int, turns: int, adapter: str = "") -> Stratum:
    """The stratum of a request with this many prompt tokens and user turns."""
    length = next((PROMPT_STRATA[i] for i, most in enumerate((256, 1024, 4096)) if prompt_tokens <= most), PROMPT_STRATA[-1])
    depth = next((TURN_STRATA[i] for i, most in enumerate((1, 4)) if turns <= most), TURN_STRATA[-1])
    return Stratum(length, depth, adapter)


@dataclass(frozen=True, slots=True)
class Observation:
    """One probed request.

    `weight` is the inverse of the request's inclusion probability, at least 1: how many requests it stands for.
    `scores` by comparison: COST, UNEXPLAINED, or the label of a what-if or control pass.
    """

    weight: float
    stratum: Stratum
    scores: Mapping[str, RequestScore]
