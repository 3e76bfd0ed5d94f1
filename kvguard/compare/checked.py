"""A finished arm's file, held against itself: anybody may have written or changed it before a report is made of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

from pydantic import ValidationError

from kvguard.compare.models import CONTROLS, HARNESS, REFERENCE, ArmFile, Plan
from kvguard.compare.planning import REASONING, digest_of, text_id
from kvguard.files import printable
from kvguard.record.statement import Statement
from kvguard.record.store import parse_record
from kvguard.vocabulary import UsageError, canonical_dtype

T = TypeVar("T", bound=Hashable)

_OF_THE_CACHE = ("dtype", "scales", "confidence", "kv_bytes", "kv_tokens", "bytes_per_token", "attention_backends")
"""What a report says of an arm's cache."""


def check_arm(arm: ArmFile, name: str) -> None:
    """The record is whole and is the one that is named, the cache is the record's, and every question has one answer.

    `name` is the file's, for errors. Raises UsageError.
    """
    where = f"arm file {name}"
    if not arm.arm.isprintable() or not arm.arm.strip():
        raise UsageError(f"{where}: arm: {printable(arm.arm)!r} is no arm's name")
    try:
        record = parse_record(json.dumps(arm.record).encode(), name)
        effective = Statement.model_validate(record).effective
    except (ValidationError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: record: not a run record ({type(error).__name__})") from None
    if record["predicate"]["content_digest"] != arm.record_digest:
        raise UsageError(f"{where}: record_digest: {printable(arm.record_digest)!r} is not its record's")
    for key in _OF_THE_CACHE:
        said, found = getattr(arm.effective, key), getattr(effective, key)
        if said != found:
            raise UsageError(f"{where}: effective.{key}: {printable(str(said))!r}, its record shows {found!s}")
    named = arm.arm.partition("=")[0].partition("@")[0]
    if arm.arm not in CONTROLS and named != REFERENCE and canonical_dtype(named) != effective.dtype:
        raise UsageError(f"{where}: arm: {printable(arm.arm)!r}, its record shows {effective.dtype}")
    if digest_of(arm.plan) != arm.plan.digest:
        raise UsageError(f"{where}: plan: was changed after it was written")
    _check_rows(arm, where)


def _check_rows(arm: ArmFile, where: str) -> None:
    asked = Counter(_questions(arm.plan))
    told = Counter((row.task, row.item, row.sample) for row in arm.answers)
    _same(asked, told, f"{where}: answers")
    if (arm.plan.harness is None) != (arm.harnessed is None):
        raise UsageError(f"{where}: harnessed: required are lm-eval's answers exactly where its plan has tasks of it")
    for row in arm.harnessed.answers if arm.harnessed else ():
        if not row.task.startswith(HARNESS) or told[key := (row.task, row.item, row.sample)]:
            raise UsageError(f"{where}: harnessed: {printable(row.task)!r} is no task of lm-eval, or {row.item} stands twice")
        told[key] += 1
    texts = Counter(text_id(number) for number in range(len(arm.plan.texts)))
    _same(texts, Counter(row.text for row in arm.generated), f"{where}: generated")
    for made in arm.generated:
        if not len(made.ids) == len(made.logprobs) == len(made.top):
            raise UsageError(f"{where}: generated {made.text}: as many ids, logprobs and top entries are required")
    forced = Counter(row.text for row in arm.forced)
    if unknown := [text for text, times in forced.items() if text not in texts or times > 1]:
        raise UsageError(f"{where}: forced: {printable(unknown[0])!r} is no text of its plan, or stands twice")
    for passed in arm.forced:
        if len(passed.logprobs) != len(passed.top1):
            raise UsageError(f"{where}: forced {passed.text}: as many logprobs as top1 are required")


def _questions(plan: Plan) -> list[tuple[str, str, int]]:
    return [
        (item.task, item.id, sample) for item in plan.items for sample in range(plan.samples if item.task in REASONING else 1)
    ]


def _same(asked: Counter[T], told: Counter[T], where: str) -> None:
    for key, times in told.items():
        if key not in asked:
            raise UsageError(f"{where}: {printable(str(key))} is not in its plan")
        if times > 1:
            raise UsageError(f"{where}: {printable(str(key))} stands twice")
    if missing := sum(key not in told for key in asked):
        raise UsageError(f"{where}: {missing} of {len(asked)} are missing; the arm is not finished")
