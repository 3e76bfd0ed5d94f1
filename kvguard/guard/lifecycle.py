"""The life of a guarded engine: start it, prove it, open the gate, watch it, drain it, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from typing import Any, Protocol

import structlog

from kvguard.engine.canary import canary_check, send_canaries
from kvguard.engine.client import Answer, EngineClient
from kvguard.engine.plan import Plan
from kvguard.engine.process import EngineProcess, ending
from kvguard.engine.run_directory import RunDirectory
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence.log import LogReader
from kvguard.guard.board import Board
from kvguard.guard.prepare import Prepared
from kvguard.guard.run_record import record_input
from kvguard.guard.settings import Settings
from kvguard.guard.state import Event
from kvguard.guard.verify import Evidence, verify_engine
from kvguard.policy.models import OnViolation, Policy
from kvguard.record.build import build_record
from kvguard.record.digest import content_digest
from kvguard.record.statement import Change, Verdict
from kvguard.record.store import write_record
from kvguard.verdict.checks import describe, judge, prediction_check, violates, violations
from kvguard.vocabulary import Check, Claim, Effective, ExitCode, UsageError

log = structlog.get_logger("kvguard")


class Surface(Protocol):
    """What the guard needs of the data plane; its calls return at once or are made on a worker thread."""

    def stop_accepting(self) -> None:
        """Close the listening sockets; requests in flight go on."""

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False when the time ran out."""


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
        self._limit: int | None = None
        self._clock = time.monotonic

    def request_stop(self) -> None:
        """Begin to drain; a second call ends the waiting."""
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
                return await self._refuse(self._prepared.checks, None, None)
            self._warn(self._prepared.checks)
        assert self._plan is not None  # noqa: S101 (only a refused start has no plan)
        secrets = (*self._plan.api_keys, self._run.secret)
        engine = EngineProcess(self._plan.argv, self._plan.env, on_bytes=self._log.feed, secrets=secrets)
        self._run.remember_engine(engine.pid)
        log.info("engine started", pid=engine.pid, version=self._prepared.engine.full_version)
        key = self._plan.api_keys[0] if self._plan.api_keys else None
        try:
            async with EngineClient(str(self._run.socket), key) as client:
                return await self._guard(engine, client)
        finally:
            await engine.stop(self._settings.engine_reserve if self._stops < 2 else 0.1)

    async def _guard(self, engine: EngineProcess, client: EngineClient) -> int:
        begun = self._clock()
        came = await self._until_healthy(engine, client, begun)
        if came is not None:
            return came
        self._times["engine_start_s"] = self._clock() - begun
        self._board.move(Event.ENGINE_HEALTHY, "the engine answers; its KV cache is being verified")
        verifying = asyncio.create_task(self._verify(client))
        stopping = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(engine.wait())
        await asyncio.wait({verifying, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not verifying.done():
            verifying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await verifying
            stopping.cancel()
            if self._stop.is_set():
                ended.cancel()
                return self._stopped_early()
            return self._failed_to_start(await ended)
        stopping.cancel()
        ended.cancel()
        evidence, checks = verifying.result()
        if violates(checks) and self._on_violation is not OnViolation.WARN:
            await engine.stop(self._settings.engine_reserve)
            return await self._refuse(checks, evidence, None)
        self._warn(violations(checks))
        self._open(evidence, checks)
        return await self._serve(engine, client)

    async def _until_healthy(self, engine: EngineProcess, client: EngineClient, begun: float) -> int | None:
        """Wait for /health. Returns an exit code when the engine never gets there."""
        limit = self._settings.start_timeout
        while True:
            if self._stop.is_set():
                return self._stopped_early()
            if engine.exit_code is not None:
                await engine.clear()
                return self._failed_to_start(engine.exit_code)
            if self._run.socket.exists() and (await client.health()).ok:
                return None
            if limit is not None and self._clock() - begun > limit:
                self._fail(f"the engine was not healthy within {limit:.0f} s of its start; see its log above")
                return ExitCode.ENGINE_FAILED_TO_START
            await asyncio.sleep(0.1)

    def _stopped_early(self) -> int:
        self._board.move(Event.STOP_REQUESTED, "stopped while starting")
        log.info("stopped while the engine was starting")
        return ExitCode.CLEAN

    def _failed_to_start(self, code: int) -> int:
        errors = self._log.last_errors()
        said = f"; it said: {errors[-1]}" if errors else "; its log above says why"
        self._fail(f"the engine ended before it was ready, with {ending(code)}{said}")
        return ExitCode.ENGINE_FAILED_TO_START

    def _fail(self, reason: str) -> None:
        self._board.move(Event.ENGINE_ENDED, reason)
        log.error("engine failed to start", reason=reason)
        self._last_words(f"engine failed to start: {reason}")

    async def _verify(self, client: EngineClient) -> tuple[Evidence, tuple[Check, ...]]:
        """Canaries first, then evidence, so that a one-shot calibration has seen tokens before it is read."""
        prepared, policy = self._prepared, self._policy
        declared = prepared.declared
        begun = self._clock()
        served = _served_name(await client.models()) or prepared.command.model
        length = prepared.command.value("--max-model-len")
        canaries = await send_canaries(
            client,
            served,
            chat=declared.has_chat_template,
            window=declared.geometry.sliding_window,
            max_model_len=int(length) if length and length.isdigit() else declared.max_position_embeddings,
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
            self._limit = evidence.tensors.replies[0].limits.max_num_seqs
        return evidence, checks

    def _open(self, evidence: Evidence, checks: tuple[Check, ...]) -> None:
        """Write the record, then open the gate."""
        verdict: Verdict = "warn" if violates((*self._prepared.checks, *checks)) else "serve"
        self._record(evidence, checks, verdict, None)
        effective = evidence.effective
        self._board.update(effective=effective, checks=checks, last_verified=time.time())
        self._board.move(Event.VERDICT_ALLOWS, "serving")
        log.info(
            "serving",
            kv_cache_dtype=effective.dtype,
            kv_scales=str(effective.scales),
            confidence=str(effective.confidence),
            kv_tokens=effective.kv_tokens,
            record=self._board.status.record_path,
        )

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
            path = write_record(record, self._settings.record_directory, now.strftime("%Y%m%dT%H%M%SZ"))
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

    async def _refuse(self, checks: tuple[Check, ...], evidence: Evidence | None, reason: str | None) -> int:
        """Say why, record it, and end (refuse) or stay up unready (hold)."""
        lines = [describe(check) for check in violations(checks)]
        summary = reason or "; ".join(lines)
        self._record(evidence, checks, "hold" if self._on_violation is OnViolation.HOLD else "refuse", summary)
        if evidence is not None:
            self._board.update(effective=evidence.effective, last_verified=time.time())
        self._board.update(checks=checks)
        self._board.move(Event.VERDICT_REFUSES, f"refused by policy: {summary}")
        for line in lines:
            log.error("refused", check=line)
        self._last_words(f"refused by policy: {summary}")
        if self._on_violation is OnViolation.HOLD:
            log.warning("holding: the engine is stopped; the record and metrics stay readable until SIGTERM")
            await self._stop.wait()
        self._board.move(Event.STOP_REQUESTED, self._board.status.reason)
        return ExitCode.POLICY_VIOLATION

    def _last_words(self, line: str) -> None:
        """One line to the orchestrator's termination log."""
        path = self._settings.termination_log
        if path is None:
            return
        with contextlib.suppress(OSError), path.open("w", encoding="utf-8") as file:
            file.write(line[:2000] + "\n")

    async def _serve(self, engine: EngineProcess, client: EngineClient) -> int:
        watching = asyncio.create_task(self._watch(client))
        stopping = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(engine.wait())
        try:
            await asyncio.wait({watching, stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() or watching.done():
                return await self._died(engine, watching)
            draining = asyncio.create_task(self._drain())
            await asyncio.wait({draining, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                draining.cancel()
                return await self._died(engine, watching)
            return ExitCode.CLEAN
        finally:
            for task in (watching, stopping, ended):
                task.cancel()
            await asyncio.gather(watching, stopping, ended, return_exceptions=True)

    async def _died(self, engine: EngineProcess, watching: asyncio.Task[str]) -> int:
        code = engine.exit_code
        how = f"ended with {ending(code)}" if code is not None else watching.result()
        errors = self._log.last_errors()
        reason = f"the engine {how} while serving" + (f"; its last error: {errors[-1]}" if errors else "")
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
            unhealthy = unhealthy + 1 if (await client.health()).status == 503 else 0
            if unhealthy >= 3:
                return "answered /health with an error three times"
            with contextlib.suppress(UsageError):
                page = metrics_evidence.parse_metrics((await client.metrics_text()).body or b"")
                figures = metrics_evidence.gauges(page, self._board.status.effective, self._limit)
                self._board.update(gauges=figures)
            await asyncio.sleep(self._settings.refresh)

    async def _drain(self) -> None:
        """Unready at once; accept while routers take note; then finish what is in flight within the grace."""
        begun = self._clock()
        settings = self._settings
        self._board.move(Event.STOP_REQUESTED, "draining")
        log.info("draining", settle_s=settings.settle, grace_s=settings.grace)
        deadline = begun + settings.grace - settings.engine_reserve
        settled = begun + min(settings.settle, settings.grace)
        while self._stops < 2 and self._clock() < settled:
            await asyncio.sleep(0.05)
        self._surface.stop_accepting()
        while self._stops < 2 and self._clock() < deadline:
            if await asyncio.to_thread(self._surface.wait_idle, 0.1):
                break
        else:
            log.warning("grace period over with requests in flight; they are cut off", grace_s=settings.grace)
        self._board.move(Event.STOPPED, "stopped")
        log.info("drained", seconds=round(self._clock() - begun, 2))


def _served_name(models: Answer) -> str | None:
    """The name under which the engine serves its model, from /v1/models."""
    data = models.body.get("data") if models.ok and isinstance(models.body, dict) else None
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    name = first.get("id")
    return name if isinstance(name, str) else None


def _model_dtype(evidence: Evidence) -> str | None:
    """The model's own dtype as the workers state it."""
    if evidence.tensors is None:
        return None
    return next((reply.model_dtype for reply in evidence.tensors.replies if reply.model_dtype), None)
