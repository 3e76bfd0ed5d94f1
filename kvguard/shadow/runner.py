"""Runs probes on a guarded engine: self-check at start, then live traffic, never on a client's path.

The data plane hands over a finished request, which is read and drawn for there; everything else happens on the control
loop: the request waits for an idle moment, the engine generates again with logprobs, the reference scores the same
tokens, sums are updated, and the request is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from kvguard.engine.client import EngineClient
from kvguard.evidence.metrics import EngineFigures
from kvguard.reference.models import EXACT, Choice, Decode, Pass
from kvguard.reference.ranges import Ranges
from kvguard.shadow.budget import LEAST_TOKENS
from kvguard.shadow.candidate import Candidate, Rules, Skipped, own_limit, read_request
from kvguard.shadow.control import positive_control
from kvguard.shadow.fidelity import candidates
from kvguard.shadow.models import COST, UNEXPLAINED, Observation, RequestScore, Stratum, stratum
from kvguard.shadow.prompts import SELF_CHECK
from kvguard.shadow.references import NO_CHOICES, Reference
from kvguard.shadow.replay import Problem, probe_body, read_decode
from kvguard.shadow.report import ShadowReport, state_of
from kvguard.shadow.sampler import Item, Sampler
from kvguard.shadow.scoring import between, score
from kvguard.shadow.self_check import as_live, conclude, control_choice, own_label, weight_of
from kvguard.shadow.sequential import Status, begin, collapse_of, sighted, update
from kvguard.shadow.settings import Settings
from kvguard.shadow.statistics import Sums
from kvguard.shadow.tally import Drop
from kvguard.vocabulary import UsageError, is_quantized

log = structlog.get_logger("kvguard")

_PASSES = 3  # exact, the engine's own arithmetic, the positive control
_IDLE = 0.25  # seconds between looks at the queue
_PATIENCE = 60.0  # seconds that the self-check waits for idle moments only
_CONTROL_AGAIN = 3600.0  # seconds between positive controls
_HANDED_OVER = 64  # bodies on their way from the data plane's thread at most
_LOOK_AFTER = 0.02  # seconds they may wait for company
_AT_A_TIME = 4
_KEPT = 200  # latest observations kept for the positive control
_ASK_FIRST, _ASK_AGAIN = 1.0, 10.0  # seconds between questions to a reference; while it is away the pause doubles
_PATIENCE_FOR_PASS = 600.0  # seconds that each pass of a replayed request waits at most: the replay has cost engine time
_LASTING = (Drop.STALL, Drop.TOO_LONG, Drop.BREAKER, Drop.SHUTDOWN)  # what forbids a pass and will not go by itself


@dataclass(frozen=True, slots=True)
class _Passes:
    """A scored request by label; or the `problem` of a pass; or the `cause` that forbade one. `times` of each in seconds."""

    observation: Observation | None = None
    problem: str = ""
    cause: Drop | None = None
    times: tuple[float, ...] = ()
    ranges: Ranges | None = None

    @property
    def seconds(self) -> float:
        """All passes together."""
        return sum(self.times)

    @property
    def longest(self) -> float:
        """The longest one."""
        return max(self.times, default=0.0)


class Shadow:
    """Probes of one engine. `offer` may be called on any thread; everything else runs on the control loop."""

    def __init__(
        self,
        client: EngineClient,
        reference: Reference,
        settings: Settings,
        *,
        served_model: str,
        dtype: str,
        batch_tokens: int | None,
        batch_sequences: int | None,
        figures: Callable[[], Awaitable[EngineFigures]],
        in_flight: Callable[[], int],
        generated: Callable[[], float | None],
        base_models: Iterable[str] = (),
        baseline: float | None = None,
        tolerance: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """`dtype` is the engine's effective KV dtype; `base_models` are further names of the served model.

        `figures` asks for the engine's load now, which costs its streams a gap; `in_flight` and `generated` cost nothing:
        requests with the engine by kvguard's own count, and tokens it had made when it was last read. `baseline` and
        `tolerance` (nats by token) are the accepted ones, None: what the self-check finds.
        """
        self._client = client
        self._reference = reference
        self._settings = settings
        self._served_model = served_model
        self._dtype = dtype
        self._accepted = baseline
        self._tolerance = tolerance
        self._figures = figures
        self._in_flight = in_flight
        self._generated = generated
        self._clock = clock
        self._rules = Rules(
            base_models=frozenset({served_model, *base_models}),
            require_opt_in=settings.require_opt_in,
            max_body_bytes=settings.max_body_bytes,
        )
        self._sampler: Sampler[Candidate] = Sampler(
            settings,
            clock,
            random.Random(seed),  # noqa: S311 -- sampling, not a secret
            batch_tokens=batch_tokens,
            batch_sequences=batch_sequences,
            passes=_PASSES,
        )
        self._choice: Choice | None = None
        self._watched: tuple[Choice, ...] = ()
        self._patient_until = self._paced_until = 0.0
        self._beside = 0.0  # clients' requests that ran when the latest replay began
        self._recent: list[Observation] = []
        self._skipped: Counter[str] = Counter()
        self._report = ShadowReport(state="checking", reason="the self-check has not run yet", reference=reference.name)
        self._open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handed: deque[tuple[str, Sequence[tuple[bytes, bytes]], bytes]] = deque()
        self._turned_away = 0  # counted by the data plane's thread alone
        self._told = 0  # of those, by the control loop alone
        self._called = False

    @property
    def report(self) -> ShadowReport:
        """The current report, with the sampler's account of now."""
        current, rows = self._report, self._sampler.rows()
        reason = current.reason
        dropped: Counter[Drop] = Counter()
        for row in rows:
            dropped.update({cause: count.requests for cause, count in row.dropped.items()})
        if current.state in ("probing", "blind") and dropped.total() > current.probes:
            causes = ", ".join(f"{cause} {requests}" for cause, requests in dropped.most_common())
            reason += f"; drawn and dropped: {causes}"
            if dropped[Drop.STALL]:
                reason += " (a pass is predicted to stall the engine for longer than max-stall-ms)"
        return replace(current, reason=reason, skipped=dict(self._skipped), rows=rows)

    def watch(self, choices: Sequence[Choice]) -> str:
        """Let live probes also try `choices`, in place of those before; their sums start anew with the cost's.

        Returns why that cannot be, "" when it is so.
        """
        if choices and not self._reference.choices_possible:
            return NO_CHOICES
        if not self._open:
            return f"shadow probes are {self._report.state}: {self._report.reason or 'not probing yet'}"
        self._watched = tuple(choices)
        self._sampler.set_passes(_PASSES + len(choices))
        self._set(whatif={label: Sums() for label in (COST, *(choice.label for choice in choices))} if choices else {})
        return ""

    def offer(self, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """A client has its answer: maybe probe its request. Parses the body only once probing is on; never raises."""
        if not self._open:
            return
        try:
            read = read_request(path, body, headers, self._rules)
            if isinstance(read, Skipped):
                self._skipped[str(read.reason)] += 1
                return
            expected = min(self._settings.max_tokens, own_limit(read.body, read.kind) or self._settings.max_tokens)
            self._sampler.offer(read.stratum, read.estimated_tokens + expected, read, size=read.size)
        except Exception as error:  # the caller relays requests; the error's text could hold a prompt
            self._skipped["error"] += 1
            log.warning("a request could not be offered to shadow probes", error=type(error).__name__)

    def tap(self, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """`offer` from the data plane's thread: the body is parsed on the control loop, so that no stream waits for it."""
        loop = self._loop
        if not self._open or loop is None or not body:  # nothing is generated without one: /metrics, /v1/models
            return
        if len(self._handed) >= _HANDED_OVER:
            self._turned_away += 1
        else:
            self._handed.append((path, headers, body))
        if not self._called:  # one wake-up for all that comes until the control loop looks: it costs more than an offer
            self._called = True
            loop.call_soon_threadsafe(loop.call_later, _LOOK_AFTER, self._look)

    def _look(self) -> None:
        """A few at a time, so that the data plane's thread never waits long for the interpreter."""
        self._called = False
        for _ in range(min(len(self._handed), _AT_A_TIME)):
            self.offer(*self._handed.popleft())
        if new := self._turned_away - self._told:
            self._told += new
            self._skipped["busy"] += new
        if self._handed and not self._called and self._loop is not None:
            self._called = True
            self._loop.call_soon(self._look)

    async def run(self) -> None:
        """Self-check, then probe until cancelled. An error that ends probing is raised, and the report says so."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._run()
        except Exception as error:
            self._set(state="refused", reason=f"probing ended unexpectedly ({type(error).__name__})")
            raise

    async def _run(self) -> None:
        if not await self._reference_there():
            return
        await self._self_check()
        while self._report.alarm is None:
            if not self._reference.comes_and_goes:
                return
            await asyncio.sleep(_ASK_AGAIN)
            await self._reference_there()
            self._set(state="checking", reason="the self-check is repeated")
            await self._self_check()
        self._open = True
        controlled = asked = self._clock()
        try:
            while True:
                item = await self._next()
                failed = item is not None and not await self._probe(item)
                again = _ASK_AGAIN if self._sampler.breaker == "closed" else _ASK_FIRST
                if self._reference.comes_and_goes and (failed or self._clock() - asked > again):
                    await self._reference_there()
                    asked = self._clock()
                if self._clock() - controlled > _CONTROL_AGAIN:
                    controlled = self._clock()
                    self._run_control(self._recent)
        finally:
            self._open = False
            self._sampler.close()

    async def _reference_there(self) -> bool:
        """Whether the reference can score. One that comes and goes is waited for, for as long as it takes."""
        away, pause = False, _ASK_FIRST
        while why := await self._reference.unavailable():
            if not away:
                self._sampler.reference_away()
                self._set(lost=self._report.lost + (self._report.alarm is not None), equality="")
            away = True
            state = "waiting" if self._reference.standing.absent else "refused"
            if (self._report.state, self._report.reason) != (state, why):
                self._set(state=state, reason=why)
                level = log.warning if state == "refused" or self._report.alarm is not None else log.info
                level("shadow probes wait" if state == "waiting" else "shadow probes refused", reason=why)
            if not self._reference.comes_and_goes:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, _ASK_AGAIN)
        standing, alarm = self._reference.standing, self._report.alarm
        self._rules = replace(self._rules, adapters=standing.adapters)
        self._set(equality=standing.equality)
        if away:
            self._sampler.reference_back()
            self._set(state=state_of(alarm) if alarm else "checking", reason=alarm.reason if alarm else "")
            log.info("shadow probes have their reference", equality=standing.equality)
        return True

    async def _next(self) -> Item[Candidate] | None:
        self._sampler.generated(self._generated())
        if not self._sampler.promising(self._clock(), self._in_flight()):
            await asyncio.sleep(_IDLE)
            return None
        load = await self._figures()
        item = self._sampler.next(self._clock(), load.waiting, load.kv_pinned_ratio, load.running)
        if item is None:
            await asyncio.sleep(_IDLE)
        self._beside = load.running or 0.0
        return item

    # ---- the self-check

    async def _self_check(self) -> None:
        """Decode our own prompts, find what explains the engine's arithmetic, fix the baseline, test the alarm's sight."""
        choices = candidates(self._dtype) if self._reference.choices_possible else (EXACT,)
        choices += self._control_choices()
        seen: list[Observation] = []
        problems: Counter[str] = Counter()
        self._patient_until = self._clock() + _PATIENCE
        for number, prompt in enumerate(SELF_CHECK):
            await self._quiet()
            decode, problem = await self._decode_prompt(prompt, number)
            if decode is None:
                problems[f"replay: {problem}"] += 1
                continue
            where = stratum(len(decode.prompt_ids), 1)
            scored = await self._score(decode, choices, weight_of(self._settings, where), where, self._quiet)
            if scored.observation is None:
                problems[scored.problem] += 1
                await self._missed(scored.problem)
                continue
            self._sampler.measured(len(decode.prompt_ids) + len(decode.ids), scored.longest)
            seen.append(scored.observation)
        not_a_number = bool(problems[f"replay: {Problem.NAN}"])
        if not seen and not not_a_number:
            reason = f"no self-check prompt could be scored: {problems.most_common(1)[0][0]}"
            self._set(state="refused", reason=reason)
            log.warning("shadow probes refused", reason=reason)
            return
        found = conclude(seen, self._dtype, self._settings, self._accepted, self._tolerance, not_a_number=not_a_number)
        self._choice = found.choice
        self._set(
            state="probing",
            reason="",
            fidelity=found.fidelity,
            baseline=found.test.baseline if found.measured is not None else self._accepted,
            measured_baseline=found.measured,
            tolerance=found.test.tolerance if found.measured is not None else self._tolerance,
            alarm=begin(found.test),
        )
        for observation in found.observations:
            self._remember(observation)
        self._run_control(self._recent)
        if found.damage:
            alarm = self._report.alarm or begin(found.test)
            self._set(state="regression", reason=found.damage, alarm=replace(alarm, regression=found.damage))
            log.error("shadow self-check", reason=found.damage)
        log.info(
            "shadow self-check",
            explained_by=found.fidelity.explained_by,
            baseline=round(found.test.baseline, 4),
            requests=found.fidelity.requests,
            detail=found.fidelity.reason,
        )

    async def _missed(self, problem: str) -> None:
        """A pass of the self-check failed; a reference that comes and goes is waited for, where that is why."""
        log.warning("shadow self-check: a pass failed", problem=problem)
        if self._reference.comes_and_goes:
            await self._reference_there()

    async def _quiet(self) -> None:
        """Wait until no client's request waits or runs. A replica that is never idle gets the check within the budget."""
        while True:
            now = self._clock()
            self._sampler.generated(self._generated())
            patient = now <= max(self._patient_until, self._paced_until)
            if self._in_flight() == 0 or not patient:
                load = await self._figures()
                if load.waiting == 0 and load.running == 0:
                    return
                figures = (load.waiting, load.kv_pinned_ratio, load.running)
                if not patient and self._sampler.clearance(now, LEAST_TOKENS, *figures) is None:
                    return
            self._set(reason="the self-check waits for a moment without clients' requests")
            await asyncio.sleep(_IDLE)

    def _pace(self, seconds: float) -> None:
        """The self-check took this much engine time: the share of the budget has to pay for it before it goes on."""
        self._paced_until = self._clock() + seconds / self._settings.engine_share

    async def _decode_prompt(self, prompt: str, number: int) -> tuple[Decode | None, str]:
        """Decoded as live replays are, since the baseline is held against them; a seed makes two starts agree."""
        decode, problem, _ = await self._decode(_chat(prompt, seed=number), greedy=self._settings.greedy)
        return decode, problem

    async def _decode(
        self, candidate: Candidate, *, greedy: bool, max_tokens: int | None = None
    ) -> tuple[Decode | None, str, float]:
        """The engine's own decode of a request, why there is none, and the seconds it took."""
        path, body = probe_body(
            candidate,
            served_model=self._served_model,
            max_tokens=max_tokens or self._settings.max_tokens,
            greedy=greedy,
            salt=secrets.token_hex(16),
        )
        begun = self._clock()
        answer = await self._client.post(path, body)
        seconds = self._clock() - begun
        read = read_decode(candidate.kind, answer.body if isinstance(answer.body, dict) else {})
        if isinstance(read, Problem):
            if read is Problem.NAN:
                self._collapsed("nan logprob")
            self._skipped[f"replay: {read}"] += 1
            return None, str(read), seconds
        return replace(read, adapter=candidate.adapter), "", seconds

    async def _score(
        self,
        decode: Decode,
        choices: Sequence[Choice],
        weight: float,
        where: Stratum,
        before: Callable[[], Awaitable[Drop | None]] | None = None,
        whatif: Sequence[Choice] = (),
    ) -> _Passes:
        """One pass after the other, each a question of its own, so that a stall is never longer than one pass.

        `before` is awaited ahead of each; a Drop from it ends the matter.
        """
        passes: list[Pass] = []
        times: tuple[float, ...] = ()
        ranges: Ranges | None = None
        # A 16-bit decode is itself what a format would change; a quantized one is not.
        between_passes = [choice.label for choice in whatif] if is_quantized(self._dtype) else []
        for choice in (*choices, *whatif):
            cause = await before() if before is not None else None
            if cause is not None:
                return _Passes(times=times, cause=cause)
            scored = await self._reference.run(decode, [choice])
            self._pace(scored.seconds)
            times += (scored.seconds,)
            if scored.problem:
                return _Passes(problem=scored.problem, times=times)
            passes += scored.passes
            ranges = ranges or scored.ranges
        try:
            observation = _observe(decode, passes, weight, where, between_passes)
        except UsageError as error:
            return _Passes(problem=str(error), times=times)
        return _Passes(observation=observation, times=times, ranges=ranges)

    # ---- live probes

    async def _probe(self, item: Item[Candidate]) -> bool:
        """Probe a request; False when its pass failed."""
        decode, _, decode_seconds = await self._decode(item.payload, greedy=self._settings.greedy)
        beside = max(self._beside, self._in_flight())
        self._sampler.replayed(beside, len(decode.ids) if decode is not None else self._settings.max_tokens)
        if decode is None:
            self._sampler.drop(item, Drop.REPLAY, decode_seconds)
            return True
        tokens = len(decode.prompt_ids) + len(decode.ids)
        longest = self._reference.standing.max_tokens
        if longest is not None and tokens >= longest:  # it generates one token besides
            self._sampler.drop(item, Drop.TOO_LONG, decode_seconds)
            return True

        async def cleared() -> Drop | None:  # the load may have changed while the engine generated
            until = self._clock() + max(_PATIENCE_FOR_PASS, self._settings.max_age_s)
            while True:
                load = await self._figures()
                cause = self._sampler.clearance(self._clock(), tokens, load.waiting, load.kv_pinned_ratio, load.running)
                if cause is None or cause in _LASTING or self._clock() > until:
                    return cause
                await asyncio.sleep(_IDLE)

        choices = [EXACT, *([self._choice] if self._choice is not None and self._choice != EXACT else [])]
        choices += self._control_choices()
        scored = await self._score(decode, choices, item.weight, item.stratum, cleared, self._watched)
        elsewhere = self._reference.comes_and_goes  # its passes cost this engine nothing
        self._took(scored, stalls=not elsewhere)
        part_of_batch = decode_seconds / (beside + 1) if beside else 0.0
        engine_seconds = part_of_batch + (0.0 if elsewhere else scored.seconds)
        if scored.cause is not None:
            self._sampler.drop(item, scored.cause, engine_seconds)
        elif scored.observation is None:
            log.warning("shadow probe failed; probes pause", problem=scored.problem)
            self._sampler.failed(item, engine_seconds)
            return False
        else:
            if scored.ranges:
                self._set(spanned=self._report.spanned.with_one(scored.ranges, tokens))
            self._sampler.done(item, tokens=tokens, pass_seconds=scored.longest, engine_seconds=engine_seconds)
            self._count(as_live(scored.observation, self._own, tuple(self._report.whatif)))
        return True

    @property
    def _own(self) -> str:
        return own_label(self._choice) if self._reference.choices_possible else ""

    def _control_choices(self) -> tuple[Choice, ...]:
        return (control_choice(self._dtype),) if self._reference.choices_possible else ()

    def _took(self, scored: _Passes, *, stalls: bool) -> None:
        report, most = self._report, self._settings.max_stall_ms / 1000
        self._set(
            pass_seconds=report.pass_seconds + scored.seconds,
            longest_pass_seconds=max(report.longest_pass_seconds, scored.longest),
            stalls_over_budget=report.stalls_over_budget + stalls * sum(took > most for took in scored.times),
        )

    def _count(self, observation: Observation) -> None:
        report = self._report
        sums = {name: dict(table) for name, table in report.sums.items()}
        for name in (COST, UNEXPLAINED):
            if name in observation.scores:
                table = sums.setdefault(name, {})
                one = Sums.of(observation.weight, observation.scores[name])
                table[observation.stratum] = table.get(observation.stratum, Sums()) + one
        whatif = report.whatif
        if whatif.keys() <= observation.scores.keys():  # else it was asked for while this probe was under way
            whatif = {label: sums + Sums.of(observation.weight, observation.scores[label]) for label, sums in whatif.items()}
        alarm = update(report.alarm, observation) if report.alarm is not None else None
        if alarm is not None and report.alarm is not None and alarm.status is not report.alarm.status:
            level = log.error if alarm.status is Status.REGRESSION else log.info
            level("shadow alarm", status=str(alarm.status), reason=alarm.reason)
        collapsed = int(bool(collapse_of(observation)))
        self._remember(observation)
        self._set(
            state=state_of(alarm),
            reason=alarm.reason if alarm is not None else "",
            alarm=alarm,
            sums=sums,
            whatif=whatif,
            probes=report.probes + 1,
            collapsed=report.collapsed + collapsed,
        )

    def _collapsed(self, how: str) -> None:
        """An answer that is broken before anything can be compared. The alarm counts it as any collapse."""
        log.error("shadow probe: the engine's answer collapsed", how=how)
        self._set(collapsed=self._report.collapsed + 1)
        if self._report.alarm is not None:
            broken = RequestScore(0, 0.0, 0.0, 0, None, 0.0, 0.0, 0.0, how)
            alarm = update(self._report.alarm, Observation(1.0, stratum(0, 1), {UNEXPLAINED: broken}))
            self._set(alarm=alarm, state=state_of(alarm), reason=alarm.reason)

    def _remember(self, observation: Observation) -> None:
        self._recent = [*self._recent[1 - _KEPT :], observation]

    def _run_control(self, observations: Sequence[Observation]) -> None:
        """The positive control: an alarm that cannot see it is blind, and says so."""
        alarm = self._report.alarm
        if alarm is None:
            return
        control = positive_control(observations, alarm.test) if self._reference.choices_possible else None
        alarm = sighted(alarm, control.blind if control is not None else "this reference cannot make a positive control")
        self._set(control=control, alarm=alarm, state=state_of(alarm), reason=alarm.reason)

    # ---- one shot

    async def probe_once(
        self, prompts: Sequence[str], choices: Sequence[Choice], *, greedy: bool, max_tokens: int
    ) -> tuple[list[Observation], list[str]]:
        """Probe these prompts now, each against the exact pass, the engine's own arithmetic and `choices`.

        Returns observations (keys: cost, unexplained, the choices' labels) and the problems of prompts that failed.
        """
        found: list[Observation] = []
        problems: list[str] = []
        wanted = [EXACT, *([self._choice] if self._choice is not None and self._choice != EXACT else [])]
        for number, prompt in enumerate(prompts, 1):
            try:
                decode, problem, _ = await self._decode(_chat(prompt), greedy=greedy, max_tokens=max_tokens)
            except RuntimeError:  # the client was closed: kvguard is about to stop
                decode, problem = None, "kvguard is stopping"
            if decode is None:
                why = "an error, as for a prompt beyond its max-model-len" if problem == Problem.ERROR else problem
                problems.append(f"prompt {number}: the engine's answer could not be scored ({why})")
                continue
            scored = await self._score(decode, wanted, 1.0, stratum(len(decode.prompt_ids), 1), whatif=choices)
            if scored.observation is None:
                problems.append(f"prompt {number}: {scored.problem}")
                continue
            found.append(as_live(scored.observation, self._own, [choice.label for choice in choices]))
        return found, problems

    def _set(self, **changes: Any) -> None:
        self._report = replace(self._report, **changes)


def _chat(prompt: str, **sampling: int) -> Candidate:
    """A chat of one turn."""
    body = {"messages": [{"role": "user", "content": prompt}], **sampling}
    return Candidate(kind="chat", body=body, turns=1, adapter="", prompt_chars=len(prompt), size=len(prompt))


def _observe(
    decode: Decode, passes: Sequence[Pass], weight: float, where: Stratum, between_passes: Sequence[str]
) -> Observation:
    """Each pass against the decode, those of `between_passes` against the first one, which is exact."""
    scores = {
        one.label: between(decode, one, passes[0]) if one.label in between_passes else score(decode, one) for one in passes
    }
    return Observation(weight=weight, stratum=where, scores=scores)


async def cancel(task: asyncio.Task[None]) -> None:
    """Cancel and wait; used when the engine is about to stop."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
