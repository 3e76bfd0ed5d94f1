"""A report of shadow probes in which every figure is known, for the panels that show them."""

from __future__ import annotations

from kvguard.shadow.candidate import Reason
from kvguard.shadow.control import Control
from kvguard.shadow.fidelity import Fidelity
from kvguard.shadow.models import COST, UNEXPLAINED, Stratum
from kvguard.shadow.report import ShadowReport
from kvguard.shadow.sequential import AlarmTest, begin
from kvguard.shadow.statistics import Sums
from kvguard.shadow.tally import Count, Drop, Row
from shadow_streams import scored


def probed() -> ShadowReport:
    """Twelve requests of one turn and short prompts."""
    where = Stratum("0-256", "1", "")
    sums = {
        name: {where: sum((Sums.of(4.0, scored(mean + 0.01 * n, flips=n % 2)) for n in range(12)), Sums())}
        for name, mean in ((COST, 0.1), (UNEXPLAINED, 0.03))
    }
    return ShadowReport(
        state="probing",
        reference="in-engine",
        fidelity=Fidelity(explained_by="fp8_e4m3 truncate", residuals={"16bit": 0.1}, requests=12, reason="r"),
        control=Control(blind="", power=0.95, probes=100, streams=200, effect=0.4, target=0.1),
        baseline=0.03,
        measured_baseline=0.025,
        tolerance=0.02,
        alarm=begin(AlarmTest(baseline=0.03, tolerance=0.02), blind=""),
        sums=sums,
        probes=12,
        collapsed=0,
        skipped={str(next(iter(Reason))): 2},
        rows=(Row(where, 0.05, Count(9, 9), Count(), Count(), Count(), Count(1, 1), {next(iter(Drop)): Count(2, 20)}),),
        pass_seconds=1.5,
        stalls_over_budget=2,
    )
