"""From finished arms to verdicts. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvguard import __version__
from kvguard.compare.beside import cut, findings_of, speed_of
from kvguard.compare.equal import cache_differences, check_arms, identical_share
from kvguard.compare.models import (
    AGAIN,
    CONTROLS,
    EAGER,
    HARNESS,
    WEAK,
    Answered,
    ArmFile,
    Forced,
    Generated,
    Scored,
    is_sixteen_bit,
)
from kvguard.compare.outcome import (
    CANNOT_TELL,
    EAGER_ONLY,
    FREE_WIN,
    KEEP,
    ArmResult,
    Capacity,
    Cell,
    Divergence,
    Outcome,
    Rules,
    TaskResult,
    Verdict,
)
from kvguard.compare.retrieval import TASK as RETRIEVAL
from kvguard.compare.statistics import (
    by_item,
    compare,
    holm,
    items_needed,
    items_to_see,
    mean,
    p_value,
    percentile,
    standard_error,
    weak_is_seen,
    wilson,
)
from kvguard.files import printable
from kvguard.shadow.statistics import Estimate, Measure, SumStats, estimate

LONG = 8192
_POINTS = 100.0
_NAN = "nan logprob"
_CHANCE = 0.005
"""One-sided p-value, each way, below which the 16-bit arm differs from itself by more than chance."""


def judge(arms: Sequence[ArmFile], rules: Rules, notes: Sequence[str] = ()) -> Outcome:
    """The outcome. The first arm is the reference. Raises PolicyRefusal for arms that cannot be compared."""
    check_arms(arms)
    reference = arms[0]
    by_name = {arm.arm: arm for arm in arms}
    pairs = {arm.arm: [_Task(reference, arm, by_name, task, rules) for task in _tasks(reference)] for arm in arms[1:]}
    family = {
        (arm, task.name, how): paired.p_loss
        for arm, tasks in pairs.items()
        if _is_judged(arm)
        for task in tasks
        for how, paired in (("cache", task.paired), ("moved", task.moved))
        if paired is not None and not task.void
    }
    shown = holm(family)
    results = [_arm(arm, reference, by_name, pairs.get(arm.arm, []), shown, rules) for arm in arms]
    return Outcome(
        kvguard_version=__version__,
        model=reference.model,
        engine=str(reference.record["predicate"]["engine"].get("full_version", "")),
        seed=reference.plan.seed,
        quick=reference.plan.quick,
        plan_digest=reference.plan.digest,
        limits=reference.limits,
        rules=rules,
        arms=tuple(results),
        scores={task: {arm.arm: _score(arm, task) for arm in arms} for task in _tasks(reference)},
        notes=(*notes, *_notes(reference, by_name)),
    )


def _is_judged(arm: str) -> bool:
    return arm not in CONTROLS and not is_sixteen_bit(arm)


def _own_backend(arms: Mapping[str, ArmFile], reference: ArmFile) -> ArmFile | None:
    """The 16-bit arm on the backend that the quantized caches move away from."""
    return next((arm for arm in arms.values() if is_sixteen_bit(arm.arm) and arm is not reference), None)


@dataclass(frozen=True, slots=True)
class _Scores:
    rows: Mapping[tuple[str, int], Answered]

    @property
    def by_item(self) -> dict[str, float]:
        return by_item([(row.item, row.score) for row in self.rows.values() if not row.problem])


def _scores(arm: ArmFile, task: str) -> _Scores:
    return _Scores({(row.item, row.sample): row for row in arm.scored_answers if row.task == task})


class _Task:
    """One arm's scores on one task against the reference's, with the controls'."""

    def __init__(self, reference: ArmFile, arm: ArmFile, arms: Mapping[str, ArmFile], task: str, rules: Rules) -> None:
        self.name, self.rules, self.quick = task, rules, reference.plan.quick
        ours, theirs = _scores(arm, task), _scores(reference, task)
        limits = {item.id: item.max_tokens for item in reference.plan.items if item.task == task}
        self.paired = compare(theirs.by_item, ours.by_item, reference.plan.seed)
        self.losses = _losses(theirs.by_item, ours.by_item)
        repeated = arms.get(AGAIN)
        self.again = compare(theirs.by_item, _scores(repeated, task).by_item, reference.plan.seed) if repeated else None
        gains = [-value for value in _losses(theirs.by_item, _scores(repeated, task).by_item)] if repeated else []
        self.again_gain = p_value(gains) if gains else 1.0
        own = _own_backend(arms, reference) if _is_judged(arm.arm) else None
        before = _scores(own, task) if own else _Scores({})
        self.moved = compare(before.by_item, ours.by_item, reference.plan.seed) if own else None
        self.moved_from = ", ".join(own.effective.attention_backends) if own else ""
        weak = arms.get(WEAK)
        self.weak_losses = _losses(theirs.by_item, _scores(weak, task).by_item) if weak else []
        self.weak = weak_is_seen(self.weak_losses, rules.margin)
        problems = [row.problem for row in (*ours.rows.values(), *theirs.rows.values(), *before.rows.values()) if row.problem]
        # The engine's own words could repeat a prompt, which no report holds.
        self.failed, self.problem = len(problems), printable(problems[0].partition(":")[0], 80) if problems else ""
        if task.startswith(HARNESS):
            self.truncated_reference, self.truncated_arm = _cut_share(reference), _cut_share(arm)
            self.truncated_reference = max(self.truncated_reference, _cut_share(own) if own else 0.0)
        else:
            sixteen = [_share([cut(row, None, limits[row.item]) for row in each.rows.values()]) for each in (theirs, before)]
            self.truncated_reference = max(sixteen)
            self.truncated_arm = _share([cut(row, theirs.rows.get(key), limits[row.item]) for key, row in ours.rows.items()])
        self.void = self._void()

    def _void(self) -> str:
        bound, most = self.rules.truncation, max(self.truncated_reference, self.truncated_arm)
        if self.paired is None:
            return f"no item was answered by both arms{f' ({self.problem})' if self.problem else ''}"
        if most > bound:
            theirs, ours = _POINTS * self.truncated_reference, _POINTS * self.truncated_arm
            return (
                f"{theirs:.0f} % of the 16-bit arm's answers and {ours:.0f} % of this one's ended by max_tokens, above "
                f"{_POINTS * bound:g} %: truncation, not loss; raise --max-tokens"
            )
        if self.failed:
            return f"{self.failed} requests failed ({self.problem}); the engine's words are in arms/"
        if self.again is None:
            return "the 16-bit arm was not run again"
        if min(self.again.p_loss, self.again_gain) < _CHANCE:
            loss = _points(self.again.loss)
            return f"the 16-bit arm differs from itself by {loss}: something else than the cache moves the scores"
        return ""

    def result(self, shown: bool, moved_shown: bool) -> TaskResult:
        """The task's verdict. A shown loss needs no control that shows one; the absence of a loss does.

        `moved_shown` says the same of the loss against 16-bit on its own backend. A cache that cannot be had without a
        worse backend is not free.
        """
        verdict, why, needed = self._verdict(shown)
        moved, margin = self.moved, self.rules.margin
        if moved is not None and not self.void and moved.high >= margin and verdict != KEEP:
            against = f"against 16-bit on {self.moved_from}, backend and cache together"
            if moved_shown:
                verdict, why, needed = KEEP, f"{against} lose {_points(moved.loss)} (at least {_points(moved.low)})", None
            elif verdict == FREE_WIN:
                verdict, why = CANNOT_TELL, f"{against} may lose {_points(moved.high)}, the margin is {_points(margin)}"
        return TaskResult(
            task=self.name,
            verdict=verdict,
            why=why,
            paired=self.paired,
            again=self.again,
            weak=self.weak,
            truncated_reference=self.truncated_reference,
            truncated_arm=self.truncated_arm,
            failed=self.failed,
            void=self.void,
            needed=needed,
            moved=moved,
        )

    def _needed(self) -> int | None:
        """How many items would tell: they bound the loss, and show the weak arm's where one was run."""
        needed = items_needed(self.losses, self.rules.margin) if self.losses else None
        if needed is None or not self.weak_losses:
            return needed
        seen = items_to_see(self.weak_losses, self.rules.margin)
        return None if seen is None else max(needed, seen)

    def _verdict(self, shown: bool) -> tuple[Verdict, str, int | None]:
        paired, margin = self.paired, self.rules.margin
        needed = self._needed()
        if self.void or paired is None:
            return CANNOT_TELL, self.void, None
        inside = paired.high < margin
        if shown and not inside:
            return KEEP, f"a loss of {_points(paired.loss)} is shown (at least {_points(paired.low)})", None
        if not inside:
            more = f"; about {needed:,} items would tell" if needed and needed > paired.items else ""
            if self.weak_losses and items_to_see(self.weak_losses, margin) is None:
                more = "; more items of this task would not tell, since ruined scales lose nothing on it"
            return (
                CANNOT_TELL,
                f"the loss may be as large as {_points(paired.high)}, the margin is {_points(margin)}{more}",
                needed,
            )
        if not self.weak.seen:
            return CANNOT_TELL, f"no loss is seen, and a loss of the margin would not be either: {self.weak.why}", needed
        if self.quick:
            return CANNOT_TELL, "a quick comparison never says free win", needed
        return FREE_WIN, f"the loss is under {_points(paired.high)}, the margin is {_points(margin)}", None


