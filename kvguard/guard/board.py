"""Where a guarded engine's status is posted: written by the guard, read by the management port and telemetry."""

from __future__ import annotations

from typing import Any

from kvguard.guard.gate import SERVING_STATES, UNKNOWN_HEADERS, Gate, Snapshot, Status, headers_for
from kvguard.guard.state import Event, State, transition
from kvguard.shadow.runner import Shadow
from kvguard.vocabulary import Claim

_RETRY_AFTER = {State.STARTING: 10, State.VERIFYING: 5}
_RETRY_LATER = 30


class Board:
    """The current status, run record and claims. One writer; readers get immutable values."""

    def __init__(self, gate: Gate) -> None:
        self.status = Status()
        self.record: dict[str, Any] | None = None
        self.claims: tuple[Claim, ...] = ()
        self.shadow: Shadow | None = None
        self.gate = gate

    def update(self, **changes: Any) -> None:
        """Replace fields of the status and refresh the gate."""
        self.status = self.status.model_copy(update=changes)
        status = self.status
        is_open = status.state in SERVING_STATES
        self.gate.snapshot = Snapshot(
            state=status.state,
            open=is_open,
            reason=status.reason,
            retry_after=_RETRY_AFTER.get(status.state, _RETRY_LATER),
            headers=headers_for(status.effective, status.record_digest) if is_open else UNKNOWN_HEADERS,
        )

    def move(self, event: Event, reason: str) -> State:
        """Apply an event; `reason` is one sentence for a 503's body and /readyz."""
        self.update(state=transition(self.status.state, event), reason=reason)
        return self.status.state
