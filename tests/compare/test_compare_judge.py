"""Verdicts from finished arms: what is refused, what is void, what is said."""

from __future__ import annotations

import pytest

from compare_fakes import arm, arms, plan, record, with_divergence
from kvguard.compare.judge import judge
from kvguard.compare.models import AGAIN, REFERENCE, WEAK, ArmFile
from kvguard.compare.outcome import ArmResult, Rules
from kvguard.compare.table import aside, decision_rows, task_rows
from kvguard.vocabulary import Confidence, PolicyRefusal, ScaleState

RULES = Rules()
MANY = plan(items=400)


def right(place: int) -> float:
    return 1.0


def loses(share: float) -> object:
    """Every item right but this share of the places, spread evenly."""
    step = round(1 / share)
    return lambda place: 0.0 if place % step == 0 else 1.0


def of(found: object, name: str = "fp8_e4m3") -> ArmResult:
    return next(one for one in found.arms if one.arm == name)  # type: ignore[attr-defined]


def test_no_loss_on_enough_items_is_a_free_win() -> None:
    result = of(judge(arms(MANY, right), RULES))
    assert result.verdict == "free win", result.why
    assert result.capacity.bytes_per_token == pytest.approx(11520, rel=1e-2)
    assert result.capacity.ratio == pytest.approx(2.0)
    assert result.capacity.batch_8k == 93184 // 8192
    assert result.tasks[0].weak.seen


def test_a_shown_loss_keeps_sixteen_bit() -> None:
    result = of(judge(arms(MANY, loses(0.1)), RULES))  # type: ignore[arg-type]
    assert result.verdict == "keep 16-bit"
    assert "arithmetic: a loss of 10.0 points is shown" in result.why[0]


def test_a_small_shown_loss_within_the_margin_is_still_free() -> None:
    """What is accepted is a loss under the margin, not none at all."""
    result = of(judge(arms(plan(items=2000), loses(0.01)), RULES))  # type: ignore[arg-type]
    assert result.tasks[0].paired is not None
    assert result.tasks[0].paired.low > 0
    assert result.verdict == "free win"


def test_few_items_cannot_tell_and_say_how_many_would() -> None:
    result = of(judge(arms(plan(items=20), right), RULES))
    assert result.verdict == "cannot tell"
    assert result.tasks[0].needed == 133
    assert "about 133 items would tell" in result.why[0]


def test_quick_never_says_free_win_and_may_say_keep() -> None:
    assert of(judge(arms(plan(items=400, quick=True), right), RULES)).verdict == "cannot tell"
    assert of(judge(arms(plan(items=40, quick=True), lambda place: 0.0), RULES)).verdict == "keep 16-bit"


def test_a_task_at_the_floor_cannot_tell_because_the_weak_arm_is_not_seen() -> None:
    result = of(judge(arms(MANY, lambda place: 0.0, lambda place: 0.0), RULES))
    assert result.verdict == "cannot tell"
    assert "no loss is seen, and a loss of the margin would not be either" in result.why[0]


def test_few_items_at_the_floor_are_not_said_to_tell_when_they_are_more() -> None:
    result = of(judge(arms(plan(items=20), lambda place: 0.0, lambda place: 0.0), RULES))
    assert result.tasks[0].needed is None
    assert "more items of this task would not tell, since ruined scales lose nothing on it" in result.why[0]


def test_without_a_weak_arm_nothing_is_free() -> None:
    files = [one for one in arms(MANY, right) if one.arm != WEAK]
    outcome = judge(files, RULES)
    assert of(outcome).verdict == "cannot tell"
    assert "no weak arm: no task can say free win" in outcome.notes


def test_without_the_second_sixteen_bit_arm_a_task_is_void() -> None:
    files = [one for one in arms(MANY, right) if one.arm != AGAIN]
    assert "not run again" in of(judge(files, RULES)).why[0]


