"""Cases about comparing two caches: what makes it unfair, and what few answers can say."""

from __future__ import annotations

import pytest

from compare_fakes import arm, arms, plan, record
from kvguard.compare.equal import check_arms, check_backends
from kvguard.compare.judge import judge
from kvguard.compare.models import AGAIN, REFERENCE, WEAK
from kvguard.compare.outcome import ArmResult, Outcome, Rules
from kvguard.compare.statistics import wilson
from kvguard.record.statement import Statement
from kvguard.vocabulary import PolicyRefusal, ScaleState

FP8 = "fp8_e4m3"
RULES = Rules()


def right(place: int) -> float:
    return 1.0


def below(count: int):
    """The first so many items right, the others wrong."""
    return lambda place: 1.0 if place < count else 0.0


def of(outcome: Outcome, name: str = FP8) -> ArmResult:
    return next(one for one in outcome.arms if one.arm == name)


# --- unfair ---


def test_49_another_attention_backend_is_another_comparison():
    asked = plan(items=2)
    sixteen, quantized = (arm(name, asked).effective for name in (REFERENCE, FP8))
    moved = quantized.model_copy(update={"attention_backends": ("FLASHINFER",)})
    with pytest.raises(PolicyRefusal, match=r"other attention backends .*CPU_ATTN, there FLASHINFER"):
        check_backends(FP8, moved, REFERENCE, sixteen)


def test_79_speculative_decoding_in_one_arm_is_refused():
    draft = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
    asked = plan(items=2)
    other = arm(FP8, asked, record=record(FP8, ScaleState.UNIT_DEFAULT, extra_argv=draft))
    with pytest.raises(PolicyRefusal, match=r"differ in more than their KV cache.*--speculative-config"):
        check_arms([arm(REFERENCE, asked), other])
    equal = arm(REFERENCE, asked, record=record("bfloat16", ScaleState.NOT_QUANTIZED, extra_argv=draft))
    check_arms([equal, other])


def test_81_another_endpoint_or_template_is_refused():
    asked = plan(items=2)
    for difference, named in (({"chat_template": False}, "endpoint"), ({"template_digest": "sha256:ab"}, "chat template")):
        with pytest.raises(PolicyRefusal, match=f"differ in their {named}"):
            check_arms([arm(REFERENCE, asked), arm(FP8, asked, **difference)])
    with pytest.raises(PolicyRefusal, match="differ in their questions"):
        check_arms([arm(REFERENCE, asked), arm(FP8, plan(items=3))])


def test_89_a_verdict_is_of_one_model():
    """One model loses everything, another nothing; arms of the two are never put together."""
    asked = plan(items=100)
    lost = of(judge(arms(asked, lambda place: 0.0, below(80)), RULES))
    assert (lost.verdict, lost.tasks[0].paired.lost) == ("keep 16-bit", 80)
    kept = of(judge(arms(asked, below(70), below(70)), RULES))
    assert kept.verdict != "keep 16-bit"
    assert (kept.tasks[0].paired.lost, kept.tasks[0].paired.gained) == (0, 0)
    document = record(FP8, ScaleState.UNIT_DEFAULT)
    document["subject"][0]["digest"] = {"sha256": "e" * 64}
    other = Statement.model_validate(document).model_dump(mode="json", by_alias=True)
    with pytest.raises(PolicyRefusal, match="differ in more than their KV cache"):
        check_arms([arm(REFERENCE, asked), arm(FP8, asked, record=other)])


# --- too little to tell ---


def test_36_inside_the_noise_is_inconclusive_with_its_interval():
    found = of(judge(arms(plan(items=100), below(79), below(80)), RULES))
    paired = found.tasks[0].paired
    assert found.verdict == "cannot tell"
    assert (paired.items, paired.lost) == (100, 1)
    assert paired.low < 0.01 < paired.high
    assert "items would tell" in found.why[0]


def test_82_ten_items_show_nothing_below_tens_of_points():
    found = of(judge(arms(plan(items=10), below(6), below(7)), RULES))
    task = found.tasks[0]
    assert found.verdict == "cannot tell"
    assert task.paired.smallest > 0.2
    assert task.needed > 100


def test_88_five_needles_of_five_are_no_proof():
    asked = plan(("retrieval",), items=5)
    found = of(judge(arms(asked, right), RULES))
    assert found.verdict == "cannot tell"
    assert found.tasks[0].paired.high > 0.3
    assert wilson(5, 5)[0] == pytest.approx(0.566, abs=1e-3)
    assert {(cell.items, cell.right) for cell in found.cells} == {(1, 1.0)}
    assert all(cell.low == pytest.approx(wilson(1, 1)[0]) and cell.high == 1.0 for cell in found.cells)


def test_85_one_answer_an_item_is_said_and_the_reference_is_always_repeated():
    once = judge(arms(plan(items=20), right), RULES)
    assert any("one greedy answer for each item" in note for note in once.notes)
    asked = plan(items=20).model_copy(update={"samples": 2})
    twice = [
        one.model_copy(update={"answers": (*one.answers, *(row.model_copy(update={"sample": 1}) for row in one.answers))})
        for one in arms(asked, right)
    ]
    outcome = judge(twice, RULES)
    assert not any("one greedy answer" in note for note in outcome.notes)
    assert of(outcome).tasks[0].paired.items == 20, "an item counts once, however often it is answered"
    single = judge([one for one in arms(plan(items=20), right) if one.arm != AGAIN], RULES)
    assert of(single).tasks[0].void == "the 16-bit arm was not run again"


# --- lengths ---


def test_48_answers_that_all_run_on_are_a_loss_and_said():
    """The cache is broken: every answer runs to max_tokens where the 16-bit arm's end after some words."""
    asked = plan(items=60)
    longest = asked.items[0].max_tokens
    broken = arm(FP8, asked, lambda place: 0.0, finish="length", tokens=longest)
    found = of(judge([arm(REFERENCE, asked), broken, arm(WEAK, asked, lambda place: 0.0), arm(AGAIN, asked)], RULES))
    assert found.verdict == "keep 16-bit"
    assert "arithmetic: 60 answers run on to max_tokens, where the 16-bit arm's end by themselves" in found.findings
    # Where the 16-bit arm is cut as well, it is truncation, and the task is void.
    both = [arm(name, asked, finish="length", tokens=longest) for name in (REFERENCE, FP8, WEAK, AGAIN)]
    cut = of(judge(both, RULES))
    assert (cut.verdict, cut.findings) == ("cannot tell", ())
    assert "truncation, not loss" in cut.tasks[0].void
