"""The life of a guard beside an engine that somebody else started: prove it from outside, serve it, follow its restarts.

Whatever happens, the engine is left alone: it is not ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from kvguard.engine.canary import CANARIES, canary_check, send_canaries
from kvguard.engine.checkpoint_files import digest_files
from kvguard.engine.client import EngineClient
from kvguard.engine.command import requested_claims
from kvguard.engine.connectors import connectors_of
from kvguard.engine.log_file import LogFile
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence.log import LogReader
from kvguard.guard.board import Board
from kvguard.guard.drift import Drift
from kvguard.guard.file_watch import Fingerprints, fingerprints, watch_files
from kvguard.guard.last_words import write_last_words
from kvguard.guard.outside import Outside, examine, look
from kvguard.guard.presence import Presence, is_strange, not_vllm
from kvguard.guard.rewatch import DriftWatch, Verified
from kvguard.guard.run_record import Known, drift_document, post_record, record_input
from kvguard.guard.settings import Settings
from kvguard.guard.silence import questions, watch_silence
from kvguard.guard.state import Event
from kvguard.guard.stopping import Stop, drain
from kvguard.guard.surface import Surface
from kvguard.guard.verify import Evidence, asleep
from kvguard.policy.models import DriftPolicy, OnViolation, Policy
from kvguard.record.statement import Verdict
from kvguard.verdict.checks import describe, prediction_check, violates, violations
from kvguard.vocabulary import Check, CheckResult, EngineDied, ExitCode, Frozen, UsageError

log = structlog.get_logger("kvguard")
_LOOK_EVERY = 0.5
_TRY_AGAIN = 5.0
_STRANGE_ANSWERS = 3
"""So many in a row tell another server from one that stands before an engine which is still starting."""


class Target(Frozen):
    """The engine: its URL or Unix socket, and what the user says of it. `kv_bytes` are of one engine, all its ranks."""

    address: str
    api_key: str | None = None
    checkpoint: Path | None = None
    kv_bytes: int | None = None
    log: Path | None = None


class Attached:
    """Guards one engine from outside. `run` returns the exit code; `request_stop` may be called from a signal handler."""

    def __init__(
        self,
        target: Target,
        policy: Policy | None,
        settings: Settings,
        board: Board,
        surface: Surface,
        *,
        env: Mapping[str, str],
        argv: tuple[str, ...],
    ) -> None:
        """`argv` is how kvguard itself was called, for the record. Raises UsageError for a log that cannot be read."""
        self._target = target
        self._policy = policy
        self._drift_policy = policy.drift if policy is not None else DriftPolicy()
        self._on_violation = policy.on_violation if policy is not None else OnViolation.REFUSE
        self._settings = settings
        self._board = board
        self._surface = surface
        self._env = env
        self._argv = argv
        self._log = LogFile(target.log) if target.log is not None else None
        self._stop = Stop()
        self._outside = Outside()
        self._canaries: tuple[Check, ...] = ()
        self._known = Known(engine={})
        self._files: Fingerprints | None = None
        self._watch: DriftWatch | None = None

    def request_stop(self) -> None:
        """Begin to stop; a second call ends the waiting for requests."""
        self._stop.request()

    def request_changed(self, path: str, *, answered: bool) -> None:
        """A request that can change the engine came, or was answered. May be called from any thread."""
        if self._watch is not None:
            self._watch.request_changed(path, answered=answered)

    async def run(self) -> int:
        """Live the whole life. Returns an exit code of `ExitCode`."""
        self._board.update(on_violation=str(self._on_violation))
        async with EngineClient(self._target.address, self._target.api_key) as client:
            code = await self._unless_stopped(self._live(client))
            if code is not None:
                return code
        if self._board.status.state in ("serving", "drifted"):
            await drain(self._board, self._surface, self._settings, self._stop, reserve=0.0)
            return ExitCode.CLEAN
        refused = self._board.status.state == "refused"
        self._board.move(Event.STOP_REQUESTED, self._board.status.reason or "stopped")
        return ExitCode.POLICY_VIOLATION if refused else ExitCode.CLEAN

    async def _unless_stopped(self, life: Coroutine[Any, Any, int]) -> int | None:
        living, stopping = asyncio.create_task(life), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._stop.asked else living.result()
        finally:
            for task in (living, stopping):
                task.cancel()
            await asyncio.gather(living, stopping, return_exceptions=True)

    # --- its runs, one after the other ---

    async def _live(self, client: EngineClient) -> int:
        """Guard one run of the engine after the other, until one cannot be guarded."""
        limit = self._settings.start_timeout
        while True:
            presence = await self._healthy(client, limit)
            if presence is None:
                return self._ended(limit)
            self._board.move(Event.ENGINE_HEALTHY, "the engine answers; its KV cache is being verified")
            try:
                verified = await self._prove(client)
                lost = await self._lost_meanwhile(client, verified)
            except UsageError as error:  # a checkpoint that cannot be read: at first the user's to mend, later to wait for
                if self._watch is None:
                    raise
                lost = str(error)
                await asyncio.sleep(_TRY_AGAIN)
            if not lost:
                code = await self._verdict(client, presence, verified)
                if code is not None:
                    return code
                lost = await self._follow(client, presence)
            self._board.move(Event.ENGINE_LOST, f"the engine was lost: {lost}; waiting for it")
            log.warning("the engine was lost; waiting for it", because=lost)
            if self._log is not None:
                self._log.start_again()
            if self._watch is not None:
                limit = self._settings.restart_timeout

    async def _healthy(self, client: EngineClient, limit: float | None) -> Presence | None:
        """Wait until it answers /health; None when that takes longer than `limit` seconds.

        UsageError, before the first run, for a server that keeps answering what vLLM's /health never does.
        """
        presence, said, strange = Presence(client), "", 0
        try:
            async with asyncio.timeout(limit):
                while not (seen := await presence.look()).answers:
                    strange = strange + 1 if is_strange(seen.status) else 0
                    if strange >= _STRANGE_ANSWERS and self._watch is None:
                        raise not_vllm(self._target.address, seen.problem)
                    if seen.problem and seen.problem != said:
                        log.info("waiting for the engine to be healthy", because=seen.problem)
                        said = seen.problem
                    await asyncio.sleep(_LOOK_EVERY)
        except TimeoutError:
            return None
        return presence

    def _ended(self, limit: float | None) -> int:
        words = f"no healthy engine at {self._target.address} within {limit or 0:g} s"
        served = self._watch is not None
        reason = f"the engine died while it was served: {words}" if served else f"engine failed to start: {words}"
        self._board.move(Event.ENGINE_ENDED, reason)
        log.error("engine died" if served else "engine failed to start", reason=words)
        write_last_words(self._settings.termination_log, reason)
        return ExitCode.ENGINE_DIED if served else ExitCode.ENGINE_FAILED_TO_START

    async def _lost_meanwhile(self, client: EngineClient, verified: Verified) -> str:
        """How the engine was lost while it was verified: that, and not what could not be read, is then the finding."""
        if not violates(verified.checks):
            return ""
        health = await client.health()
        return "" if health.ok else f"while it was verified: {health.problem}"

    async def _verdict(self, client: EngineClient, presence: Presence, verified: Verified) -> int | None:
        """Serve or hold (None), or an exit code. On a later run it is drift, where it is another than what was established."""
        if self._watch is None:
            return self._opened(client, verified)
        while not self._watch.resume(verified):
            await asyncio.sleep(_TRY_AGAIN)
            if (await presence.look()).lost:
                break
            verified = await self._examine(client)
        return None

    async def _prove(self, client: EngineClient) -> Verified:
        """Find out what this run of the engine is, see tokens come out, and read the evidence."""
        target = self._target
        if self._log is not None and (problem := self._log.poll()):
            log.warning("evidence could not be read", source=problem)
        self._outside = seen = await look(
            client, checkpoint=target.checkpoint, given_bytes=target.kv_bytes, log=self._reader, env=self._env
        )
        self._files = fingerprints(seen.directory) if seen.directory is not None else None
        for note in seen.notes:
            log.warning("not known from outside", what=note)
        self._known = _known(seen)
        self._board.update(engine_version=seen.version or "", model=seen.model or target.address)
        declared, command = seen.declared, seen.command
        canaries = await send_canaries(
            client,
            seen.model,
            chat=declared is not None and declared.has_chat_template,
            window=declared.geometry.sliding_window if declared is not None else None,
            logits="logits" in ((command.value("--logprobs-mode") if command else None) or ""),
            max_model_len=seen.max_model_len,
        )
        dummy = command is not None and command.value("--load-format") == "dummy"
        self._canaries = (canary_check(canaries, dummy_weights=dummy),)
        verified = await self._examine(client)
        for problem in verified.evidence.problems:
            log.warning("evidence could not be read", source=problem)
        return verified

    async def _examine(self, client: EngineClient) -> Verified:
        seen = self._outside
        evidence, judged = await examine(client, seen, self._policy, self._reader)
        checks = (*self._canaries, *judged)
        if seen.prediction is not None:
            checks = (*checks, prediction_check(seen.prediction.dtype, evidence.effective))
        return Verified(evidence=evidence, checks=checks, engine_version=seen.version or "")

    async def _again(self, client: EngineClient) -> Verified | str:
        """One more verification of the same run."""
        if self._log is not None and (problem := self._log.poll()):
            log.warning("evidence could not be read", source=problem)
        return await asleep(client) or await self._examine(client)

    @property
    def _reader(self) -> LogReader:
        return self._log.reader if self._log is not None else LogReader()

    # --- verdicts ---

    def _opened(self, client: EngineClient, verified: Verified) -> int | None:
        """The first verdict: serve, hold (None as well), or the exit code."""
        checks, evidence = verified.checks, verified.evidence
        blocking = violations(checks)
        garbage = next((check for check in blocking if check.name == CANARIES), None)
        contradicted = any(check.result is CheckResult.FAIL and check is not garbage for check in blocking)
        self._board.update(effective=evidence.effective, checks=checks, last_verified=time.time())
        if blocking and self._on_violation is not OnViolation.WARN and (contradicted or garbage is None):
            return self._refused(verified, blocking)
        if garbage is not None:
            reason = f"engine computes garbage: {describe(garbage)}"
            self._record(verified, "refuse", describe(garbage))
            self._board.move(Event.VERDICT_REFUSES, reason)
            log.error("engine failed to start", reason=describe(garbage))
            write_last_words(self._settings.termination_log, reason)
            return ExitCode.ENGINE_FAILED_TO_START
        for check in blocking:
            log.warning("policy violated, serving all the same (on_violation: warn)", check=describe(check))
        self._record(verified, "warn" if blocking else "serve", None)
        self._board.move(Event.VERDICT_ALLOWS, "serving")
        effective = verified.effective
        log.info(
            "serving",
            kv_cache_dtype=effective.dtype,
            kv_scales=str(effective.scales),
            confidence=str(effective.confidence),
            kv_tokens=effective.kv_tokens,
            record=self._board.status.record_path,
        )
        every = self._settings.reverify
        verify = partial(self._again, client)
        self._watch = DriftWatch(self._board, verified, verify, self._record_drift, self._drift_policy, every=every)
        return None

    def _refused(self, verified: Verified, blocking: tuple[Check, ...]) -> int | None:
        """Say why and record it: an exit code, or None to hold the gate closed until another engine runs there."""
        lines = [describe(check) for check in blocking]
        summary = "; ".join(lines)
        holds = self._on_violation is OnViolation.HOLD
        self._record(verified, "hold" if holds else "refuse", summary)
        self._board.move(Event.VERDICT_REFUSES, f"refused by policy: {summary}")
        for line in lines:
            log.error("refused", check=line)
        log.info("run record", path=self._board.status.record_path)
        write_last_words(self._settings.termination_log, f"refused by policy: {summary}")
        if not holds:
            return ExitCode.POLICY_VIOLATION
        log.warning("holding: the engine is left as it is, and nothing is served until another one runs there")
        return None

    # --- while it serves ---

    async def _follow(self, client: EngineClient, presence: Presence) -> str:
        """Watch this run of the engine until it is lost; returns how."""
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._present(presence))]
        if self._watch is not None:
            tasks.append(asyncio.create_task(self._watch.run()))
            tasks.append(asyncio.create_task(watch_silence(self._board, *questions(client))))
            if self._outside.directory is not None:
                files = watch_files(self._outside.directory, self._files, self._watch.ask, self._settings.refresh)
                tasks.append(asyncio.create_task(files))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return str(tasks[0].result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _present(self, presence: Presence) -> str:
        while True:
            seen = await presence.look()
            if seen.lost:
                return seen.lost
            if not self._surface.alive:
                raise EngineDied("kvguard's own API port failed")
            if seen.answers and self._log is not None:
                self._log.poll()
                self._log.mark()
            self._board.update(unready=self._watch.unready if self._watch is not None else "")
            if presence.page is not None:
                figures = metrics_evidence.gauges(presence.page, self._board.status.effective, None)
                self._board.update(gauges=figures)
            await asyncio.sleep(min(self._settings.refresh, 1.0))

    # --- records ---

    def _record_drift(self, found: Verified, drift: Drift) -> None:
        self._record(found, "warn" if violates(found.checks) else "serve", None, drift=drift)

    def _record(self, found: Verified, verdict: Verdict, refusal: str | None, *, drift: Drift | None = None) -> None:
        evidence: Evidence = found.evidence
        given = record_input(
            self._known,
            self._policy,
            changes=(),
            argv=self._argv,
            observed=evidence.claims,
            effective=evidence.effective,
            checks=found.checks,
            verdict=verdict,
            refusal=refusal,
            tensors=None,
            undigested={
                "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "engine": self._target.address,
                "model_directory": self._outside.directory,
                "problems": [*self._outside.notes, *evidence.problems],
            },
        )
        if drift is not None:
            given = given.model_copy(update={"drift": drift_document(drift.changes)})
        post_record(self._board, given, self._settings.record_directory)


def _known(seen: Outside) -> Known:
    """What is known of an engine from outside: no package, no interpreter, and its command only where its socket tells."""
    declared = seen.declared
    return Known(
        engine={"version": seen.version, "attached": True},
        digests=digest_files(seen.directory, seen.files) if seen.directory is not None and seen.files is not None else (),
        requested=requested_claims(seen.command) if seen.command is not None else (),
        declared=declared.claims if declared is not None else (),
        predicted=seen.prediction_claims,
        connectors=connectors_of(seen.command) if seen.command is not None else (),
    )