def test_a_reference_that_differs_from_itself_voids_the_task() -> None:
    files = arms(MANY, loses(0.1))  # type: ignore[arg-type]
    files[3] = arm(AGAIN, MANY, loses(0.1))  # type: ignore[arg-type]
    result = of(judge(files, RULES))
    assert result.verdict == "cannot tell"
    assert "differs from itself by 10.0 points" in result.why[0]


def test_truncation_is_not_loss() -> None:
    """max_tokens too small for all arms: wrong answers, and no verdict from them."""
    asked = plan(items=100)
    files = [
        arm(REFERENCE, asked, finish="length", tokens=320),
        arm("fp8_e4m3", asked, lambda place: 0.0, finish="length", tokens=320),
        arm(WEAK, asked, lambda place: 0.0),
        arm(AGAIN, asked, finish="length", tokens=320),
    ]
    result = of(judge(files, RULES))
    assert result.verdict == "cannot tell"
    assert "truncation, not loss; raise --max-tokens" in result.why[0]
    assert result.tasks[0].truncated_reference == 1.0


def test_an_arm_that_runs_on_where_sixteen_bit_ended_early_loses() -> None:
    asked = plan(items=100)
    files = arms(asked, right)
    files[1] = arm("fp8_e4m3", asked, lambda place: 0.0, finish="length", tokens=320)
    result = of(judge(files, RULES))
    assert result.tasks[0].truncated_arm == 0.0
    assert result.verdict == "keep 16-bit"


def test_a_collapse_does_not_hide_the_losses() -> None:
    files = arms(MANY, right)
    files[1] = arm("fp8_e4m3", MANY, lambda place: 0.0, collapse=lambda place: float(place == 3))
    why = of(judge(files, RULES)).why
    assert [reason.partition(" (")[0] for reason in why] == [
        "arithmetic: answers collapse, where the 16-bit arm's never do",
        "arithmetic: a loss of 100.0 points is shown",
    ]


def test_one_collapse_is_enough_unless_sixteen_bit_collapses_too() -> None:
    def one(place: int) -> float:
        return float(place == 3)

    files = arms(MANY, right)
    files[1] = arm("fp8_e4m3", MANY, right, collapse=one)
    result = of(judge(files, RULES))
    assert result.verdict == "keep 16-bit"
    assert "arithmetic: answers collapse" in result.why[0]
    files[3] = arm(AGAIN, MANY, right, collapse=lambda place: float(place == 9))
    assert of(judge(files, RULES)).verdict == "free win"


def test_too_little_capacity_is_no_win() -> None:
    result = of(judge(arms(MANY, right), RULES.model_copy(update={"capacity_ratio": 2.5})))
    assert result.verdict == "cannot tell"
    assert "capacity: 2.00 times the tokens for each byte, required are 2.5" in result.why[0]


def test_unknown_capacity_is_no_win() -> None:
    files = arms(MANY, right)
    blank = files[1].effective.model_copy(update={"bytes_per_token": None})
    files[1] = files[1].model_copy(update={"effective": blank})
    assert of(judge(files, RULES)).verdict == "cannot tell"


def test_tasks_are_accounted_for_together() -> None:
    """A p-value of 0.03 shows a loss alone, and not among four tasks."""

    def five(place: int) -> float:
        return 0.0 if place < 5 else 1.0  # sign test: 1/32

    alone = of(judge(arms(plan(items=60), five), RULES))
    assert alone.verdict == "keep 16-bit"
    four = plan(("arithmetic", "strings", "conversation", "retrieval"), items=60)
    files = arms(four, right)
    answers = tuple(
        row.model_copy(update={"score": 0.0}) if row.task == "arithmetic" and int(row.item[-4:]) < 5 else row
        for row in files[1].answers
    )
    files[1] = files[1].model_copy(update={"answers": answers})
    assert of(judge(files, RULES)).verdict == "cannot tell"


