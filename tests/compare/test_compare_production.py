"""The eager pair and the one with graphs and compilation as one outcome: the worse verdict, the reasons of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare_fakes import arm, arms, plan
from kvguard.compare.finished import read_arms
from kvguard.compare.gate import Gate, below
from kvguard.compare.judge import judge
from kvguard.compare.markdown import markdown
from kvguard.compare.models import AGAIN, REFERENCE, WEAK, ArmFile
from kvguard.compare.outcome import EAGER_ONLY, Outcome, Rules
from kvguard.compare.page import page
from kvguard.compare.production import with_production
from kvguard.compare.results import file_stem
from kvguard.vocabulary import PolicyRefusal, UsageError

MANY = plan(items=400)
COMPILED = ("vllm", "serve", "models/small")


def compiled(files: list[ArmFile]) -> list[ArmFile]:
    return [one.model_copy(update={"command": COMPILED}) for one in files]


def eager(share: float = 1.0) -> Outcome:
    """Where fp8_e4m3 gets this share of the items right."""
    return judge(arms(MANY, lambda place: float(place < share * 400)), Rules())


def production(share: float = 1.0) -> Outcome:
    return judge(compiled(arms(MANY, lambda place: float(place < share * 400))), Rules())


def test_both_free_is_free() -> None:
    served = production()
    beside = served.arms[1].model_copy(update={"findings": ("a finding",)})
    found = with_production(eager(), served.model_copy(update={"arms": (served.arms[0], beside, *served.arms[2:])}))
    assert found.arms[1].verdict == "free win"
    assert [reason[:30] for reason in found.arms[1].why] == ["eager: free win: every task's ", "graphs and compilation: free w"]
    assert found.arms[1].findings == ("graphs and compilation: a finding",)
    assert EAGER_ONLY in eager().notes
    assert EAGER_ONLY not in found.notes
    assert below(Gate(), found) == ()


@pytest.mark.parametrize(("ours", "theirs"), [(1.0, 0.8), (0.8, 1.0)])
def test_a_loss_in_one_mode_is_the_verdict_and_the_gate_sees_it(ours: float, theirs: float) -> None:
    found = with_production(eager(ours), production(theirs))
    assert found.arms[1].verdict == "keep 16-bit"
    assert below(Gate(require="cannot tell"), found)
    assert found.production is not None
    assert found.production.arms[1].verdict == ("keep 16-bit" if theirs < 1.0 else "free win")


def test_every_report_shows_both() -> None:
    found = with_production(eager(), production(0.8))
    for text in (page(found), markdown(found)):
        assert "With graphs and compilation, as served in production" in text
        assert "graphs and compilation: keep 16-bit: arithmetic: a loss of 20.0 points is shown" in text
    assert page(found).count("<table") > page(eager()).count("<table")


def test_what_is_no_pair_is_refused() -> None:
    other = judge(compiled(arms(plan(items=50), lambda place: 1.0)), Rules())
    with pytest.raises(PolicyRefusal, match="differ in their plan_digest"):
        with_production(eager(), other)
    more = judge([*compiled(arms(MANY, lambda place: 1.0)), arm("fp8_e5m2", MANY, command=COMPILED)], Rules())
    with pytest.raises(PolicyRefusal, match="arms in one of both modes only: fp8_e5m2"):
        with_production(eager(), more)


def test_files_of_both_modes_are_told_apart_by_their_commands(tmp_path: Path) -> None:
    paths = []
    for mode, files in (("b", arms(plan(items=3), lambda place: 1.0)), ("a", compiled(arms(plan(items=3), lambda place: 1.0)))):
        (tmp_path / mode).mkdir()
        for one in files:
            paths.append(tmp_path / mode / f"{file_stem(one.arm)}.json")
            paths[-1].write_text(one.model_dump_json())
    found = read_arms(paths)
    assert [[one.arm for one in group] for group in found] == [[REFERENCE, "fp8_e4m3", WEAK, AGAIN]] * 2
    assert [group[0].command == COMPILED for group in found] == [False, True]
    assert len(read_arms(paths[4:])) == 1
    with pytest.raises(UsageError, match="quantized one among the arms that ran with graphs and compilation; found 16bit"):
        read_arms(paths[:5])