def _arm(
    arm: ArmFile,
    reference: ArmFile,
    arms: Mapping[str, ArmFile],
    tasks: Sequence[_Task],
    shown: Mapping[tuple[str, str, str], bool],
    rules: Rules,
) -> ArmResult:
    capacity = _capacity(arm, reference)
    judged = tuple(task.result(*(shown.get((arm.arm, task.name, how), False) for how in ("cache", "moved"))) for task in tasks)
    collapsed = _collapsed(arm, reference, arms.get(AGAIN)) if arm is not reference else ()
    verdict: Verdict | None = None
    why: tuple[str, ...] = ()
    if _is_judged(arm.arm):
        verdict, why = _overall(judged, capacity, collapsed, rules)
    effective = arm.effective
    return ArmResult(
        arm=arm.arm,
        verdict=verdict,
        why=why,
        dtype=effective.dtype,
        scales=str(effective.scales),
        confidence=str(effective.confidence),
        backends=effective.attention_backends,
        record_digest=arm.record_digest,
        capacity=capacity,
        divergence=_divergence(arm, reference, arms.get(AGAIN)),
        speed=speed_of(arm, reference),
        tasks=judged,
        cells=_cells(arm),
        collapsed=collapsed,
        identical=identical_share(arm, reference) if arm is not reference else (0, 0),
        preemptions=arm.preemptions,
        acceptance=arm.counters.acceptance,
        findings=findings_of(arm, reference) if _is_judged(arm.arm) else (),
        differences=tuple(cache_differences(arm, reference)) if arm is not reference else (),
        command=arm.command,
    )