def test_divergence_is_estimated_by_arm_and_by_text() -> None:
    deltas = {REFERENCE: 0.02, "fp8_e4m3": 0.11, WEAK: 4.0, AGAIN: 0.02}
    outcome = judge(with_divergence(arms(plan(items=10), right), deltas), RULES)
    quantized = of(outcome).divergence
    assert quantized.decode.value == pytest.approx(0.11 * 1.1)
    assert quantized.by_text == pytest.approx((0.11, 0.121, 0.132))
    assert quantized.forced.value == pytest.approx((0.11 - 0.02) / 2)
    assert of(outcome, REFERENCE).divergence.forced.value == 0.0


# Comparisons that are none


def test_arms_secretly_equal_are_refused() -> None:
    """A checkpoint whose scheme forces FP8 in both arms: the 16-bit arm's record shows it."""
    files = arms(MANY, right)
    files[0] = arm(REFERENCE, MANY, dtype="fp8_e4m3")
    with pytest.raises(PolicyRefusal, match=r"arms 16bit and fp8_e4m3 run the same KV cache \(fp8_e4m3, scales unit_default\)"):
        judge(files, RULES)


def test_arms_that_differ_in_more_than_the_cache_are_refused_by_name() -> None:
    files = arms(MANY, right)
    other = record("fp8_e4m3", ScaleState.UNIT_DEFAULT, version="0.31.0")
    files[1] = arm("fp8_e4m3", MANY, record=other)
    with pytest.raises(
        PolicyRefusal, match=r"differ in more than their KV cache, by their records: engine.version \(0.32.0, there 0.31"
    ):
        judge(files, RULES)


def test_identical_outputs_are_invalid_and_not_free_of_loss() -> None:
    asked = plan(items=30)
    files = [arm(one.arm, asked, text="the same") for one in arms(asked, right)]
    with pytest.raises(PolicyRefusal, match="all 30 outputs are identical"):
        judge(files, RULES)


def test_answers_that_are_cut_may_be_identical_and_are_truncation() -> None:
    """The first words of two answers are often the same."""
    asked = plan(items=30)
    short = asked.model_copy(update={"items": tuple(item.model_copy(update={"max_tokens": 2}) for item in asked.items)})
    files = [arm(one.arm, short, text="the same", finish="length", tokens=2) for one in arms(asked, right)]
    result = of(judge(files, RULES))
    assert result.verdict == "cannot tell"
    assert "truncation, not loss" in result.why[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"limits": {"max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 2048}},
            "max_model_len .2048, there 4096",
        ),
        ({"template_digest": "sha256:" + "1" * 64}, "differ in their chat template"),
        ({"chat_template": False}, "differ in their endpoint"),
        ({"plan": plan(items=400, seed=1)}, "differ in their questions"),
    ],
)
def test_other_differences_are_refused(change: dict[str, object], said: str) -> None:
    files = arms(MANY, right)
    files[1] = files[1].model_copy(update=change)
    with pytest.raises(PolicyRefusal, match=said):
        judge(files, RULES)


def test_another_backend_is_refused_with_the_cure() -> None:
    files = arms(MANY, right)
    moved = files[1].effective.model_copy(update={"attention_backends": ("TRITON_ATTN",)})
    files[1] = files[1].model_copy(update={"effective": moved})
    with pytest.raises(PolicyRefusal, match="--arms 16bit@TRITON_ATTN,fp8_e4m3@TRITON_ATTN"):
        judge(files, RULES)


def moved(quantized: object, own: object) -> list[ArmFile]:
    """The reference and fp8_e4m3 on the backend that FP8 moves to, and 16-bit on its own."""
    to = [one.model_copy(update={"arm": "16bit@TRITON_ATTN"}) if one.arm == REFERENCE else one for one in arms(MANY, quantized)]  # type: ignore[arg-type]
    to = [
        one.model_copy(update={"effective": one.effective.model_copy(update={"attention_backends": ("TRITON_ATTN",)})})
        for one in to
    ]
    return [*to[:2], arm(REFERENCE, MANY, own), *to[2:]]  # type: ignore[arg-type]


