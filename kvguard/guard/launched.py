"""The launched reference: a second engine of the same command with a 16-bit KV cache, kept running beside the primary.

It listens on a socket in the run directory, is proven as the primary is, and must equal it in all but the cache by the
two records. It is started once the primary serves, started again when it ends, and ended with the primary. Nothing
about it concerns a client: without it, probes wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from kvguard.engine.canary import canary_check, send_canaries
from kvguard.engine.client import EngineClient
from kvguard.engine.process import EngineProcess, ending
from kvguard.engine.run_directory import RunDirectory
from kvguard.evidence.log import LogReader
from kvguard.guard.reference_start import NAME, SIXTEEN_BIT, ReferenceStart
from kvguard.guard.run_record import record_input
from kvguard.guard.verify import Evidence, verify_engine
from kvguard.record.build import build_record
from kvguard.record.statement import Change
from kvguard.reference.external import bases_and_adapters, equal_by_record, run_teacher_forced
from kvguard.reference.models import Choice, Decode, Standing
from kvguard.shadow.references import Scored
from kvguard.verdict.checks import describe, judge, violations
from kvguard.vocabulary import Check, KvguardError

log = structlog.get_logger("kvguard")

START_LIMIT = 1800.0
"""Seconds that the reference may take to become healthy, where the primary has no limit."""

_STARTING = "the reference engine is starting"
_PAUSE_FIRST, _PAUSE_MOST = 5.0, 300.0  # seconds before it is started again; the pause doubles with each failure
_GOOD_LIFE = 600.0  # seconds of service after which the pauses begin anew
_STOP_GRACE = 2.0  # seconds: it has nothing to finish
_LAST_BREATH = 1.0  # seconds between an engine's first unanswered request and its end
_LOOK_EVERY = 5.0
_DEAD_AFTER = 3  # looks that say so: 503 is vLLM's word for a dead engine
_HUNG_AFTER = 12  # looks without an answer, each of up to 10 s


class Refused(Exception):
    """The started engine is no reference, and would be none if it were started again."""


class LaunchedReference:
    """A reference engine of our own. `keep` runs it; the rest is asked by shadow probes, on the same loop."""

    name = "launched"
    choices_possible = False
    comes_and_goes = True

    def __init__(
        self,
        start: ReferenceStart,
        run_directory: RunDirectory,
        primary_record: Mapping[str, Any],
        *,
        start_limit: float | None = None,
        pause: float = _PAUSE_FIRST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start_limit` is in seconds to the first healthy answer, `pause` in seconds before the first restart."""
        self._clock = clock
        self._start = start
        self._run = run_directory
        self._socket = run_directory.path / f"{NAME}.sock"
        self._primary_record = primary_record
        self._limit = start_limit or START_LIMIT
        self._pause = pause
        self._client: EngineClient | None = None
        self._model = ""
        self._problem = _STARTING
        self._standing = Standing(absent=True)

    # ---- as a reference

    @property
    def standing(self) -> Standing:
        """What it is now."""
        return self._standing

    async def unavailable(self) -> str:
        """Why it cannot score now, "" when it can."""
        return self._problem

    async def run(self, decode: Decode, choices: Sequence[Choice]) -> Scored:
        """The exact pass, teacher forced on it."""
        if self._client is None:
            return Scored(problem=self._problem)
        result = await run_teacher_forced(self._client, self._model, decode, choices)
        return Scored(passes=result.passes, seconds=result.seconds, problem=result.problem)

    # ---- its life

    async def keep(self) -> None:
        """Run the engine until cancelled, starting it again when it ends; it is ended with this call, however that ends."""
        pause = self._pause
        while True:
            begun = self._clock()
            try:
                why = await self._live()
            except Refused as refused:
                self._away(str(refused), absent=False)
                log.error("reference engine refused; it is not started again", reason=str(refused))
                return
            except KvguardError as error:
                why = str(error)
            except Exception as error:  # a bug here must not end serving, nor be silent
                where = "".join(traceback.format_tb(error.__traceback__))
                self._away(f"keeping the reference engine ended unexpectedly ({type(error).__name__})", absent=False)
                log.error("reference engine", error=type(error).__name__, traceback=where)
                return
            if self._clock() - begun > _GOOD_LIFE:
                pause = self._pause
            self._away(f"the reference engine {why}; it is started again")
            log.warning("reference engine away", reason=why, restart_in_s=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_MOST)

    async def _live(self) -> str:
        """One life of the engine; returns how it ended, after "the reference engine …"."""
        start, reader = self._start, LogReader()
        self._socket.unlink(missing_ok=True)  # vLLM cannot bind where an engine that was killed left its own
        self._away(_STARTING)
        engine = EngineProcess(
            start.plan.argv,
            start.plan.env,
            on_bytes=reader.feed,
            secrets=(*start.plan.api_keys, self._run.secret),
            outputs=(2, 2),
            prefix=f"{NAME} | ".encode(),
        )
        ended = asyncio.create_task(engine.wait())
        try:
            self._run.remember_engine(engine.pid, NAME)
            log.info("reference engine started", pid=engine.pid)
            async with EngineClient(str(self._socket), start.key) as client:
                if not await _unless(ended, self._healthy(client)):
                    return await _last_words(engine, reader) if ended.done() else f"was not healthy within {self._limit:g} s"
                if not await _unless(ended, self._prove(client, reader)):
                    await asyncio.wait({ended}, timeout=_LAST_BREATH)
                    return await _last_words(engine, reader)
                self._client, self._problem = client, ""
                log.info("reference engine ready", pid=engine.pid, equality=self._standing.equality)
                why = await _unless(ended, _watch(client))
                return why or await _last_words(engine, reader)
        finally:
            self._client = None
            self._problem = self._problem or "the reference engine is gone"
            ended.cancel()
            await surely(engine.stop(_STOP_GRACE))
            self._socket.unlink(missing_ok=True)

    def _away(self, why: str, *, absent: bool = True) -> None:
        self._client, self._problem, self._standing = None, why, Standing(absent=absent)

    async def _healthy(self, client: EngineClient) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limit):
                while not (self._socket.exists() and (await client.health()).ok):
                    await asyncio.sleep(0.2)
                return True
        return False

    async def _prove(self, client: EngineClient, reader: LogReader) -> bool:
        """The engine answers well, is proven 16-bit, and equals the primary by the two records; else Refused."""
        prepared = self._start.prepared
        bases, adapters = bases_and_adapters(await client.models())
        card = bases[0] if bases else {}
        length = card.get("max_model_len")
        self._model = str(card.get("id", prepared.command.model))
        canaries = await send_canaries(
            client,
            self._model,
            chat=prepared.declared.has_chat_template,
            window=prepared.declared.geometry.sliding_window,
            max_model_len=length if isinstance(length, int) else prepared.declared.max_position_embeddings,
        )
        evidence = await verify_engine(
            client,
            secret=self._run.secret,
            log=reader,
            version=prepared.engine.version,
            declared=prepared.declared,
            prediction=prepared.resolution.prediction,
            calculated=False,
            allowed_sixteen_bit=(),
        )
        dtypes = [reply.model_dtype for reply in evidence.tensors.replies if reply.model_dtype] if evidence.tensors else []
        checks = (
            canary_check(canaries, dummy_weights=prepared.command.value("--load-format") == "dummy"),
            *judge(
                SIXTEEN_BIT,
                evidence.effective,
                model_dtype=dtypes[0] if dtypes else prepared.resolution.model_dtype,
                engine_version=prepared.engine.version or None,
                declared=prepared.declared,
            ),
        )
        if not (await client.health()).ok:
            return False  # it died of this, and says why itself
        if problems := [describe(check) for check in violations(checks)]:
            raise Refused(f"the reference engine is not proven 16-bit: {'; '.join(problems)}")
        equality, problem = equal_by_record(self._primary_record, self._record(evidence, checks))
        if problem:
            raise Refused(f"the reference engine {problem}")
        self._standing = Standing(equality=equality, adapters=adapters, max_tokens=length if isinstance(length, int) else None)
        return True

    def _record(self, evidence: Evidence, checks: tuple[Check, ...]) -> dict[str, Any]:
        """The reference's run record. It is compared, and kept in memory only: the newest on disk is the primary's."""
        start = self._start
        given = record_input(
            start.prepared,
            SIXTEEN_BIT,
            changes=tuple(Change(**change.model_dump()) for change in start.plan.changes),
            argv=start.argv,
            observed=evidence.claims,
            effective=evidence.effective,
            checks=checks,
            verdict="serve",
            refusal=None,
            tensors=evidence.tensors,
            undigested={},
        )
        return build_record(given)