def _overall(
    tasks: Sequence[TaskResult], capacity: Capacity, collapsed: Sequence[str], rules: Rules
) -> tuple[Verdict, tuple[str, ...]]:
    lost = [f"{task}: answers collapse, where the 16-bit arm's never do" for task in collapsed]
    lost += [f"{task.task}: {task.why}" for task in tasks if task.verdict == KEEP]
    if lost:
        return KEEP, tuple(lost)
    unsure = [f"{task.task}: {task.why}" for task in tasks if task.verdict == CANNOT_TELL]
    if not tasks:
        unsure.append("no task with scores was run")
    if capacity.ratio is None:
        unsure.append("capacity: the engine did not give bytes and tokens of its cache")
    elif capacity.ratio < rules.capacity_ratio:
        unsure.append(f"capacity: {capacity.ratio:.2f} times the tokens for each byte, required are {rules.capacity_ratio:g}")
    if unsure:
        return CANNOT_TELL, tuple(unsure)
    return FREE_WIN, (
        f"every task's loss is bounded under {_points(rules.margin)}; the cache holds {capacity.ratio:.2f} times the tokens",
    )


def _capacity(arm: ArmFile, reference: ArmFile) -> Capacity:
    ours, theirs = arm.effective, reference.effective
    ratio = None
    if ours.bytes_per_token and theirs.bytes_per_token:
        ratio = theirs.bytes_per_token / ours.bytes_per_token
    return Capacity(
        kv_bytes=ours.kv_bytes,
        kv_tokens=ours.kv_tokens,
        bytes_per_token=ours.bytes_per_token,
        batch_8k=None if ours.kv_tokens is None else ours.kv_tokens // LONG,
        ratio=ratio,
    )


def _collapsed(arm: ArmFile, reference: ArmFile, again: ArmFile | None) -> tuple[str, ...]:
    """Tasks where this arm's answers break down and no 16-bit arm's does; NaN logprobs count in the divergence task."""
    sixteen = (reference, again) if again is not None else (reference,)
    found = []
    for task in _tasks(reference):
        broken = any(row.task == task and row.collapse for row in arm.answers)
        if broken and not any(row.task == task and row.collapse for one in sixteen for row in one.answers):
            found.append(task)
    nan = any(row.problem == _NAN for row in arm.generated)
    if nan and not any(row.problem == _NAN for one in sixteen for row in one.generated):
        found.append("divergence (NaN logprobs)")
    return tuple(found)