def test_a_moved_backend_without_a_loss_is_free_and_said() -> None:
    outcome = judge(moved(right, right), RULES)
    assert of(outcome).verdict == "free win"
    assert of(outcome, REFERENCE).verdict is None
    assert of(outcome).tasks[0].moved is not None
    assert "a quantized cache moves the attention backend from CPU_ATTN to TRITON_ATTN" in " ".join(outcome.notes)
    assert "not judged: 16-bit on CPU_ATTN" in decision_rows(outcome)[2][-1]
    assert [row[-1] for row in task_rows(outcome) if row[1] == REFERENCE] == ["not judged: what the backend alone changes"]
    assert "arithmetic: against 16-bit on its own backend +0.0 points lost" in aside(of(outcome))[0]


def test_a_loss_of_the_backend_alone_keeps_sixteen_bit_and_names_the_backend() -> None:
    """FP8 loses nothing against 16-bit on its backend, and both lose a tenth of what 16-bit gets right on its own."""
    lossy = loses(0.1)
    files = moved(lossy, right)
    for place, name in ((0, "16bit@TRITON_ATTN"), (4, AGAIN)):
        answers = arm(name, MANY, lossy).answers  # type: ignore[arg-type]
        files[place] = files[place].model_copy(update={"answers": answers})
    result = of(judge(files, RULES))
    assert result.tasks[0].paired is not None
    assert result.tasks[0].paired.loss == 0
    assert result.verdict == "keep 16-bit"
    assert result.why == (
        "arithmetic: against 16-bit on CPU_ATTN, backend and cache together lose 10.0 points (at least 7.8 points)",
    )


def test_sixteen_bit_on_its_own_backend_diverges_by_its_decode_alone() -> None:
    """It was forced over texts of its own, whose tokens are not the reference's."""
    files = moved(right, right)
    deltas = {"16bit@TRITON_ATTN": 0.02, "fp8_e4m3": 0.11, REFERENCE: 0.05, WEAK: 4.0, AGAIN: 0.02}
    files = with_divergence(files, deltas)
    longer = tuple(
        row.model_copy(update={"logprobs": (*row.logprobs, -1.0), "top1": (*row.top1, 5)}) for row in files[2].forced
    )
    files[2] = files[2].model_copy(update={"forced": longer})
    outcome = judge(files, RULES)
    assert of(outcome, REFERENCE).divergence.decode.value == pytest.approx(0.05 * 1.1)
    assert of(outcome, REFERENCE).divergence.forced.value is None
    assert of(outcome).divergence.forced.value == pytest.approx((0.11 - 0.02) / 2)


def test_truncation_of_sixteen_bit_on_its_own_backend_voids_the_task() -> None:
    files = moved(right, right)
    files[2] = arm(REFERENCE, MANY, finish="length", tokens=320)
    assert "truncation, not loss" in of(judge(files, RULES)).why[0]


def test_an_echo_is_no_evidence_of_a_difference() -> None:
    files = arms(MANY, right)
    echoed = files[1].effective.model_copy(update={"confidence": Confidence.ECHOED})
    files[1] = files[1].model_copy(update={"effective": echoed})
    with pytest.raises(PolicyRefusal, match="by echoed evidence only"):
        judge(files, RULES)


def test_failed_requests_void_a_task_and_say_why() -> None:
    files = arms(plan(items=20), right)
    failed = files[1].answers[0].model_copy(update={"problem": "HTTP 400: too long: your prompt", "score": 0.0})
    files[1] = files[1].model_copy(update={"answers": (failed, *files[1].answers[1:])})
    why = "arithmetic: 1 requests failed (HTTP 400); the engine's words are in arms/"
    assert of(judge(files, RULES)).why == (why,)
