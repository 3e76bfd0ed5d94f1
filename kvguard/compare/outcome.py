"""What a comparison found, as the document that every report is rendered from."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from kvguard.compare.statistics import Paired, Seen
from kvguard.compare.streams import Phase
from kvguard.shadow.statistics import Estimate
from kvguard.vocabulary import Frozen

FREE_WIN: Final = "free win"
KEEP: Final = "keep 16-bit"
CANNOT_TELL: Final = "cannot tell"
Verdict = Literal["free win", "keep 16-bit", "cannot tell"]
EAGER_ONLY: Final = "eager mode: graphs and compilation, as served in production, were not compared (--production)"
RANK: Final[dict[str, int]] = {KEEP: 0, CANNOT_TELL: 1, FREE_WIN: 2}
"""From the worst verdict to the best."""


class Rules(Frozen):
    """What verdicts are held against. `margin` is the loss that is accepted, in shares of 1; `capacity_ratio` the least gain
    in tokens for each byte; `truncation` the share of answers that may end by their length before a task is void."""

    margin: float = 0.02
    capacity_ratio: float = 1.5
    truncation: float = 0.05


class TaskResult(Frozen):
    """One task of one arm. `void` says why its scores do not count, "" when they do; shares are of 1.

    `again` is the same comparison of the 16-bit arm with itself, `weak` whether a loss of the margin would be seen,
    `needed` the number of items that would tell. `moved` is the loss against the 16-bit arm on the attention backend that
    the cache moves away from: what backend and cache cost together.
    """

    task: str
    verdict: Verdict
    why: str
    paired: Paired | None
    again: Paired | None
    weak: Seen
    truncated_reference: float
    truncated_arm: float
    failed: int
    void: str = ""
    needed: int | None = None
    moved: Paired | None = None


class Capacity(Frozen):
    """Measured by the engine: bytes and tokens of its cache, and what follows for sequences of 8,192 tokens.

    `batch_8k` is whole sequences of 8K that the measured tokens hold, before max_num_seqs; `ratio` tokens for each byte,
    against the reference.
    """

    kv_bytes: int | None
    kv_tokens: int | None
    bytes_per_token: float | None
    batch_8k: int | None
    ratio: float | None


_SCORING_PATH: Final[dict[str, Literal["decode", "prefill"]]] = {
    "decode": "decode",
    "flips": "decode",
    "kl": "decode",
    "forced": "prefill",
    "forced_flips": "prefill",
}


class Divergence(Frozen):
    """Means by token, in nats where not shares. `decode`, `flips` and `kl` are of the arm's own decode against the 16-bit
    engine's pass over it; `forced` and `forced_flips` of the arm's own pass over the 16-bit arm's text. `by_text` is the mean
    |Δ logprob| of each text's decode; `tail` and `forced_tail` the 95th and 99th percentile over tokens, None where too few
    tokens have one. `scoring_path` says for each which of the arm's own paths is measured: its kernels for prefill and for
    decode differ, and either may be at fault alone."""

    decode: Estimate
    flips: Estimate
    kl: Estimate
    forced: Estimate
    forced_flips: Estimate
    by_text: tuple[float, ...]
    tail: tuple[float | None, float | None] = (None, None)
    forced_tail: tuple[float | None, float | None] = (None, None)
    scoring_path: dict[str, Literal["decode", "prefill"]] = Field(default_factory=lambda: dict(_SCORING_PATH))
    problems: tuple[str, ...] = ()


class Speed(Frozen):
    """Generated tokens in a second at saturation, of each run; `phases` are of one request alone, prefill and decode apart.

    `changes` are the phases against the 16-bit arm's. `void` says why speeds are not compared, "" when they are.
    """

    runs: tuple[float, ...]
    requests: int
    phases: tuple[Phase, ...] = ()
    changes: tuple[str, ...] = ()
    void: str = ""


class Cell(Frozen):
    """Retrieval at one length (tokens) and depth (percent); `low` and `high` are Wilson's 95 % interval of `right`."""

    length: int
    depth: int
    items: int
    right: float
    low: float = 0.0
    high: float = 1.0


class ArmResult(Frozen):
    """One arm. Controls have no verdict, nor has 16-bit on its own backend. `collapsed` names tasks where answers broke down
    and the 16-bit arms' did not.

    `acceptance` is the share of drafted tokens that were accepted, None without speculative decoding; `findings` are about
    speed, drafts and lengths, and no verdict rests on them.
    """

    arm: str
    verdict: Verdict | None
    why: tuple[str, ...]
    dtype: str
    scales: str
    confidence: str
    backends: tuple[str, ...]
    record_digest: str
    capacity: Capacity
    divergence: Divergence
    speed: Speed
    tasks: tuple[TaskResult, ...]
    cells: tuple[Cell, ...]
    collapsed: tuple[str, ...]
    identical: tuple[int, int]
    preemptions: float | None
    acceptance: float | None = None
    findings: tuple[str, ...] = ()
    differences: tuple[dict[str, str], ...]
    command: tuple[str, ...]


class Outcome(Frozen):
    """A whole comparison. `scores` is each task's mean and standard error by arm; `notes` are what was not covered.

    `production` is the same comparison with graphs and compilation on, None where it was not run. Where it was, the verdicts
    in `arms` are the worse ones of both.
    """

    format: int = 1
    kvguard_version: str
    model: str
    engine: str
    seed: int
    quick: bool
    plan_digest: str
    limits: dict[str, int | None]
    rules: Rules
    arms: tuple[ArmResult, ...]
    scores: dict[str, dict[str, tuple[float, float | None, int]]]
    notes: tuple[str, ...]
    production: Outcome | None = None
