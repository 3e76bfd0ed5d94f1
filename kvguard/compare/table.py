"""The decision table, as rows of text, for the terminal, Markdown and HTML alike."""

from __future__ import annotations

import math

from kvguard.compare.conversation import TASK as CONVERSATION
from kvguard.compare.models import CONTROLS
from kvguard.compare.outcome import ArmResult, Outcome
from kvguard.compare.planning import REASONING
from kvguard.compare.retrieval import TASK as RETRIEVAL
from kvguard.shadow.statistics import Estimate

HEADINGS = (
    "config",
    "KV bytes/token",
    "max batch at 8K",
    "long-context retrieval ± SE",
    "reasoning pass@1 ± SE",
    "multi-turn ± SE",
    "divergence",
    "throughput",
    "verdict",
)
TASK_HEADINGS = (
    "task",
    "config",
    "items",
    "loss",
    "90 % interval",
    "2-SE overlap",
    "would show",
    "A/A interval",
    "weak arm",
    "truncated",
    "verdict",
)
_NONE = "—"
_LEAST_CLUSTERS = 2.0


def decision_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """One row an arm, controls last. Divergence is mean |Δ logprob| by token of the arm's decode against 16-bit."""
    return [_row(outcome, arm) for arm in outcome.arms]


def task_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """One row for each task of each arm that is judged; losses in points of 100."""
    rows: list[tuple[str, ...]] = []
    for arm in outcome.arms:
        for task in arm.tasks if arm.arm not in CONTROLS else ():
            paired, again = task.paired, task.again
            rows.append(
                (
                    task.task,
                    arm.arm,
                    str(paired.items) if paired else "0",
                    _points(paired.loss) if paired else _NONE,
                    f"{_points(paired.low)} to {_points(paired.high)}" if paired else _NONE,
                    _NONE if paired is None or paired.within_two_errors is None else _yes(paired.within_two_errors),
                    _points(paired.smallest) if paired and paired.smallest is not None else _NONE,
                    f"{_points(again.low)} to {_points(again.high)}" if again else _NONE,
                    "seen" if task.weak.seen else "not seen",
                    f"{100 * task.truncated_reference:.0f} % / {100 * task.truncated_arm:.0f} %",
                    f"{task.verdict}: {task.why}" if arm.verdict is not None else "not judged: what the backend alone changes",
                )
            )
    return rows


def _row(outcome: Outcome, arm: ArmResult) -> tuple[str, ...]:
    capacity = arm.capacity
    return (
        f"{arm.arm} ({arm.dtype}, scales {arm.scales}, {arm.confidence})",
        _NONE if capacity.bytes_per_token is None else f"{capacity.bytes_per_token:,.0f}",
        _NONE if capacity.batch_8k is None else f"{capacity.batch_8k:,} ({capacity.kv_tokens:,} tokens)",
        _score(outcome, RETRIEVAL, arm.arm),
        _pooled(outcome, arm.arm),
        _score(outcome, CONVERSATION, arm.arm),
        divergence_text(arm.divergence.decode),
        _throughput(arm),
        arm.verdict or _role(outcome, arm),
    )


def _role(outcome: Outcome, arm: ArmResult) -> str:
    if arm.arm in CONTROLS:
        return "control"
    return "reference" if arm is outcome.arms[0] else f"not judged: 16-bit on {', '.join(arm.backends)}"


def _throughput(arm: ArmResult) -> str:
    if arm.speed.void:
        return "not compared"
    runs = arm.speed.runs
    told = f"{sum(runs) / len(runs):,.1f} tokens/s ({min(runs):,.1f} to {max(runs):,.1f})" if runs else _NONE
    return told + (f", {arm.preemptions:,.0f} preemptions" if arm.speed.runs and arm.preemptions else "")


def aside(arm: ArmResult) -> tuple[str, ...]:
    """What stands beside an arm's verdict: findings, drafts, and prefill and decode apart."""
    drafts = () if arm.acceptance is None else (f"{arm.acceptance:.1%} of drafted tokens are accepted",)
    return (*_moved(arm), *arm.findings, *drafts, *arm.speed.changes)


def _moved(arm: ArmResult) -> tuple[str, ...]:
    """What backend and cache cost together, where the cache moves the backend."""
    return tuple(
        f"{task.task}: against 16-bit on its own backend {_points(moved.loss)} points lost "
        f"({_points(moved.low)} to {_points(moved.high)})"
        for task in arm.tasks
        if (moved := task.moved) is not None
    )


def tail_text(tail: tuple[float | None, float | None]) -> str:
    """The 95th and the 99th percentile."""
    return " / ".join(_NONE if value is None else f"{value:.3f}" for value in tail)


def divergence_text(found: Estimate) -> str:
    """A mean with its interval, which fewer than two texts' worth of tokens do not have."""
    if found.value is None:
        return _NONE
    told = found.low is not None and found.high is not None and found.effective_clusters >= _LEAST_CLUSTERS
    interval = f" ({found.low:.3f} to {found.high:.3f})" if told else ""
    return f"{found.value:.3f}{interval}"


def _score(outcome: Outcome, task: str, arm: str) -> str:
    mean, error, items = outcome.scores.get(task, {}).get(arm, (math.nan, None, 0))
    return _percent(mean, error) if items else _NONE


def _pooled(outcome: Outcome, arm: str) -> str:
    """Both reasoning tasks together, weighted by items."""
    found = [outcome.scores[task][arm] for task in REASONING if task in outcome.scores and outcome.scores[task][arm][2]]
    total = sum(items for _, _, items in found)
    if not total:
        return _NONE
    mean = sum(value * items for value, _, items in found) / total
    errors = [(error, items) for _, error, items in found if error is not None]
    error = math.sqrt(sum((value * items) ** 2 for value, items in errors)) / total if len(errors) == len(found) else None
    return _percent(mean, error)


def _percent(mean: float, error: float | None) -> str:
    return f"{100 * mean:.1f} %" + (f" ± {100 * error:.1f}" if error is not None else "")


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
