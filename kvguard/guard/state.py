"""The states of a guarded engine and the one pure function that moves between them."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a guarded engine is in its life."""

    STARTING = "starting"
    VERIFYING = "verifying"
    SERVING = "serving"
    REFUSED = "refused"
    DRIFTED = "drifted"
    DRAINING = "draining"
    STOPPED = "stopped"


class Event(StrEnum):
    """What happened to it."""

    ENGINE_HEALTHY = "engine_healthy"
    VERDICT_ALLOWS = "verdict_allows"
    VERDICT_REFUSES = "verdict_refuses"
    DRIFT_FOUND = "drift_found"
    DRIFT_GONE = "drift_gone"
    ENGINE_LOST = "engine_lost"
    STOP_REQUESTED = "stop_requested"
    ENGINE_ENDED = "engine_ended"
    STOPPED = "stopped"


_TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.ENGINE_HEALTHY): State.VERIFYING,
    (State.STARTING, Event.VERDICT_REFUSES): State.REFUSED,
    (State.VERIFYING, Event.VERDICT_ALLOWS): State.SERVING,
    (State.VERIFYING, Event.VERDICT_REFUSES): State.REFUSED,
    (State.SERVING, Event.DRIFT_FOUND): State.DRIFTED,
    (State.DRIFTED, Event.DRIFT_GONE): State.SERVING,
    # An engine that is not ours may go away and come back; then it is as at its start.
    (State.VERIFYING, Event.ENGINE_LOST): State.STARTING,
    (State.SERVING, Event.ENGINE_LOST): State.STARTING,
    (State.DRIFTED, Event.ENGINE_LOST): State.STARTING,
    (State.REFUSED, Event.ENGINE_LOST): State.STARTING,
    (State.SERVING, Event.STOP_REQUESTED): State.DRAINING,
    (State.DRIFTED, Event.STOP_REQUESTED): State.DRAINING,
    (State.STARTING, Event.STOP_REQUESTED): State.STOPPED,
    (State.VERIFYING, Event.STOP_REQUESTED): State.STOPPED,
    (State.REFUSED, Event.STOP_REQUESTED): State.STOPPED,
    (State.DRAINING, Event.STOPPED): State.STOPPED,
    (State.STARTING, Event.ENGINE_ENDED): State.STOPPED,
    (State.VERIFYING, Event.ENGINE_ENDED): State.STOPPED,
    (State.SERVING, Event.ENGINE_ENDED): State.STOPPED,
    (State.DRIFTED, Event.ENGINE_ENDED): State.STOPPED,
    (State.DRAINING, Event.ENGINE_ENDED): State.STOPPED,
}


def transition(state: State, event: Event) -> State:
    """The state after `event`; an event that means nothing in a state leaves it (a refused engine's exit, say)."""
    return _TRANSITIONS.get((state, event), state)
