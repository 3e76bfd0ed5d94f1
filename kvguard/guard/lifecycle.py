"""The life of a guarded engine: start it, prove it, open the gate, watch it, drain it, leave nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import structlog

from kvguard.engine.canary import CANARIES, canary_check, send_canaries
from kvguard.engine.client import EngineClient, model_cards
from kvguard.engine.plan import Plan
from kvguard.engine.process import EngineProcess, ending, reap_adopted
from kvguard.engine.run_directory import RunDirectory
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence.log import LogReader
from kvguard.evidence.replies import Limits
from kvguard.guard.board import Board
from kvguard.guard.calibrated import FirstBatch, calibrate_by_first_batch, calibration_check
from kvguard.guard.drift import Change as DriftChange
from kvguard.guard.drift import Drift
from kvguard.guard.file_watch import fingerprints, watch_files
from kvguard.guard.last_words import write_last_words
from kvguard.guard.prepare import Prepared
from kvguard.guard.reference_start import ReferenceStart
from kvguard.guard.refusals import remember
from kvguard.guard.rewatch import DriftWatch, Verified
from kvguard.guard.run_record import drift_document, post_record, record_input
from kvguard.guard.settings import Settings
from kvguard.guard.shadowing import probe_traffic
from kvguard.guard.silence import questions, watch_silence
from kvguard.guard.state import Event
from kvguard.guard.stopping import Stop, drain
from kvguard.guard.surface import Surface
from kvguard.guard.verify import Evidence, asleep, verify_engine
from kvguard.policy.models import DriftPolicy, OnRegression, OnViolation, Policy, ShadowPolicy
from kvguard.record.statement import Change, Verdict
from kvguard.verdict.checks import describe, judge, prediction_check, violates, violations
from kvguard.vocabulary import Check, CheckResult, Claim, Effective, ExitCode, UsageError

log = structlog.get_logger("kvguard")
Work = Callable[[EngineClient, str, Limits], Coroutine[Any, Any, None]]
"""Something to do with a proven engine: its client, the secret of its inside, its limits."""

_LAST_BREATH = 1.0  # seconds between an engine's first unanswered request and its end


class Guard:
    """Guards one engine. `run` returns the exit code; `request_stop` may be called from a signal handler."""

    def __init__(
        self,
        prepared: Prepared,
        plan: Plan | None,
        policy: Policy | None,
        settings: Settings,
        board: Board,
        surface: Surface,
        run_directory: RunDirectory,
        *,
        argv: tuple[str, ...],
        started: float,
        reference: ReferenceStart | None = None,
        work: Work | None = None,
        outputs: tuple[int, int] = (1, 2),
    ) -> None:
        """`started` is when kvguard itself began, on `time.monotonic`'s clock; `argv` the command as written.

        `reference` is the engine that shadow probes score with, where kvguard starts it. `work` is done with the proven
        engine instead of serving it; `outputs` are the file descriptors that the engine's log goes to.
        """
        self._work = work
        self._outputs = outputs
        self._first_batch: FirstBatch | None = None
        self._answered: tuple[Check, ...] = ()
        self._files = fingerprints(prepared.declared.directory)
        self._reference = reference
        self._prepared = prepared
        self._plan = plan
        self._policy = policy
        self._settings = settings
        self._board = board
        self._surface = surface
        self._run = run_directory
        self._argv = argv
        self._log = LogReader()
        self._stop = Stop()
        self._watching: DriftWatch | None = None
        self._times: dict[str, float] = {"before_start_s": time.monotonic() - started}
        self._on_violation = policy.on_violation if policy is not None else OnViolation.REFUSE
        self._limits = Limits()
        self._clock = time.monotonic
        self._reserve = min(settings.engine_reserve, settings.grace / 2)

    def request_stop(self) -> None:
        """Begin to stop; a second call ends the waiting for requests."""
        self._stop.request()

    def request_changed(self, path: str, *, answered: bool) -> None:
        """A request that can change the engine came, or was answered. May be called from any thread."""
        if self._watching is not None:
            self._watching.request_changed(path, answered=answered)

    async def run(self) -> int:
        """Live the engine's whole life. Returns an exit code of `ExitCode`."""
        self._board.update(
            engine_version=self._prepared.engine.version,
            model=self._prepared.command.model,
            on_violation=str(self._on_violation),
            checks=self._prepared.checks,
        )
        if violates(self._prepared.checks):
            if self._on_violation is not OnViolation.WARN:
                return await self._refuse(self._prepared.checks, None)
            self._warn(self._prepared.checks)
        assert self._plan is not None  # noqa: S101 (only a refused start has no plan)
        secrets = (*self._plan.api_keys, self._run.secret)
        engine = EngineProcess(self._plan.argv, self._plan.env, on_bytes=self._log.feed, secrets=secrets, outputs=self._outputs)
        key = self._plan.api_keys[0] if self._plan.api_keys else None
        try:
            self._run.remember_engine(engine.pid)
            log.info("engine started", pid=engine.pid, version=self._prepared.engine.full_version)
            async with EngineClient(str(self._run.socket), key) as client:
                return await self._guard(engine, client)
        finally:
            await engine.stop(self._reserve if self._stop.count < 2 else 0.1)

    async def _guard(self, engine: EngineProcess, client: EngineClient) -> int:
        """From the started engine to the end: prove it unless it ends or we are stopped before, then serve it."""
        proving = asyncio.create_task(self._prove(client))
        stopping = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(engine.wait())
        try:
            await asyncio.wait({proving, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.asked:
                return self._stopped_early()
            if not proving.done():
                return await self._failed_to_start(engine)
            proven = proving.result()
            if proven is None:
                return self._fail(f"not healthy within {self._settings.start_timeout:g} s of its start; see its log above")
            evidence, checks = proven
            # An engine that dies of its first requests leaves them unanswered first: its end is the better reason.
            if violates(checks) and not (await client.health()).ok:
                await asyncio.wait({ended}, timeout=_LAST_BREATH)
                if ended.done():
                    return await self._failed_to_start(engine)
        finally:
            for task in (proving, stopping, ended):
                task.cancel()
            await asyncio.gather(proving, stopping, ended, return_exceptions=True)
        return await self._decide(engine, client, evidence, checks)

    async def _decide(self, engine: EngineProcess, client: EngineClient, evidence: Evidence, checks: tuple[Check, ...]) -> int:
        """Refuse, fail the start, or serve. A policy violation explains failed canaries, and no policy excuses them."""
        blocking = violations(checks)
        garbage = next((check for check in blocking if check.name == CANARIES), None)
        warns = self._on_violation is OnViolation.WARN
        contradicted = any(check.result is CheckResult.FAIL and check is not garbage for check in blocking)
        if blocking and not warns and (contradicted or garbage is None):
            await engine.stop(self._reserve)
            if contradicted:
                remember(self._settings.refusal, [check for check in blocking if check is not garbage])
            return await self._refuse(checks, evidence)
        if garbage is not None:
            await engine.stop(self._reserve)
            self._show(evidence, checks)
            self._record(evidence, checks, "refuse", describe(garbage))
            return self._fail(describe(garbage))
        self._warn(blocking)
        self._open(evidence, checks)
        if self._work is not None:
            return await self._do(self._work(client, self._run.secret, self._limits), engine)
        first = Verified(evidence=evidence, checks=checks, engine_version=self._prepared.engine.version)
        return await self._serve(engine, client, first)

    async def _prove(self, client: EngineClient) -> tuple[Evidence, tuple[Check, ...]] | None:
        """Wait for /health, then verify; None when the engine is not healthy in time."""
        begun = self._clock()
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                while not (self._run.socket.exists() and (await client.health()).ok):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            return None
        self._times["engine_start_s"] = self._clock() - begun
        self._board.move(Event.ENGINE_HEALTHY, "the engine answers; its KV cache is being verified")
        if self._prepared.runtime is not None and self._prepared.runtime.way == "flag":
            await self._calibrate(client)
        return await self._verify(client)

    async def _calibrate(self, client: EngineClient) -> None:
        """Be the engine's first request, since only the first forward pass fixes the scales."""
        begun = self._clock()
        prepared = self._prepared
        card = next(iter(model_cards(await client.models())), {})
        name = str(card.get("id", prepared.command.model))
        first = await calibrate_by_first_batch(client, self._run.secret, name, prepared.prompts, prepared.declared)
        self._first_batch = first
        self._times["calibration_s"] = self._clock() - begun
        if first.problem:
            log.error("not calibrated", reason=first.problem)
        else:
            log.info("calibrated by the first batch", tokens=first.tokens, prompts=prepared.prompts.digest)

    def _stopped_early(self) -> int:
        self._board.move(Event.STOP_REQUESTED, "stopped while starting")
        log.info("stopped while the engine was starting")
        return ExitCode.CLEAN

    async def _failed_to_start(self, engine: EngineProcess) -> int:
        code = await engine.wait()
        await engine.clear()  # which also reads the rest of its log
        said = self._last_error()
        return self._fail(
            f"ended before it was ready, with {ending(code)}; " + (f"it said: {said}" if said else "see its log above")
        )

    def _fail(self, reason: str) -> int:
        self._board.move(Event.ENGINE_ENDED, f"the engine failed to start: {reason}")
        log.error("engine failed to start", reason=reason)
        self._last_words(f"engine failed to start: {reason}")
        return ExitCode.ENGINE_FAILED_TO_START

    def _last_error(self) -> str:
        """The last error in the engine's log, whose last line may have no end; "" when there is none."""
        for stream in ("stdout", "stderr"):
            self._log.close(stream)
        return self._log.cause_of_death() or next(reversed(self._log.last_errors()), "")

    async def _verify(self, client: EngineClient) -> tuple[Evidence, tuple[Check, ...]]:
        """Canaries first, then evidence, so that a one-shot calibration has seen tokens before it is read."""
        prepared = self._prepared
        declared = prepared.declared
        begun = self._clock()
        card = next(iter(model_cards(await client.models())), {})
        length = card.get("max_model_len")
        canaries = await send_canaries(
            client,
            card.get("id", prepared.command.model),
            chat=declared.has_chat_template,
            window=declared.geometry.sliding_window,
            logits="logits" in (prepared.command.value("--logprobs-mode") or ""),
            max_model_len=length if isinstance(length, int) else declared.max_position_embeddings,
        )
        dummy = prepared.command.value("--load-format") == "dummy"
        self._times["canaries_s"] = self._clock() - begun
        begun = self._clock()
        self._answered = (canary_check(canaries, dummy_weights=dummy),)
        evidence, checks = await self._examine(client)
        for problem in evidence.problems:
            log.warning("evidence could not be read", source=problem)
        self._times["evidence_s"] = self._clock() - begun
        if evidence.tensors and evidence.tensors.replies:
            self._limits = evidence.tensors.replies[0].limits
        return evidence, checks

    async def _examine(self, client: EngineClient) -> tuple[Evidence, tuple[Check, ...]]:
        """Read every source and judge it. The canaries' check is that of the start."""
        prepared, policy = self._prepared, self._policy
        evidence = await verify_engine(
            client,
            secret=self._run.secret,
            log=self._log,
            version=prepared.engine.version,
            declared=prepared.declared,
            prediction=prepared.resolution.prediction,
            calculated=prepared.calculated,
            calibrated=prepared.runtime is not None and bool(prepared.runtime.overlay),
            allowed_sixteen_bit=(
                policy.kv_cache.skip_layers if policy is not None else prepared.command.values("--kv-cache-dtype-skip-layers")
            ),
        )
        checks = (
            *self._answered,
            *judge(
                policy,
                evidence.effective,
                model_dtype=_model_dtype(evidence) or prepared.resolution.model_dtype,
                engine_version=prepared.engine.version or None,
                declared=prepared.declared,
            ),
            prediction_check(prepared.resolution.prediction.dtype, evidence.effective),
        )
        if self._first_batch is not None:
            checks = (*checks, calibration_check(self._first_batch, evidence.tensors, prepared.prompts))
        return evidence, checks

    async def _again(self, client: EngineClient) -> Verified | str:
        """One verification while serving; a sleeping engine is not asked."""
        if reason := await asleep(client):
            return reason
        evidence, checks = await self._examine(client)
        return Verified(evidence=evidence, checks=checks, engine_version=self._prepared.engine.version)

    def _open(self, evidence: Evidence, checks: tuple[Check, ...]) -> None:
        """Write the record, then open the gate."""
        verdict: Verdict = "warn" if violates((*self._prepared.checks, *checks)) else "serve"
        self._record(evidence, checks, verdict, None)
        effective = evidence.effective
        self._show(evidence, checks)
        what = "serving" if self._work is None else "proven"
        self._board.move(Event.VERDICT_ALLOWS, what)
        log.info(
            what,
            kv_cache_dtype=effective.dtype,
            kv_scales=str(effective.scales),
            confidence=str(effective.confidence),
            kv_tokens=effective.kv_tokens,
            record=self._board.status.record_path,
        )

    def _show(self, evidence: Evidence, checks: tuple[Check, ...]) -> None:
        self._board.update(effective=evidence.effective, checks=checks, last_verified=time.time())

    def _record_drift(self, found: Verified, drift: Drift) -> None:
        verdict: Verdict = "warn" if violates(found.checks) else "serve"
        self._record(found.evidence, found.checks, verdict, None, drift=drift.changes)

    def _record(
        self,
        evidence: Evidence | None,
        checks: tuple[Check, ...],
        verdict: Verdict,
        refusal: str | None,
        *,
        drift: tuple[DriftChange, ...] = (),
    ) -> None:
        """Write the run record. Failing to write it is reported and closes nothing that is already open."""
        begun = self._clock()
        observed: tuple[Claim, ...] = evidence.claims if evidence else ()
        plan = self._plan
        given = record_input(
            self._prepared,
            self._policy,
            changes=tuple(Change(**change.model_dump()) for change in plan.changes) if plan else (),
            argv=self._argv,
            observed=observed,
            effective=evidence.effective if evidence else Effective(),
            checks=checks,
            verdict=verdict,
            refusal=refusal,
            tensors=evidence.tensors if evidence else None,
            undigested={},
        )
        times = self._times
        times["added_s"] = times["before_start_s"] + times.get("evidence_s", 0.0) + (self._clock() - begun)
        more = {"undigested": self._undigested(evidence), "drift": drift_document(drift)}
        post_record(self._board, given.model_copy(update=more), self._settings.record_directory)

    def _undigested(self, evidence: Evidence | None) -> dict[str, Any]:
        return {
            "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "timings": {name: round(value, 3) for name, value in self._times.items()},
            "engine_executable": self._prepared.engine.executable,
            "model_directory": self._prepared.declared.directory,
            "hub": self._prepared.published and self._prepared.published.model_dump(mode="json"),
            "problems": list(evidence.problems) if evidence else [],
            "degraded": list(self._prepared.degraded),
        }

    def _warn(self, checks: tuple[Check, ...]) -> None:
        for check in violations(checks):
            log.warning("policy violated, serving all the same (on_violation: warn)", check=describe(check))

    async def _refuse(self, checks: tuple[Check, ...], evidence: Evidence | None) -> int:
        """Say why, record it, and end (refuse) or stay up unready (hold)."""
        lines = [describe(check) for check in violations(checks)]
        summary = "; ".join(lines)
        self._record(evidence, checks, "hold" if self._on_violation is OnViolation.HOLD else "refuse", summary)
        if evidence is not None:
            self._show(evidence, checks)
        self._board.move(Event.VERDICT_REFUSES, f"refused by policy: {summary}")
        for line in lines:
            log.error("refused", check=line)
        log.info("run record", path=self._board.status.record_path)
        self._last_words(f"refused by policy: {summary}")
        if self._on_violation is OnViolation.HOLD:
            log.warning("holding: no engine runs; the record and metrics stay readable until SIGTERM")
            await self._stop.wait()
        self._board.move(Event.STOP_REQUESTED, self._board.status.reason)
        return ExitCode.POLICY_VIOLATION

    def _last_words(self, line: str) -> None:
        write_last_words(self._settings.termination_log, line)

    async def _do(self, work: Coroutine[Any, Any, None], engine: EngineProcess) -> int:
        """Do the work that this engine was started for. What it raises ends the engine, and is raised again."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(engine.wait())
        try:
            await asyncio.wait({working, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return await self._died(engine, "")
            if working.done():
                working.result()
            self._board.move(Event.STOP_REQUESTED, "done" if working.done() else "stopped before the work was done")
            self._board.move(Event.STOPPED, self._board.status.reason)
            return ExitCode.CLEAN
        finally:
            for task in (working, stopping, ended):
                task.cancel()
            await asyncio.gather(working, stopping, ended, return_exceptions=True)

    async def _serve(self, engine: EngineProcess, client: EngineClient, first: Verified) -> int:
        reproving = asyncio.create_task(self._reprove(client, first))
        shadowing = asyncio.create_task(self._probes(client))
        watching = asyncio.create_task(self._watch(client))
        listening = asyncio.create_task(watch_silence(self._board, *questions(client)))
        stopping = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(engine.wait())
        try:
            await asyncio.wait({watching, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() or watching.done():
                return await self._died(engine, watching.result() if watching.done() else "")
            shadowing.cancel()
            reproving.cancel()
            listening.cancel()
            draining = asyncio.create_task(drain(self._board, self._surface, self._settings, self._stop, reserve=self._reserve))
            await asyncio.wait({draining, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                draining.cancel()
                return await self._died(engine, "")
            return ExitCode.CLEAN
        finally:
            tasks = (watching, stopping, ended, shadowing, reproving, listening)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reprove(self, client: EngineClient, first: Verified) -> None:
        """Verify again on a timer, after requests that change the engine, and when the checkpoint's files change."""
        policy = self._policy.drift if self._policy is not None else DriftPolicy()
        every = self._settings.reverify
        watch = DriftWatch(self._board, first, lambda: self._again(client), self._record_drift, policy, every=every)
        self._watching = watch
        files = watch_files(self._prepared.declared.directory, self._files, watch.ask, self._settings.refresh)
        await asyncio.gather(watch.run(), files)

    def _probes(self, client: EngineClient) -> Coroutine[Any, Any, None]:
        return probe_traffic(
            client,
            self._run.secret,
            self._settings,
            self._board,
            self._surface,
            limits=self._limits,
            model=self._prepared.command.model,
            launch=self._reference,
            run_directory=self._run,
            accepted=self._policy.shadow if self._policy is not None else ShadowPolicy(),
        )

    async def _died(self, engine: EngineProcess, seen: str) -> int:
        """The engine ended by itself, or was `seen` to be dead."""
        code = engine.exit_code
        said = self._last_error()
        reason = f"the engine {seen if code is None else f'ended with {ending(code)}'} while serving" + (
            f"; its last error: {said}" if said else ""
        )
        self._board.move(Event.ENGINE_ENDED, reason)
        log.error("engine died", reason=reason)
        self._last_words(reason)
        await engine.clear()
        # Streams that were cut still owe their clients an error event.
        await asyncio.to_thread(self._surface.wait_idle, 2.0)
        return ExitCode.ENGINE_DIED

    async def _watch(self, client: EngineClient) -> str:
        """Refresh figures until the engine says it is dead (503 from /health); returns how that was seen."""
        unhealthy = 0
        while True:
            # 503 is vLLM's word for a dead engine; no answer at all may only be a busy one.
            self._board.update(unready=self._regression() or (self._watching.unready if self._watching else ""))
            if not self._surface.alive:
                return "goes on, but kvguard's own API port failed"
            unhealthy = unhealthy + 1 if (await client.health()).status == 503 else 0
            if unhealthy >= 3:
                return "answered /health with an error three times"
            page = (await client.metrics_text()).body or b""
            try:
                parsed = metrics_evidence.parse_metrics(page)
                self._board.update(
                    gauges=metrics_evidence.gauges(parsed, self._board.status.effective, self._limits.max_num_seqs)
                )
            except UsageError:
                pass  # no page, or not one: the last figures stay
            except Exception as error:  # a bug in reading figures must not end serving
                log.warning("the engine's figures could not be read", error=repr(error))
            reap_adopted()  # we inherit every orphan, and as a container's first process all of them
            await asyncio.sleep(self._settings.refresh)

    def _regression(self) -> str:
        """Why a shown regression makes this engine unready, "" when it does not by policy."""
        shadow, policy = self._board.shadow, self._policy
        if shadow is None or policy is None or policy.shadow.on_regression is not OnRegression.UNREADY:
            return ""
        report = shadow.report
        return f"quality regression: {report.reason}" if report.state == "regression" else ""


def _model_dtype(evidence: Evidence) -> str | None:
    """The model's own dtype as the workers state it."""
    if evidence.tensors is None:
        return None
    return next((reply.model_dtype for reply in evidence.tensors.replies if reply.model_dtype), None)
