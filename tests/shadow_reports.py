"""A report of shadow probes in which every figure is known."""

from __future__ import annotations

from collections.abc import Sequence

from kvguard.shadow.candidate import Reason
from kvguard.shadow.control import Control
from kvguard.shadow.fidelity import Fidelity
from kvguard.shadow.models import COST, UNEXPLAINED, Stratum
from kvguard.shadow.replay import Problem
from kvguard.shadow.report import ShadowReport
from kvguard.shadow.sequential import AlarmTest, begin
from kvguard.shadow.statistics import Sums
from kvguard.shadow.tally import Count, Drop, Row
from shadow_streams import scored

REASONS = {str(reason): 2 for reason in Reason} | {f"replay: {problem}": 3 for problem in Problem} | {"error": 1}


def full_report(strata: Sequence[Stratum]) -> ShadowReport:
    """Six requests of each stratum; every cause and every reason has been met."""
    dropped = {cause: Count(2, 20) for cause in Drop}
    return ShadowReport(
        state="probing",
        reference="in-engine",
        fidelity=Fidelity(explained_by="fp8_e4m3 truncate", residuals={"16bit": 0.1}, requests=12, reason="r"),
        control=Control(blind="", power=0.95, probes=100, streams=200, effect=0.4, target=0.1),
        baseline=0.03,
        measured_baseline=0.025,
        tolerance=0.02,
        alarm=begin(AlarmTest(baseline=0.03, tolerance=0.02), blind=""),
        sums={name: dict.fromkeys(strata, sums_of_six(mean)) for name, mean in ((COST, 0.1), (UNEXPLAINED, 0.03))},
        probes=48,
        collapsed=1,
        skipped=REASONS,
        rows=tuple(Row(where, 0.05, Count(9, 9), Count(), Count(), Count(), Count(1, 1), dropped) for where in strata),
        pass_seconds=1.5,
        stalls_over_budget=2,
    )


def sums_of_six(mean: float) -> Sums:
    """Of six requests of weight 4 about this mean."""
    return sum((Sums.of(4.0, scored(mean + 0.01 * n, flips=n % 2)) for n in range(6)), Sums())
