"""The shadow report and a one-shot probe as JSON data: estimates with intervals, by stratum, and no prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvguard.shadow.models import COST, UNEXPLAINED, Observation
from kvguard.shadow.report import ShadowReport
from kvguard.shadow.sequential import collapse_of
from kvguard.shadow.statistics import Measure, Sums, sums_of

_SHOWN = (
    Measure.SIGNED_DELTA,
    Measure.ABS_DELTA,
    Measure.FLIP_RATE,
    Measure.FIRST_FLIP_HAZARD,
    Measure.TV_LOW,
    Measure.TV_HIGH,
    Measure.KL_LOW,
)


def report_document(report: ShadowReport) -> dict[str, Any]:
    """What /shadow answers."""
    alarm = report.alarm
    return {
        "state": report.state,
        "reason": report.reason,
        "reference": report.reference,
        "equality": report.equality,
        "lost": report.lost,
        "fidelity": report.fidelity.model_dump(mode="json") if report.fidelity else None,
        "control": report.control.model_dump(mode="json") if report.control else None,
        "baseline": report.baseline,
        "measured_baseline": report.measured_baseline,
        "tolerance": report.tolerance,
        "alarm": {"status": str(alarm.status), "reason": alarm.reason, "evidence": alarm.wealth.value} if alarm else None,
        "probes": report.probes,
        "collapsed": report.collapsed,
        "pass_seconds": report.pass_seconds,
        "longest_pass_seconds": report.longest_pass_seconds,
        "stalls_over_budget": report.stalls_over_budget,
        "estimates": {name: estimates(report.total(name)) for name in (COST, UNEXPLAINED)},
        "whatif": {name: estimates(sums) for name, sums in report.whatif.items()},
        "strata": [
            {
                "prompt_tokens": where.prompt,
                "turns": where.turns,
                "adapter": where.adapter,
                "comparison": name,
                "estimates": estimates(sums),
            }
            for name, table in report.sums.items()
            for where, sums in table.items()
        ],
        "coverage": [
            {
                "prompt_tokens": row.stratum.prompt,
                "turns": row.stratum.turns,
                "adapter": row.stratum.adapter,
                "token_coverage": row.coverage,
                "offered": row.offered.requests,
                "not_included": row.not_included.requests,
                "queued": row.queued.requests + row.running.requests,
                "done": row.done.requests,
                "dropped": {str(cause): count.requests for cause, count in row.dropped.items()},
            }
            for row in report.rows
        ],
        "skipped": report.skipped,
    }


def ranges_document(report: ShadowReport, engine: str) -> dict[str, Any] | None:
    """What /shadow/ranges answers; None before anything was measured."""
    return {"engine": engine, **report.spanned.model_dump(mode="json")} if report.spanned.sequences else None


def estimates(sums: Sums) -> dict[str, Any]:
    """Every measure of one comparison; one without samples says so."""
    return {
        "requests": sums.requests,
        "tokens": sums.tokens,
        "collapsed": sums.collapsed,
        **{str(measure): sums.estimate(measure).model_dump(mode="json") for measure in _SHOWN},
    }


def probe_document(observations: Sequence[Observation], problems: Sequence[str]) -> dict[str, Any]:
    """What a one-shot probe answers: estimates for cost, unexplained and each what-if, in the order asked."""
    labels = list(dict.fromkeys(label for seen in observations for label in seen.scores))
    return {
        "requests": len(observations),
        "collapsed": sum(bool(collapse_of(seen)) for seen in observations),
        "problems": list(problems),
        "estimates": {label: estimates(sums_of(observations, label)) for label in labels},
    }