@contextlib.asynccontextmanager
async def launched(reference: LaunchedReference) -> AsyncIterator[LaunchedReference]:
    """The reference, its engine kept while in this block and ended after it."""
    keeping = asyncio.create_task(reference.keep())
    try:
        yield reference
    finally:
        keeping.cancel()
        await surely(_settled(keeping))


async def surely(ending_well: Coroutine[Any, Any, Any]) -> None:
    """Await to the end, whatever cancels us meanwhile; a cancellation is raised afterwards."""
    task, cancelled = asyncio.create_task(ending_well), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


async def _settled(task: asyncio.Task[Any]) -> None:
    await asyncio.gather(task, return_exceptions=True)


async def _unless(ended: asyncio.Task[int], work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns; None when the engine ends before."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        await _settled(working)


async def _watch(client: EngineClient) -> str:
    """Returns how the engine was seen to be dead while its process lives."""
    dead = silent = 0
    while dead < _DEAD_AFTER and silent < _HUNG_AFTER:
        await asyncio.sleep(_LOOK_EVERY)
        answer = await client.health()
        dead = dead + 1 if answer.status == 503 else 0
        silent = silent + 1 if answer.status is None else 0
    return f"answered /health with an error {dead} times" if dead else f"did not answer /health {silent} times"


async def _last_words(engine: EngineProcess, reader: LogReader) -> str:
    """How the engine ended, or will have, in its own words."""
    code = engine.exit_code
    await engine.clear()  # which reads the rest of its log
    for stream in ("stdout", "stderr"):
        reader.close(stream)
    said = reader.cause_of_death() or next(reversed(reader.last_errors()), "")
    how = "stopped answering" if code is None else f"ended with {ending(code)}"
    return how + (f"; it said: {said}" if said else "")
