"""The same comparison with graphs and compilation on, as served in production, beside the eager one."""

from __future__ import annotations

from kvguard.compare.outcome import EAGER_ONLY, RANK, ArmResult, Outcome
from kvguard.compare.table import aside
from kvguard.vocabulary import PolicyRefusal

DIRECTORY = "production"
"""Where it stands, in the directory of the eager one."""


def with_production(eager: Outcome, production: Outcome) -> Outcome:
    """Both as one, each arm with the worse verdict and the reasons of both. Raises PolicyRefusal where they are no pair."""
    for what in ("model", "engine", "plan_digest", "limits", "rules"):
        ours, theirs = getattr(eager, what), getattr(production, what)
        if ours != theirs:
            raise PolicyRefusal(
                f"eager arms and those with graphs and compilation differ in their {what} ({ours}, there {theirs}); "
                "give arms of one comparison"
            )
    judged = {arm.arm: arm for arm in production.arms if arm.verdict is not None}
    if alone := {arm.arm for arm in eager.arms if arm.verdict is not None} ^ judged.keys():
        named = ", ".join(sorted(alone))
        raise PolicyRefusal(
            f"arms in one of both modes only: {named}; give the same arms eagerly and with graphs and compilation"
        )
    arms = tuple(_worse(arm, judged[arm.arm]) if arm.verdict is not None else arm for arm in eager.arms)
    notes = [note for note in eager.notes if note != EAGER_ONLY]
    notes += [f"graphs and compilation: {note}" for note in production.notes if note not in eager.notes]
    return eager.model_copy(update={"arms": arms, "notes": tuple(notes), "production": production})


def _worse(eager: ArmResult, production: ArmResult) -> ArmResult:
    both = (("eager", eager), ("graphs and compilation", production))
    verdict = min((str(arm.verdict) for _, arm in both), key=RANK.__getitem__)
    why = tuple(f"{mode}: {arm.verdict}: {reason}" for mode, arm in both for reason in arm.why)
    findings = (*eager.findings, *(f"graphs and compilation: {told}" for told in aside(production)))
    return eager.model_copy(update={"verdict": verdict, "why": why, "findings": findings})
