"""The references behind one interface: the pass inside the engine, or a 16-bit engine beside it."""

from __future__ import annotations

from collections.abc import Sequence

from kvguard.engine.client import EngineClient
from kvguard.reference.external import ask_reference, run_teacher_forced
from kvguard.reference.inside import ask_exactness, run_passes
from kvguard.reference.models import Choice, Decode
from kvguard.shadow.runner import Scored


class InEngine:
    """The reference pass inside the guarded engine: no second GPU, any fake-quantized format."""

    name = "in-engine"
    choices_possible = True

    def __init__(self, client: EngineClient, secret: str) -> None:
        self._client = client
        self._secret = secret

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
        result = await run_passes(self._client, self._secret, decode, choices)
        return Scored(passes=result.passes, seconds=result.seconds, problem=result.problem)


class External:
    """A 16-bit engine behind kvguard at a URL or socket. It stalls nothing here; adapters are not probed."""

    name = "external"
    choices_possible = False

    def __init__(self, client: EngineClient, primary_version: str) -> None:
        self._client = client
        self._primary_version = primary_version
        self._model = ""

    async def unavailable(self) -> str:
        """Why the engine there is no 16-bit reference for this primary."""
        self._model, problem = await ask_reference(self._client, self._primary_version)
        return problem

    async def run(self, decode: Decode, choices: Sequence[Choice]) -> Scored:
        """The exact pass, teacher forced on the other engine."""
        result = await run_teacher_forced(self._client, self._model, decode, choices)
        return Scored(passes=result.passes, seconds=result.seconds, problem=result.problem)
