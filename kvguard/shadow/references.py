"""The references behind one interface: the pass inside the engine, or a 16-bit engine beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvguard.engine.client import EngineClient
from kvguard.reference.external import Asked, Primary, RecordReader, ask_reference, run_teacher_forced
from kvguard.reference.inside import ask_exactness, run_passes
from kvguard.reference.models import EXACT, Choice, Decode, Pass, Standing
from kvguard.reference.ranges import Ranges

IN_ENGINE = "in-engine"
"""The name of the reference that is the guarded engine's own pass."""

NO_CHOICES = "an external reference has no fake-quantized passes: use `--shadow in-engine`"
"""Why what-if cannot be asked of any other."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The passes over one decode, the engine seconds they took, or why there are none."""

    passes: tuple[Pass, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    ranges: Ranges | None = None


class Reference(Protocol):
    """Something that scores a decode: the pass inside the engine, or another engine."""

    name: str
    choices_possible: bool
    """Whether fake-quantized passes can be had."""
    comes_and_goes: bool
    """Whether it is asked again when it cannot score: an engine of its own may return, or another one in its place."""

    @property
    def standing(self) -> Standing:
        """What it was when `unavailable` was asked last."""

    async def unavailable(self) -> str:
        """Why this reference cannot score this engine, "" when it can."""

    async def run(self, decode: Decode, choices: Sequence[Choice]) -> Scored:
        """One pass for each choice."""


class InEngine:
    """The reference pass inside the guarded engine: no second GPU, any fake-quantized format."""

    name = IN_ENGINE
    choices_possible = True
    comes_and_goes = False
    standing = Standing(equality="the same engine")

    def __init__(self, client: EngineClient, secret: str, *, ranges: bool = False) -> None:
        """`ranges`: exact passes also say what keys and values span."""
        self._client = client
        self._secret = secret
        self._ranges = ranges

    async def unavailable(self) -> str:
        """Why the pass is not exact on this model, by layer and reason."""
        found = await ask_exactness(self._client, self._secret)
        if found.problem:
            return f"the reference pass could not be asked for: {found.problem}"
        if found.reasons:
            shown = "; ".join(found.reasons[:4]) + (f" and {len(found.reasons) - 4} more" if len(found.reasons) > 4 else "")
            return f"the reference pass would not be exact: {shown}"
        return ""

    async def run(self, decode: Decode, choices: Sequence[Choice]) -> Scored:
        """One pass for each choice, in one question to the workers."""
        ranges = self._ranges and EXACT in choices
        result = await run_passes(self._client, self._secret, decode, choices, ranges=ranges)
        return Scored(passes=result.passes, seconds=result.seconds, problem=result.problem, ranges=result.ranges)


class External:
    """A 16-bit engine behind kvguard at a URL or socket. It stalls nothing here, and may go and come back as another."""

    name = "external"
    choices_possible = False
    comes_and_goes = True

    def __init__(self, client: EngineClient, primary: Primary, their_record: RecordReader | None = None) -> None:
        """`their_record` reads the run record of that engine, by which it is shown to equal the primary."""
        self._client = client
        self._primary = primary
        self._their_record = their_record
        self._asked = Asked()

    @property
    def standing(self) -> Standing:
        """What it was when it was asked last."""
        return self._asked.standing

    async def unavailable(self) -> str:
        """Why the engine there is no 16-bit reference for this primary."""
        self._asked = await ask_reference(self._client, self._primary, self._their_record)
        return self._asked.problem

    async def run(self, decode: Decode, choices: Sequence[Choice]) -> Scored:
        """The exact pass, teacher forced on the engine that was asked last."""
        asked = self._asked
        result = await run_teacher_forced(self._client, asked.model, decode, choices, asked.record)
        return Scored(passes=result.passes, seconds=result.seconds, problem=result.problem)
