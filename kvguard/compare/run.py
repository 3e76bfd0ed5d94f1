"""A comparison from beginning to end: the arms one after the other, each finished one in a file, then the report."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvguard.canonical import sha256_of
from kvguard.compare import equal
from kvguard.compare.arms import Arm, again, arm_of, weak_or_why
from kvguard.compare.asking import Asker, Told, tokens_per_hundred
from kvguard.compare.directory import claim
from kvguard.compare.draw import Draw
from kvguard.compare.equal import moved_backend
from kvguard.compare.finished import in_order
from kvguard.compare.harness import run_harness
from kvguard.compare.models import (
    AGAIN,
    CONTROLS,
    REFERENCE,
    Answered,
    ArmFile,
    Forced,
    Generated,
    Harness,
    Harnessed,
    Item,
    Plan,
    Scored,
    Streamed,
    Throughput,
)
from kvguard.compare.planning import REASONING, make_plan
from kvguard.compare.results import Row, Rows, Start, file_stem, read_arm, read_plan, write_whole
from kvguard.compare.retrieval import filler
from kvguard.compare.starting import Proven, counters, run_arm
from kvguard.files import printable
from kvguard.guard.settings import Settings
from kvguard.record.redact import redact_argv
from kvguard.vocabulary import Effective, EngineFailed, UsageError

_HUNDRED = 100


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for. `base` is the command without the KV cache; `own` the user's items; the rest see `planning`."""

    base: tuple[str, ...]
    arms: tuple[str, ...]
    tasks: tuple[str, ...]
    own: tuple[Item, ...]
    seed: int
    quick: bool
    production: bool
    samples: int
    items: int | None
    max_tokens: int | None
    concurrency: int
    harness: Harness | None = None
    harness_command: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """All that decides results, so that a directory's results are never mixed with another comparison's; no secrets."""
        own = sha256_of([item.model_dump(mode="json") for item in self.own]) if self.own else None
        tasks = {"tasks": list(self.tasks), "own-tasks": own, "items": self.items, "max-tokens": self.max_tokens}
        how = {"seed": self.seed, "quick": self.quick, "production": self.production}
        harness = [*self.harness.tasks, *self.harness.arguments] if self.harness else []
        more = {"samples": self.samples, "concurrency": self.concurrency, "lm-eval": harness}
        return {"command": redact_argv(self.base), "arms": list(self.arms), **tasks, **how, **more}