def _divergence(arm: ArmFile, reference: ArmFile, again: ArmFile | None) -> Divergence:
    scored = [row for row in again.scored if row.arm == arm.arm] if again is not None else []
    good = [row for row in scored if not row.problem and row.tokens]
    # 16-bit on its own backend was forced over its own texts: the reference did not exist yet.
    same = arm is reference or not is_sixteen_bit(arm.arm)
    theirs = {row.text: row for row in reference.forced if same and not row.problem}
    forced = [(row, theirs[row.text]) for row in arm.forced if not row.problem and row.text in theirs and row.logprobs]
    deltas = [(math.fsum(abs(a - b) for a, b in zip(o.logprobs, t.logprobs, strict=True)), len(o.logprobs)) for o, t in forced]
    flips = [(sum(a != b for a, b in zip(o.top1, t.top1, strict=True)), len(o.top1)) for o, t in forced]
    rows: list[Generated | Scored | Forced] = [*arm.generated, *scored, *arm.forced]
    troubles = [row.problem for row in rows if row.problem]
    return Divergence(
        decode=_estimate([(row.sum_abs_delta, row.tokens) for row in good], Measure.ABS_DELTA),
        flips=_estimate([(row.flips, row.tokens) for row in good], Measure.FLIP_RATE),
        kl=_estimate([(row.kl_low, row.tokens) for row in good], Measure.KL_LOW),
        forced=_estimate(deltas, Measure.ABS_DELTA),
        forced_flips=_estimate(flips, Measure.FLIP_RATE),
        by_text=tuple(row.sum_abs_delta / row.tokens for row in good),
        tail=_tail([delta for row in good for delta in row.deltas]),
        forced_tail=_tail([abs(a - b) for o, t in forced for a, b in zip(o.logprobs, t.logprobs, strict=True)]),
        problems=tuple(dict.fromkeys(troubles))[:5],
    )


def _tail(deltas: Sequence[float]) -> tuple[float | None, float | None]:
    return percentile(deltas, 0.95), percentile(deltas, 0.99)


def _estimate(parts: Sequence[tuple[float, float]], measure: Measure) -> Estimate:
    total = SumStats()
    for total_of, count in parts:
        total = total + SumStats.of(1.0, total_of, count)
    return estimate(total, measure)


def _cells(arm: ArmFile) -> tuple[Cell, ...]:
    places = {item.id: (item.length or 0, item.depth or 0) for item in arm.plan.items if item.task == RETRIEVAL}
    found: dict[tuple[int, int], list[float]] = {}
    for row in arm.answers:
        if row.task == RETRIEVAL and not row.problem:
            found.setdefault(places[row.item], []).append(row.score)
    return tuple(
        Cell(length=length, depth=depth, items=len(scores), right=mean(scores), low=low, high=high)
        for (length, depth), scores in sorted(found.items())
        for low, high in (wilson(sum(scores), len(scores)),)
    )


def _score(arm: ArmFile, task: str) -> tuple[float, float | None, int]:
    values = list(_scores(arm, task).by_item.values())
    return (mean(values), standard_error(values), len(values)) if values else (math.nan, None, 0)


def _tasks(reference: ArmFile) -> list[str]:
    return list(reference.tasks)


def _cut_share(arm: ArmFile) -> float:
    """Over all of lm-eval's tasks, since its requests do not say of which they are."""
    return arm.harnessed.cut / arm.harnessed.generated if arm.harnessed and arm.harnessed.generated else 0.0


def _losses(theirs: Mapping[str, float], ours: Mapping[str, float]) -> list[float]:
    return [theirs[item] - ours[item] for item in theirs if item in ours]


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _points(share: float) -> str:
    return f"{_POINTS * share:.1f} points"


def _notes(reference: ArmFile, arms: Mapping[str, ArmFile]) -> list[str]:
    found = ["not covered: images, adapters, tool calls, languages besides English, and lengths beyond max_model_len"]
    if reference.plan.samples == 1:
        found.append("one greedy answer for each item: answers sampled at the model's own temperature were not compared")
    if EAGER in reference.command:
        found.append(EAGER_ONLY)
    if (own := _own_backend(arms, reference)) is not None:
        away, to = (", ".join(arm.effective.attention_backends) for arm in (own, reference))
        found.append(f"a quantized cache moves the attention backend from {away} to {to}: the reference is 16-bit on {to}")
    if WEAK not in arms:
        found.append("no weak arm: no task can say free win")
    return found
