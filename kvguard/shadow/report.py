"""What is known of an engine's answers at one moment, without prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvguard.reference.ranges import Spanned
from kvguard.shadow.control import Control
from kvguard.shadow.fidelity import Fidelity
from kvguard.shadow.models import Stratum
from kvguard.shadow.sequential import AlarmState, Status
from kvguard.shadow.statistics import Sums
from kvguard.shadow.tally import Row

_NOTHING = Spanned()


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """What is known now, without prompts. `state` is off, waiting, checking, probing, blind, refused or regression.

    `waiting` is for a reference that is away; `lost` counts how often it went. `equality` says how it is known to be the
    engine but for the KV cache. Of live probes' passes: their seconds, the longest one's, and how many
    took longer than a pass may stall the engine.
    """

    state: str = "off"
    reason: str = ""
    reference: str = ""
    equality: str = ""
    lost: int = 0
    fidelity: Fidelity | None = None
    control: Control | None = None
    baseline: float | None = None
    measured_baseline: float | None = None
    tolerance: float | None = None
    alarm: AlarmState | None = None
    sums: dict[str, dict[Stratum, Sums]] = field(default_factory=dict)
    whatif: dict[str, Sums] = field(default_factory=dict)
    spanned: Spanned = _NOTHING
    probes: int = 0
    collapsed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    pass_seconds: float = 0.0
    longest_pass_seconds: float = 0.0
    stalls_over_budget: int = 0

    def total(self, comparison: str) -> Sums:
        """All strata of a comparison together."""
        return sum(self.sums.get(comparison, {}).values(), Sums())


def state_of(alarm: AlarmState | None) -> str:
    """The report's state while probes run."""
    if alarm is None:
        return "probing"
    return {Status.REGRESSION: "regression", Status.BLIND: "blind"}.get(alarm.status, "probing")