class _Moved(Exception):
    """A quantized cache runs on another attention backend than the 16-bit one."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.backend = backend


class Comparison:
    """Runs the arms of a wish in a directory, going on where an earlier run was ended.

    Where the first quantized cache moves the attention backend, the reference is run once more on that backend, and
    all others are compared with it. The 16-bit arm on its own backend stands beside.
    """

    def __init__(
        self,
        wish: Wish,
        out: Path,
        env: Mapping[str, str],
        *,
        settings: Settings,
        outputs: tuple[int, int],
        told: Told,
        arm_told: Told,
    ) -> None:
        """`told` is called with each step within an arm, `arm_told` with each arm."""
        self._wish, self._out, self._env = wish, out, env
        self._settings, self._outputs = settings, outputs
        self._told, self._arm_told = told, arm_told
        self._plan: Plan | None = None
        self._finished: list[ArmFile] = []
        self._own: ArmFile | None = None
        self.notes: list[str] = []
        self._claimed: int | None = None

    def run(self) -> tuple[ArmFile, ...] | None:
        """All arms, as `in_order` has them; None when it was stopped before the end.

        Raises UsageError for a directory of another comparison.
        """
        named = self._named()
        try:
            return self._run_all(named, self._moved_before())
        except _Moved as moved:
            return self._run_all(named, moved.backend)

    def _run_all(self, named: Sequence[Arm], backend: str) -> tuple[ArmFile, ...] | None:
        """`backend` is the attention backend that the quantized caches move to, "" while none does."""
        arms = self._arms(named, backend)
        for number, arm in enumerate(arms):
            self._arm_told(arm.name, number, len(arms))
            path = self._path(arm, "json")
            if path.exists():
                finished = read_arm(path)
                self._plan = self._plan or finished.plan
            else:
                made = self._run(arm)
                if made is None:
                    return None
                finished = made
            self._follow(finished.effective)
            self._finished.append(finished)
        self._arm_told("", len(arms), len(arms))
        return in_order(self._others())

    def close(self) -> None:
        """Let others work in the directory."""
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    def _named(self) -> list[Arm]:
        """The arms that were asked for, each possible here; the directory is taken for them."""
        wish = self._wish
        named = [arm_of(name, wish.base, self._env, seed=wish.seed, production=wish.production) for name in wish.arms]
        for arm in named:
            arm.prepared(self._env)  # refused before any engine time, and before anything is written
        self._claimed = claim(self._out, wish.options)
        return named

    def _arms(self, named: Sequence[Arm], backend: str) -> list[Arm]:
        """The reference, the quantized arms and the controls, all on `backend` where one is given."""
        wish, reference = self._wish, named[0]
        seed, production = wish.seed, wish.production
        if backend:
            self._own, self._finished = read_arm(self._path(reference, "json")), []
            reference = arm_of(f"{REFERENCE}@{backend}", wish.base, self._env, seed=seed, production=production)
            reference.prepared(self._env)
        place = self._out / "weak"
        weak, why = weak_or_why(reference.name, wish.base, self._env, place, seed=seed, production=production)
        self.notes = [] if weak else [f"no weak arm, so that no task can say free win: {why}"]
        return [reference, *named[1:], *([weak] if weak else []), again(reference)]

    def _moved_before(self) -> str:
        """The backend of the 16-bit arm that an earlier run added here, "" when none was."""
        found = sorted((self._out / "arms").glob(f"{REFERENCE}@*.jsonl")) if self._wish.arms[0] == REFERENCE else []
        return found[0].stem.partition("@")[2] if found else ""

    def _follow(self, effective: Effective) -> None:
        """Raises _Moved where this arm, the first that is quantized, runs on another backend than the reference."""
        if len(self._finished) == 1 and not self._own:
            first = self._finished[0]
            if backend := moved_backend(effective, first.arm, first.effective):
                raise _Moved(backend)

    def _run(self, arm: Arm) -> ArmFile | None:
        rows = Rows(self._path(arm, "jsonl"))
        made: list[ArmFile] = []

        async def questions(proven: Proven) -> None:
            made.append(await self._ask(arm, proven, rows))

        try:
            self._told("starting the engine", 0, 0)
            if not run_arm(arm, self._env, self._settings, self._outputs, questions):
                return None
        finally:
            rows.close()
            for whole in made:  # also where a signal came while the engine of a finished arm was ended
                write_whole(self._path(arm, "json"), whole.model_dump_json(indent=1) + "\n")
        return made[0]

    async def _ask(self, arm: Arm, proven: Proven, rows: Rows) -> ArmFile:
        plan = await self._plan_of(proven)
        self._refuse_unfair(arm, proven)
        whole = not rows.rows
        rows.begin(Start(record_digest=proven.record_digest, plan_digest=plan.digest))
        asker = Asker(
            client=proven.client,
            model=proven.model,
            chat=proven.prepared.declared.has_chat_template,
            plan=plan,
            rows=rows,
            told=self._told,
            sampled=frozenset(REASONING),
            concurrency=self._wish.concurrency,
        )
        await asker.items()
        if not self._finished:
            refuse_unanswerable(rows.rows)
        await self._harness(arm, proven, rows)
        await asker.generate()
        reference = self._finished[0].generated if self._finished else [r for r in rows.rows if isinstance(r, Generated)]
        await asker.force(reference)
        if arm.name == AGAIN:
            own = {AGAIN: [row for row in rows.rows if isinstance(row, Generated)]}
            await asker.score({**{each.arm: each.generated for each in self._others()}, **own})
        if arm.name not in CONTROLS:
            await asker.saturate()
            await asker.stream()
        found = rows.rows
        counted = await counters(proven.client)
        counted = counted if whole else counted.without_counts()
        return ArmFile(
            arm=arm.name,
            model=proven.prepared.command.model,
            command=tuple(redact_argv(arm.argv)),
            record=proven.record,
            record_digest=proven.record_digest,
            effective=proven.effective,
            limits=_limits(proven),
            chat_template=proven.prepared.declared.has_chat_template,
            template_digest=_template_digest(proven),
            preemptions=counted.preemptions,
            plan=plan,
            answers=tuple(row for row in found if isinstance(row, Answered)),
            generated=tuple(row for row in found if isinstance(row, Generated)),
            forced=tuple(row for row in found if isinstance(row, Forced)),
            scored=tuple(row for row in found if isinstance(row, Scored)),
            throughput=tuple(row for row in found if isinstance(row, Throughput)),
            streamed=tuple(row for row in found if isinstance(row, Streamed)),
            counters=counted,
            harnessed=next((row for row in found if isinstance(row, Harnessed)), None),
        )

    async def _harness(self, arm: Arm, proven: Proven, rows: Rows) -> None:
        """lm-eval's tasks: all of them in one run of it, which a kill in the middle loses."""
        wish = self._wish
        if wish.harness is None or any(isinstance(row, Harnessed) for row in rows.rows):
            return
        self._told("lm-eval", 0, 0)
        rows.add(
            await run_harness(
                wish.harness,
                wish.harness_command,
                proven.client,
                served_model=proven.model,
                tokenizer=proven.prepared.command.value("--tokenizer") or str(proven.prepared.files.directory),
                directory=self._out / "lm-eval" / file_stem(arm.name),
                seed=wish.seed,
                concurrency=wish.concurrency,
            )
        )

    async def _plan_of(self, proven: Proven) -> Plan:
        """The plan of this comparison: made by the first arm, kept beside the results."""
        path = self._out / "plan.json"
        if self._plan is None and path.exists():
            self._plan = read_plan(path)
        if self._plan is None:
            length = proven.limits.max_model_len
            if length is None:
                raise EngineFailed("the engine does not say its max_model_len, which the tasks' lengths follow from")
            wish = self._wish
            text = filler(Draw(wish.seed, "tokenizer"), _HUNDRED)
            self._plan = make_plan(
                seed=wish.seed,
                quick=wish.quick,
                tasks=wish.tasks,
                own=wish.own,
                max_model_len=length,
                max_num_seqs=proven.limits.max_num_seqs,
                tokens_per_hundred=await tokens_per_hundred(proven.client, proven.model, text),
                samples=wish.samples,
                items=wish.items,
                max_tokens=wish.max_tokens,
                harness=wish.harness,
            )
            write_whole(path, self._plan.model_dump_json(indent=1) + "\n")
        return self._plan

    def _refuse_unfair(self, arm: Arm, proven: Proven) -> None:
        """Before this arm is asked anything."""
        self._follow(proven.effective)
        if self._own is not None and not self._finished:
            equal.check_record(arm.name, proven.record, self._own.arm, self._own.record)
            equal.check_limits(arm.name, _limits(proven), self._own.arm, self._own.limits)
            equal.check_pinned(arm.name, proven.effective)
        if not self._finished:
            return
        first = self._finished[0]
        equal.check_record(arm.name, proven.record, first.arm, first.record)
        equal.check_limits(arm.name, _limits(proven), first.arm, first.limits)
        equal.check_backends(arm.name, proven.effective, first.arm, first.effective)
        if arm.name not in CONTROLS:
            equal.check_differ(arm.name, proven.effective, first.arm, first.effective)

    def _others(self) -> list[ArmFile]:
        return [*self._finished, *([self._own] if self._own else [])]

    def _path(self, arm: Arm, suffix: str) -> Path:
        return self._out / "arms" / f"{file_stem(arm.name)}.{suffix}"


def refuse_unanswerable(rows: Sequence[Row]) -> None:
    """A task that the 16-bit arm cannot be asked at all ends the comparison before the other arms are."""
    answers = [row for row in rows if isinstance(row, Answered)]
    for task in dict.fromkeys(row.task for row in answers):
        problems = [row.problem for row in answers if row.task == task]
        if all(problems):
            raise UsageError(
                f"task {task}: all {len(problems)} requests failed: {printable(problems[0], 300)}; "
                "leave the task out with --tasks, or change the engine's limits, with a new --out"
            )


def _limits(proven: Proven) -> dict[str, int | None]:
    limits = proven.limits
    return {
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }


def _template_digest(proven: Proven) -> str:
    """Over the checkpoint's files that a chat template can stand in, by their digests in the start's own reading."""
    names = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
    told = sorted(f"{item.name} {item.sha256}" for item in proven.prepared.digests if item.name in names)
    template = proven.prepared.command.value("--chat-template") or ""
    return "sha256:" + hashlib.sha256("\n".join([*told, template]).encode()).hexdigest()
