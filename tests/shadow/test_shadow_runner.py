"""The life of shadow probes: the self-check, live probes, what is refused, and what never leaves memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from kvguard.engine.client import Answer
from kvguard.evidence.metrics import EngineFigures
from kvguard.reference.models import Choice
from kvguard.reference.ranges import LayerRange, Side
from kvguard.shadow import runner
from kvguard.shadow.candidate import read_request
from kvguard.shadow.document import probe_document, ranges_document, report_document
from kvguard.shadow.models import COST, UNEXPLAINED
from kvguard.shadow.prompts import SELF_CHECK
from kvguard.shadow.sequential import Status
from kvguard.shadow.statistics import Measure
from kvguard.telemetry.shadow_metrics import ShadowCollector
from shadow_fakes import CANARY, IDLE, TRUNCATES, FakeEngine, FakeReference, Probing, answer, checked_labels

NAN = Answer(status=400, body={"error": {"message": "Out of range float values are not JSON compliant: nan"}})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_IDLE", 0)


def live(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


async def probed(probing: Probing, requests: int = 1) -> None:
    before = probing.report.probes
    for _ in range(requests):
        probing.client_asks()
    await probing.until(lambda: probing.report.probes == before + requests)


# --- the self-check ---


def test_the_self_check_names_the_arithmetic_and_fixes_the_baseline() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            report = probing.report
            assert (report.state, report.reason, report.reference) == ("probing", "0 of at least 30 requests", "fake")
            assert report.fidelity is not None
            assert (report.fidelity.explained_by, report.fidelity.requests) == ("fp8_e4m3 truncate", len(SELF_CHECK))
            mean = TRUNCATES["fp8_e4m3 truncate"]
            assert report.baseline is not None
            assert mean < report.baseline < 1.1 * mean, "the upper end of the interval"
            assert report.tolerance == 0.02
            assert report.alarm is not None
            assert (report.alarm.blind, report.alarm.test.baseline) == ("", report.baseline)
            assert report.control is not None
            assert (report.control.power or 0) >= 0.8
            assert probing.reference.asked == checked_labels() * len(SELF_CHECK)
            assert probing.reference.at_once == 1, "a stall is one pass long"

    live(scenario())


def test_the_self_check_decodes_as_live_replays_do() -> None:
    async def scenario(greedy: bool) -> list[dict[str, Any]]:
        async with Probing(greedy=greedy, max_tokens=40) as probing:
            return probing.engine.asked

    sampled, again, greedy = (asyncio.run(scenario(greedy)) for greedy in (False, False, True))
    assert [body["seed"] for body in sampled] == list(range(len(SELF_CHECK)))
    assert all("temperature" not in body and body["max_completion_tokens"] == 40 for body in sampled)
    salts = {body.pop("cache_salt") for body in (*sampled, *again)}
    assert len(salts) == 2 * len(SELF_CHECK)
    assert sampled == again, "two starts agree"
    assert all(body["temperature"] == 0 and "seed" not in body for body in greedy)


@pytest.mark.parametrize("rate", [0.0, 0.05, 1.0])
def test_the_control_bets_with_the_weights_of_live_requests(rate: float) -> None:
    async def scenario() -> None:
        async with Probing(rate=rate) as probing:
            assert probing.report.state == "probing", probing.report.reason

    live(scenario())


def test_an_alarm_that_cannot_see_its_control_is_blind() -> None:
    async def scenario() -> None:
        async with Probing(FakeReference({**TRUNCATES, "control": 0.035})) as probing:
            assert probing.report.state == "blind"
            assert "positive control: it reaches 0.035" in probing.report.reason
            await probed(probing)
            assert probing.report.state == "blind"

    live(scenario())


def test_nothing_that_explains_the_decode_is_a_finding() -> None:
    async def scenario() -> None:
        async with Probing(FakeReference({**TRUNCATES, "fp8_e4m3 truncate": 0.1})) as probing:
            fidelity = probing.report.fidelity
            assert fidelity is not None
            assert fidelity.explained_by == "neither"
            assert probing.report.state == "probing"
            await probed(probing, 40)
            report = probing.report
            baseline, found = report.baseline, report.total(UNEXPLAINED).estimate(Measure.REQUEST_ABS_DELTA).value
            assert baseline is not None
            assert found == pytest.approx(baseline, rel=0.1), "live probes are in the baseline's terms"
            assert report.state == "probing"

    live(scenario())


@pytest.mark.parametrize(
    ("engine", "reference", "words"),
    [
        (FakeEngine(lambda _: answer(ids=[7] * 20)), FakeReference({**TRUNCATES, "16bit": 1.0}), "repeated token"),
        (FakeEngine(), FakeReference(dict.fromkeys((*TRUNCATES, *checked_labels()), 1.0)), "unexplained |Δ logprob| 1."),
        (FakeEngine(), FakeReference({**TRUNCATES, "16bit": 3.0}), "damage: one answer: cost "),
        (FakeEngine(lambda _: NAN), FakeReference(), "nan logprob"),
        (FakeEngine(lambda number: NAN if number == 5 else answer()), FakeReference(), "nan logprob"),
        (FakeEngine(lambda _: answer(logprob=0.5)), FakeReference(dict.fromkeys(checked_labels(), 2.0)), "positive logprob"),
    ],
)
def test_damage_at_the_start_is_a_regression(engine: FakeEngine, reference: FakeReference, words: str) -> None:
    async def scenario() -> None:
        async with Probing(reference, engine) as probing:
            report = probing.report
            assert report.state == "regression", report
            assert words in report.reason
            assert report.alarm is not None
            assert report.alarm.status is Status.REGRESSION

    live(scenario())


def test_a_reference_that_cannot_score_is_a_refusal_and_offers_are_ignored() -> None:
    async def scenario() -> None:
        async with Probing(FakeReference(why_not="layer 3: MLA")) as probing:
            probing.client_asks()
            assert (probing.report.state, probing.report.reason) == ("refused", "layer 3: MLA")
            assert probing.task.done()
            assert (probing.engine.asked, probing.report.rows, probing.report.skipped) == ([], (), {})

    live(scenario())


@pytest.mark.parametrize(
    ("engine", "reference", "words"),
    [
        (FakeEngine(lambda _: Answer(error="gone")), FakeReference(), "replay: error"),
        (FakeEngine(lambda _: {"choices": []}), FakeReference(), "replay: malformed"),
        (FakeEngine(), FakeReference(problem="no rank returned logits"), "no rank returned logits"),
        (FakeEngine(), FakeReference(dict.fromkeys(checked_labels(), float("nan"))), "the reference is broken"),
    ],
)
def test_a_self_check_without_a_score_is_a_refusal(engine: FakeEngine, reference: FakeReference, words: str) -> None:
    async def scenario() -> None:
        async with Probing(reference, engine) as probing:
            probing.client_asks()
            assert probing.report.state == "refused"
            assert words in probing.report.reason
            assert probing.report.rows == ()

    live(scenario())


@pytest.mark.parametrize("busy", [EngineFigures(running=1.0, waiting=0.0), EngineFigures()])
def test_the_self_check_waits_for_an_idle_engine(busy: EngineFigures) -> None:
    async def scenario() -> None:
        probing = Probing()
        probing.load = busy
        task = asyncio.create_task(probing.shadow.run())
        await probing.until(lambda: probing.turns > 3)
        assert (probing.engine.asked, probing.report.state) == ([], "checking")
        assert "without clients' requests" in probing.report.reason
        probing.load = IDLE
        await probing.until(lambda: probing.report.state == "probing")
        await runner.cancel(task)

    live(scenario())


def test_a_replica_that_is_never_idle_is_checked_within_the_budget() -> None:
    async def scenario() -> None:
        probing = Probing(FakeReference(seconds=0.1), engine_share=0.02)
        probing.load = EngineFigures(running=3.0, waiting=0.0, kv_pinned_ratio=0.1, generated_total=0.0)
        task = asyncio.create_task(probing.shadow.run())
        await probing.until(lambda: probing.turns > 3)
        assert probing.engine.asked == []
        probing.clock.now += 61
        turns = probing.turns
        await probing.until(lambda: probing.turns > turns + 3)
        assert probing.engine.asked == [], "no token was made, so that no gap may be lengthened"
        probing.load = probing.load.model_copy(update={"generated_total": 1e6})
        await probing.until(lambda: len(probing.reference.asked) == 1)
        for passes in range(2, 5):
            turns = probing.turns
            await probing.until(lambda turns=turns: probing.turns > turns + 3)
            assert len(probing.reference.asked) == passes - 1, "the share has not paid for the last pass yet"
            probing.clock.now += 5.01
            await probing.until(lambda passes=passes: len(probing.reference.asked) == passes)
        probing.load = probing.load.model_copy(update={"waiting": 1.0})
        probing.clock.now += 5.01
        turns = probing.turns
        await probing.until(lambda: probing.turns > turns + 3)
        assert len(probing.reference.asked) == 4, "somebody waits"
        await runner.cancel(task)

    live(scenario())


def test_an_external_reference_is_blind_and_never_says_no_loss() -> None:
    async def scenario() -> None:
        async with Probing(FakeReference(choices_possible=False)) as probing:
            await probed(probing, 40)
            report = probing.report
            assert set(probing.reference.asked) == {"16bit"}
            assert report.state == "blind"
            assert report.fidelity is not None
            assert (report.fidelity.explained_by, "no fake-quantized passes" in report.fidelity.reason) == ("untested", True)
            document = report_document(report)
            assert (document["alarm"]["status"], document["control"]) == ("blind", None)
            assert document["estimates"][COST]["requests"] == 40
            assert document["estimates"][UNEXPLAINED]["requests"] == 0, "untested is absent, and not the cost"
            assert (document["baseline"], document["measured_baseline"]) == (None, None)
            exported = generate_latest(_registry(probing)).decode()
            assert 'comparison="unexplained"' not in exported
            assert "kvguard_shadow_noise_floor_nats " not in exported

    live(scenario())


def test_what_if_on_a_sixteen_bit_engine_is_the_decode_against_the_pass() -> None:
    wanted = Choice(label="fp8_e5m2 nearest", format="fp8_e5m2")

    async def scenario() -> None:
        table = {"16bit": 0.02, "fp8_e4m3 nearest": 0.1, "fp8_e4m3 truncate": 0.1, wanted.label: 0.3, "control": 0.4}
        async with Probing(FakeReference(table), dtype="bfloat16") as probing:
            found, _ = await probing.shadow.probe_once([CANARY] * 3, [wanted], greedy=True, max_tokens=20)
            estimates = probe_document(found, [])["estimates"]
            assert estimates[wanted.label]["abs_delta"]["value"] == pytest.approx(0.3, rel=0.11)

    live(scenario())


# --- live probes ---


def test_a_live_request_is_replayed_scored_and_weighed() -> None:
    async def scenario() -> None:
        async with Probing(rate=0.25, prompt_multipliers=(1, 1, 4, 4)) as probing:
            asked = len(probing.engine.asked)
            for _ in range(80):
                probing.client_asks(temperature=0.7, max_tokens=8, model="alias")
                await asyncio.sleep(0)
            await probing.until(lambda: not any(row.queued.requests + row.running.requests for row in probing.report.rows))
            report = probing.report
            [row] = report.rows
            assert (row.offered.requests, row.done.requests) == (80, report.probes)
            assert 5 < report.probes < 40
            assert row.offered.tokens == 80 * (len("user" + CANARY) // 4 + 8)
            sums = report.sums[COST][row.stratum]
            assert sums.measures[Measure.REQUEST_ABS_DELTA].w == pytest.approx(4 * report.probes)
            assert report.total(UNEXPLAINED).estimate(Measure.ABS_DELTA).value == pytest.approx(0.03, rel=0.2)
            assert report.total(COST).estimate(Measure.ABS_DELTA).value == pytest.approx(0.11, rel=0.2)
            assert report.pass_seconds == pytest.approx(0.003 * report.probes)
            body = probing.engine.asked[asked]
            assert (body["temperature"], body["max_completion_tokens"], body["model"]) == (0.7, 8, "base")
            assert report.state == "probing"

    live(scenario())


def test_a_regression_is_shown_and_recovery_clears_it() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.reference.table |= {"fp8_e4m3 truncate": 0.5, "16bit": 0.5}
            await probed(probing, 60)
            assert probing.report.state == "regression"
            assert "exceeds" in probing.report.reason
            probing.reference.table |= TRUNCATES
            await probed(probing, 500)
            assert probing.report.state == "probing"

    live(scenario())


def test_opting_out_and_other_requests_are_counted_and_not_probed() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.client_asks(headers=[(b"X-KVGuard-Shadow", b"off")])
            probing.client_asks(model="some-adapter")
            probing.shadow.offer("/v1/models", [], b"")
            probing.shadow.offer("/v1/completions", [], b"\xff{")
            assert probing.report.skipped == {"opted_out": 1, "adapter": 1, "not_generation": 1, "not_json": 1}
            assert probing.report.rows == ()

    live(scenario())


def test_an_offer_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(CANARY)

    async def scenario() -> None:
        async with Probing() as probing:
            monkeypatch.setattr(runner, "read_request", broken)
            with capture_logs() as logs:
                probing.client_asks()
            assert probing.report.skipped == {"error": 1}
            assert [entry["error"] for entry in logs] == ["RuntimeError"]
            assert CANARY not in str(logs)

    live(scenario())


def test_an_offer_costs_nothing_while_probing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the body was read")

    monkeypatch.setattr(runner, "read_request", never)
    probing = Probing()
    probing.client_asks()
    assert probing.report.skipped == {}


def test_a_failed_pass_pauses_probes() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.reference.problem = "rank 0: out of memory"
            probing.client_asks()
            await probing.until(lambda: probing.drops() == {"failed": 1})
            probing.client_asks()
            assert probing.drops() == {"failed": 1, "breaker": 1}
            probing.reference.problem = ""
            probing.clock.now += 301
            await probed(probing)
            assert probing.report.state == "probing"

    live(scenario())


def test_a_pass_that_is_no_number_fails_the_probe_and_not_the_prober() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.reference.table["16bit"] = float("nan")
            probing.client_asks()
            await probing.until(lambda: probing.drops() == {"failed": 1})
            assert not probing.task.done()

    live(scenario())


def test_a_replay_that_cannot_be_scored_is_dropped() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.engine.says = lambda _: Answer(status=400, body={"error": {"message": f"no {CANARY}"}})
            probing.client_asks()
            await probing.until(lambda: probing.drops() == {"replay": 1})
            assert probing.report.skipped == {"replay: error": 1}
            assert (probing.report.collapsed, probing.report.state) == (0, "probing")

    live(scenario())


def test_nan_from_the_engine_is_a_collapse_and_a_regression() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.engine.says = lambda _: NAN
            probing.client_asks()
            await probing.until(lambda: probing.drops() == {"replay": 1})
            report = probing.report
            assert (report.collapsed, report.state, report.reason) == (1, "regression", "collapse: nan logprob")

    live(scenario())


def test_a_repetition_that_the_exact_pass_follows_is_no_collapse() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.engine.says = lambda _: answer(ids=[7] * 20)
            await probed(probing)
            assert (probing.report.collapsed, probing.report.state) == (0, "probing")
            probing.reference.table["16bit"] = 1.0
            await probed(probing)
            assert (probing.report.collapsed, probing.report.state) == (1, "regression")

    live(scenario())


@pytest.mark.parametrize(
    ("says", "cause"), [(answer(prompt=3000), "too_long"), (answer(prompt=1500), "stall"), (answer(), "kv_pinned")]
)
def test_what_became_impossible_during_the_replay_is_dropped(says: dict[str, Any], cause: str) -> None:
    async def scenario() -> None:
        async with Probing(max_stall_ms=5) as probing:

            def replayed(_: int) -> Any:
                if cause == "kv_pinned":
                    probing.load = EngineFigures(running=1.0, waiting=0.0, kv_pinned_ratio=0.95)
                return says

            asked = len(probing.reference.asked)
            probing.engine.says = replayed
            probing.client_asks()
            await probing.until(lambda: probing.load is not IDLE or bool(probing.drops()))
            looks = probing.looks
            await probing.until(lambda: probing.looks > looks + 5 or bool(probing.drops()))
            probing.clock.now += 601
            await probing.until(lambda: probing.drops() == {cause: 1})
            assert len(probing.reference.asked) == asked, "no pass ran"

    live(scenario())


def test_load_is_looked_at_before_each_pass() -> None:
    """A request that comes between two passes of a probe has the engine to itself."""

    async def scenario() -> None:
        async with Probing() as probing:
            probing.reference.asked.clear()

            def look(_: int) -> None:
                if probing.reference.asked == ["16bit"]:
                    probing.load = EngineFigures(running=2.0, waiting=1.0, kv_pinned_ratio=0.1)

            probing.on_look = look
            probing.client_asks()
            await probing.until(lambda: probing.load is not IDLE)
            looks = probing.looks
            await probing.until(lambda: probing.looks > looks + 5)
            assert probing.reference.asked == ["16bit"]
            probing.on_look, probing.load = lambda _: None, IDLE
            await probing.until(lambda: probing.report.probes == 1)
            assert probing.reference.asked == ["16bit", "fp8_e4m3 truncate", "control"]

    live(scenario())


def test_passes_that_stalled_for_longer_than_foreseen_are_counted() -> None:
    async def scenario() -> None:
        async with Probing(FakeReference(seconds=0.01), max_stall_ms=100) as probing:
            await probed(probing)
            assert (probing.report.longest_pass_seconds, probing.report.stalls_over_budget) == (0.01, 0)
            probing.reference.seconds = 0.3
            await probed(probing)
            assert (probing.report.longest_pass_seconds, probing.report.stalls_over_budget) == (0.3, 3)
            assert probing.report.pass_seconds == pytest.approx(0.93)
            probing.client_asks()
            await probing.until(lambda: probing.drops() == {"stall": 1})

    live(scenario())


def test_a_probe_beside_others_is_paid_for_by_tokens_and_the_engine_is_not_asked_before_they_have() -> None:
    """Each step of a replay is one of every request beside it; its passes do not wait until that is earned back."""

    async def scenario() -> None:
        async with Probing() as probing:
            probing.reference.asked.clear()
            busy = EngineFigures(running=4.0, waiting=0.0, kv_pinned_ratio=0.1, generated_total=0.0)
            probing.load = busy
            probing.client_asks()
            turns, looks = probing.turns, probing.looks
            await probing.until(lambda: probing.turns > turns + 5)
            assert probing.looks == looks, "no token was made, and to look would lengthen a gap"
            probing.load = busy.model_copy(update={"generated_total": 1_000.0})
            await probing.until(lambda: probing.report.probes == 1)
            assert probing.reference.asked == ["16bit", "fp8_e4m3 truncate", "control"]
            owed = -probing.shadow._sampler._gaps._earned
            assert owed == pytest.approx(4 * (1 + 2) + 4 * 3 - 1), (
                "a prefill, twenty tokens and three passes; one gap was earned"
            )
            probing.client_asks()
            probing.load = busy.model_copy(update={"generated_total": 999.0 + 1_000 * owed})
            turns, looks = probing.turns, probing.looks
            await probing.until(lambda: probing.turns > turns + 5)
            assert probing.looks == looks
            probing.load = busy.model_copy(update={"generated_total": 1_010.0 + 1_000 * owed})
            await probing.until(lambda: probing.report.probes == 2)
            probing.client_asks()
            probing.load = IDLE
            await probing.until(lambda: probing.report.probes == 3)

    live(scenario())


def test_an_engine_is_not_asked_for_its_load_while_the_budget_is_spent() -> None:
    async def scenario() -> None:
        async with Probing(FakeReference(seconds=1.0), engine_share=0.02) as probing:
            await probed(probing)
            probing.client_asks()
            turns, looks = probing.turns, probing.looks
            await probing.until(lambda: probing.turns > turns + 5)
            assert probing.looks == looks
            probing.clock.now += 61
            probing.client_asks()
            await probing.until(lambda: probing.drops() == {"budget": 1})
            probing.clock.now += 120
            probing.client_asks()
            await probing.until(lambda: probing.report.probes == 2)

    live(scenario())


def test_the_control_runs_again_by_the_clock() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            assert probing.report.state == "probing"
            probing.reference.table["control"] = 0.031
            await probed(probing, 250)
            assert probing.report.state == "probing", "not before its time"
            probing.clock.now += 3601
            await probing.until(lambda: probing.report.state == "blind")
            probing.reference.table["control"] = 0.4
            await probed(probing, 250)
            probing.clock.now += 3601
            await probing.until(lambda: probing.report.state == "probing")

    live(scenario())


def test_stopping_drops_what_waits_and_takes_no_more() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.load = EngineFigures(running=1.0, waiting=5.0, kv_pinned_ratio=0.1)
            probing.client_asks()
            await runner.cancel(probing.task)
            assert probing.drops() == {"shutdown": 1}
            probing.client_asks()
            [row] = probing.report.rows
            assert row.offered.requests == 1
            probing.task = asyncio.create_task(asyncio.sleep(0))

    live(scenario())


def test_an_error_of_our_own_is_in_the_report() -> None:
    async def scenario() -> None:
        probing = Probing()

        def fail(_: int) -> None:
            raise ZeroDivisionError(CANARY)

        probing.on_look = fail
        with pytest.raises(ZeroDivisionError):
            await probing.shadow.run()
        assert probing.report.state == "refused"
        assert probing.report.reason == "probing ended unexpectedly (ZeroDivisionError)"

    live(scenario())


# --- one shot ---


def test_one_shot_probes_answer_in_the_order_asked() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            too_long = Answer(status=400, body={"error": {"message": f"{CANARY} is too long"}})
            says = {len(SELF_CHECK) + 2: NAN, len(SELF_CHECK) + 4: too_long}
            probing.engine.says = lambda number: says.get(number, answer())
            choice = Choice(label="fp8_e5m2 nearest, scales unit", format="fp8_e5m2", scales="unit")
            found, problems = await probing.shadow.probe_once([CANARY] * 4, [choice], greedy=True, max_tokens=200)
            document = probe_document(found, problems)
            assert list(document["estimates"]) == [COST, UNEXPLAINED, choice.label]
            assert document["requests"] == 2
            assert document["problems"] == [
                "prompt 2: the engine's answer could not be scored (nan logprob)",
                "prompt 4: the engine's answer could not be scored (an error, as for a prompt beyond its max-model-len)",
            ]
            assert document["estimates"][choice.label]["abs_delta"]["value"] == pytest.approx(0.13 - 0.11, rel=0.2), (
                "pass against pass"
            )
            assert probing.engine.asked[-1]["max_completion_tokens"] == 200, "the question's limit, not the live one"
            assert probing.engine.asked[-1]["temperature"] == 0
            assert probing.report.probes == 0

    live(scenario())


def test_one_shot_probes_name_the_passes_that_failed() -> None:
    async def scenario() -> None:
        async with Probing() as probing:
            probing.reference.problem = "broken"
            found, problems = await probing.shadow.probe_once(["a"], [], greedy=False, max_tokens=8)
            assert (found, problems) == ([], ["prompt 1: broken"])
            assert probe_document(found, problems) == {"requests": 0, "collapsed": 0, "problems": problems, "estimates": {}}

    live(scenario())


# --- nothing of a prompt leaves memory ---


def test_no_prompt_in_report_document_metrics_or_log() -> None:
    async def scenario() -> None:
        with capture_logs() as logs:
            async with Probing() as probing:
                await probed(probing, 3)
                probing.client_asks(headers=[(b"x-kvguard-shadow", b"off")])
                probing.engine.says = lambda _: NAN
                probing.client_asks()
                await probing.until(lambda: probing.drops() == {"replay": 1})
                probing.reference.problem = "out of memory"
                probing.engine.says = lambda _: answer()
                probing.client_asks()
                await probing.until(lambda: probing.drops() == {"replay": 1, "failed": 1})
                found = await probing.shadow.probe_once([CANARY], [], greedy=False, max_tokens=8)
                assert any(CANARY in str(body) for body in probing.engine.asked)
                registry = CollectorRegistry()
                registry.register(ShadowCollector(lambda: probing.report))
                written = (
                    repr(probing.report),
                    json.dumps(report_document(probing.report)),
                    generate_latest(registry).decode(),
                    repr(found),
                    repr(probing.shadow._sampler._queue),
                    str(logs),
                )
                assert not any(CANARY in text for text in written)

    live(scenario())


def test_the_data_plane_hands_over_and_parses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading: set[int] = set()

    def read(*arguments: Any) -> Any:
        reading.add(threading.get_ident())
        return read_request(*arguments)

    monkeypatch.setattr(runner, "read_request", read)

    async def scenario() -> None:
        async with Probing() as probing:

            async def skipped(requests: int) -> dict[str, int]:
                async with asyncio.timeout(120):
                    while sum(probing.report.skipped.values()) < requests:
                        await asyncio.sleep(0.01)
                return probing.report.skipped

            await asyncio.to_thread(probing.shadow.tap, "/v1/embeddings", [], b"{}")
            assert await skipped(1) == {"not_generation": 1}
            assert reading == {threading.get_ident()}, "read on the control loop, not on the thread that handed it over"
            probing.shadow.tap("/metrics", [], b"")
            for _ in range(70):
                probing.shadow.tap("/v1/completions", [], b"{")
            assert probing.report.skipped == {"not_generation": 1}, "nothing is read in the call"
            assert await skipped(71) == {"not_generation": 1, "busy": 70 - 64, "not_json": 64}

    live(scenario())


def test_where_every_pass_would_stall_too_long_the_reason_says_so() -> None:
    async def scenario() -> None:
        async with Probing(FakeReference(seconds=0.1), max_stall_ms=1) as probing:
            for _ in range(3):
                probing.client_asks()
            await probing.until(lambda: probing.drops().get("stall") == 3)
            assert "; drawn and dropped: stall 3 (a pass is predicted to stall" in probing.report.reason

    live(scenario())


# --- an accepted baseline ---


def test_an_accepted_baseline_is_what_the_alarm_is_held_against() -> None:
    async def scenario() -> None:
        async with Probing(accepted=(0.05, 0.01)) as probing:
            report = probing.report
            assert report.alarm is not None
            assert (report.alarm.test.baseline, report.alarm.test.tolerance) == (0.05, 0.01)
            shown = report_document(report)
            assert (shown["state"], shown["baseline"], shown["tolerance"]) == ("probing", 0.05, 0.01)
            assert 0.03 < shown["measured_baseline"] < 0.033
            exported = generate_latest(_registry(probing)).decode()
            assert "kvguard_shadow_baseline_nats 0.05\n" in exported
            assert "kvguard_shadow_noise_floor_nats 0.03" in exported

    live(scenario())


def test_a_start_above_the_accepted_baseline_is_a_regression() -> None:
    async def scenario() -> None:
        async with Probing(accepted=(0.01, 0.005)) as probing:
            assert probing.report.state == "regression"
            assert "more than the accepted baseline 0.01 + tolerance 0.005" in probing.report.reason

    live(scenario())


def _registry(probing: Probing) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ShadowCollector(lambda: probing.report))
    return registry


# --- live what-if ---


def test_live_probes_try_what_is_watched() -> None:
    wanted = Choice(label="fp8_e5m2 nearest", format="fp8_e5m2")

    async def scenario() -> None:
        async with Probing(FakeReference({**TRUNCATES, wanted.label: 0.3})) as probing:
            await probed(probing)
            assert probing.report.whatif == {}
            assert probing.shadow.watch([wanted]) == ""
            await probed(probing, 3)
            found = report_document(probing.report)["whatif"]
            assert list(found) == [COST, wanted.label]
            assert [one["requests"] for one in found.values()] == [3, 3], "the cost of the same requests"
            against_exact = 0.3 - TRUNCATES["16bit"]
            assert found[wanted.label]["abs_delta"]["value"] == pytest.approx(against_exact, rel=0.11), (
                "the engine is not 16-bit"
            )
            assert probing.shadow.watch([]) == ""
            await probed(probing)
            assert probing.report.whatif == {}
            assert probing.reference.asked[-1] != wanted.label
            assert report_document(probing.report)["estimates"][COST]["requests"] == 5

    live(scenario())


def test_where_nothing_can_be_watched() -> None:
    wanted = Choice(label="fp8_e5m2 nearest", format="fp8_e5m2")

    async def scenario() -> None:
        probing = Probing()
        assert probing.shadow.watch([wanted]) == "shadow probes are checking: the self-check has not run yet"
        async with Probing(FakeReference(choices_possible=False)) as external:
            assert "no fake-quantized passes" in external.shadow.watch([wanted])

    live(scenario())


# --- what requests span ---


def test_what_clients_requests_span_is_put_together_and_the_self_checks_is_not() -> None:
    side = Side(amax=(2.0,), count=1, saturated=0, underflowed=0, subnormal=0)
    ranges = {"layer": LayerRange(k=side, v=side)}

    async def scenario() -> None:
        async with Probing(FakeReference(ranges=ranges)) as probing:
            assert ranges_document(probing.report, "0.32.0") is None
            await probed(probing, 3)
            found = ranges_document(probing.report, "0.32.0")
            assert found is not None
            assert (found["sequences"], found["tokens"]) == (3, 3 * 23)
            assert found["ranges"]["layer"]["k"] == {**side.model_dump(mode="json"), "count": 3}

    live(scenario())


@pytest.mark.parametrize(("running", "seconds"), [(0.0, 0.3), (3.0, 0.8)])
def test_a_replay_costs_its_part_of_the_batch_where_others_run_beside_it(running: float, seconds: float) -> None:
    async def scenario() -> None:
        async with Probing(FakeReference(seconds=0.1), gap_share=1) as probing:
            for total in (0.0, 1e6):
                probing.shadow._sampler.generated(total)
            probing.load = EngineFigures(running=running, waiting=0.0, kv_pinned_ratio=0.1, generated_total=1e6)
            checked = len(probing.engine.asked)

            def slowly(_: int) -> dict[str, Any]:
                probing.clock.now += 2.0
                return answer()

            probing.engine.says = slowly
            probing.client_asks()
            await probing.until(lambda: probing.report.probes == 1)
            assert len(probing.engine.asked) == checked + 1
            assert probing.shadow._sampler._budget._books[-1].cost == pytest.approx(seconds)

    live(scenario())
