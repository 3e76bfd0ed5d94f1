"""The life of a guarded engine: start it, prove it, open the gate, watch it, drain it, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
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
from kvguard.guard.prepare import Prepared
from kvguard.guard.run_record import record_input
from kvguard.guard.settings import Settings
from kvguard.guard.shadowing import probe_traffic
from kvguard.guard.state import Event
from kvguard.guard.surface import Surface
from kvguard.guard.verify import Evidence, verify_engine
from kvguard.policy.models import OnRegression, OnViolation, Policy, ShadowPolicy
from kvguard.record.build import build_record
from kvguard.record.digest import content_digest
from kvguard.record.statement import Change, Verdict
from kvguard.record.store import write_record
from kvguard.verdict.checks import describe, judge, prediction_check, violates, violations
from kvguard.vocabulary import Check, CheckResult, Claim, Effective, ExitCode, UsageError

log = structlog.get_logger("kvguard")
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
    ) -> None:
        """`started` is when kvguard itself began, on `time.monotonic`'s clock; `argv` the command as written."""
        self._prepared = prepared
        self._plan = plan
        self._policy = policy
        self._settings = settings
        self._board = board
        self._surface = surface
        self._run = run_directory
        self._argv = argv
        self._log = LogReader()
        self._stops = 0
        self._stop = asyncio.Event()
        self._times: dict[str, float] = {"before_start_s": time.monotonic() - started}
        self._on_violation = policy.on_violation if policy is not None else OnViolation.REFUSE
        self._limits = Limits()
        self._clock = time.monotonic
        self._reserve = min(settings.engine_reserve, settings.grace / 2)

    def request_stop(self) -> None:
        """Begin to stop; a second call ends the waiting for requests."""
        self._stops += 1
        self._stop.set()

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
        engine = EngineProcess(self._plan.argv, self._plan.env, on_bytes=self._log.feed, secrets=secrets)
        key = self._plan.api_keys[0] if self._plan.api_keys else None
        try:
            self._run.remember_engine(engine.pid)
            log.info("engine started", pid=engine.pid, version=self._prepared.engine.full_version)
            async with EngineClient(str(self._run.socket), key) as client:
                return await self._guard(engine, client)
        finally:
            await engine.stop(self._reserve if self._stops < 2 else 0.1)

    async def _guard(self, engine: EngineProcess, client: EngineClient) -> int:
        """From the started engine to the end: prove it unless it ends or we are stopped before, then serve it."""
        proving = asyncio.create_task(self._prove(client))
        stopping = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(engine.wait())
        try:
            await asyncio.wait({proving, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
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
            return await self._refuse(checks, evidence)
        if garbage is not None:
            await engine.stop(self._reserve)
            self._show(evidence, checks)
            self._record(evidence, checks, "refuse", describe(garbage))
            return self._fail(describe(garbage))
        self._warn(blocking)
        self._open(evidence, checks)
        return await self._serve(engine, client)

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
        return await self._verify(client)

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
        prepared, policy = self._prepared, self._policy
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
        typed = prepared.command.values("--kv-cache-dtype-skip-layers")
        evidence = await verify_engine(
            client,
            secret=self._run.secret,
            log=self._log,
            version=prepared.engine.version,
            declared=declared,
            prediction=prepared.resolution.prediction,
            calculated=prepared.command.present("--calculate-kv-scales"),
            allowed_sixteen_bit=policy.kv_cache.skip_layers if policy is not None else typed,
        )
        for problem in evidence.problems:
            log.warning("evidence could not be read", source=problem)
        checks = (
            canary_check(canaries, dummy_weights=dummy),
            *judge(
                policy,
                evidence.effective,
                model_dtype=_model_dtype(evidence) or prepared.resolution.model_dtype,
                engine_version=prepared.engine.version or None,
                declared=declared,
            ),
            prediction_check(prepared.resolution.prediction.dtype, evidence.effective),
        )
        self._times["evidence_s"] = self._clock() - begun
        if evidence.tensors and evidence.tensors.replies:
            self._limits = evidence.tensors.replies[0].limits
        return evidence, checks

    def _open(self, evidence: Evidence, checks: tuple[Check, ...]) -> None:
        """Write the record, then open the gate."""
        verdict: Verdict = "warn" if violates((*self._prepared.checks, *checks)) else "serve"
        self._record(evidence, checks, verdict, None)
        effective = evidence.effective
        self._show(evidence, checks)
        self._board.move(Event.VERDICT_ALLOWS, "serving")
        log.info(
            "serving",
            kv_cache_dtype=effective.dtype,
            kv_scales=str(effective.scales),
            confidence=str(effective.confidence),
            kv_tokens=effective.kv_tokens,
            record=self._board.status.record_path,
        )

    def _show(self, evidence: Evidence, checks: tuple[Check, ...]) -> None:
        self._board.update(effective=evidence.effective, checks=checks, last_verified=time.time())

    def _record(self, evidence: Evidence | None, checks: tuple[Check, ...], verdict: Verdict, refusal: str | None) -> None:
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
        given = given.model_copy(update={"undigested": self._undigested(evidence)})
        record = build_record(given)
        now = datetime.now(UTC)
        try:
            path = write_record(record, self._settings.record_directory, now.strftime("%Y%m%dT%H%M%S.%fZ"))
        except (OSError, UsageError) as error:
            log.error("run record could not be written", directory=str(self._settings.record_directory), error=str(error))
            path = None
        self._board.record = record
        self._board.claims = (
            *self._prepared.requested,
            *self._prepared.declared.claims,
            *self._prepared.resolution.prediction.claims,
            *observed,
        )
        self._board.update(record_digest=content_digest(record), record_path=str(path or ""))

    def _undigested(self, evidence: Evidence | None) -> dict[str, Any]:
        return {
            "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "timings": {name: round(value, 3) for name, value in self._times.items()},
            "engine_executable": self._prepared.engine.executable,
            "model_directory": self._prepared.declared.directory,
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
        """One line to the orchestrator's termination log."""
        path = self._settings.termination_log
        if path is None:
            return
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:  # a FIFO without a reader, say: nobody will read it
            log.warning("termination log cannot be written", path=str(path), error=error.strerror)
            return
        with contextlib.suppress(OSError), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(line[:2000] + "\n")

    async def _serve(self, engine: EngineProcess, client: EngineClient) -> int:
        shadowing = asyncio.create_task(self._probes(client))
        watching = asyncio.create_task(self._watch(client))
        stopping = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(engine.wait())
        try:
            await asyncio.wait({watching, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() or watching.done():
                return await self._died(engine, watching.result() if watching.done() else "")
            shadowing.cancel()
            draining = asyncio.create_task(self._drain())
            await asyncio.wait({draining, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                draining.cancel()
                return await self._died(engine, "")
            return ExitCode.CLEAN
        finally:
            for task in (watching, stopping, ended, shadowing):
                task.cancel()
            await asyncio.gather(watching, stopping, ended, shadowing, return_exceptions=True)

    def _probes(self, client: EngineClient) -> Coroutine[Any, Any, None]:
        return probe_traffic(
            client,
            self._run.secret,
            self._settings,
            self._board,
            self._surface,
            limits=self._limits,
            model=self._prepared.command.model,
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
            self._board.update(unready=self._regression())
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

    async def _drain(self) -> None:
        """Unready at once; accept while routers take note; then finish what is in flight within the grace."""
        begun = self._clock()
        settings = self._settings
        self._board.move(Event.STOP_REQUESTED, "draining")
        log.info("draining", settle_s=settings.settle, grace_s=settings.grace)
        deadline = begun + settings.grace - self._reserve
        settled = min(begun + settings.settle, deadline)
        while self._stops < 2 and self._clock() < settled:
            await asyncio.sleep(0.05)
        self._surface.stop_accepting()
        idle = False
        while not idle and self._stops < 2 and self._clock() < deadline:
            idle = await asyncio.to_thread(self._surface.wait_idle, 0.1)
        if not idle and not self._surface.wait_idle(0):
            why = "a second signal" if self._stops > 1 else "the grace period is over"
            log.warning("requests in flight are cut off", because=why, grace_s=settings.grace)
        self._board.move(Event.STOPPED, "stopped")
        log.info("drained", seconds=round(self._clock() - begun, 2))


def _model_dtype(evidence: Evidence) -> str | None:
    """The model's own dtype as the workers state it."""
    if evidence.tensors is None:
        return None
    return next((reply.model_dtype for reply in evidence.tensors.replies if reply.model_dtype), None)
