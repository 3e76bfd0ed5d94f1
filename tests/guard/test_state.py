"""The life of a guarded engine as a graph."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.state import Event, State, transition
from kvguard.vocabulary import Confidence, Effective, ScaleState


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([Event.ENGINE_HEALTHY, Event.VERDICT_ALLOWS, Event.STOP_REQUESTED, Event.STOPPED], State.STOPPED),
        ([Event.ENGINE_HEALTHY, Event.VERDICT_REFUSES], State.REFUSED),
        ([Event.VERDICT_REFUSES, Event.STOP_REQUESTED], State.STOPPED),
        ([Event.ENGINE_HEALTHY, Event.VERDICT_ALLOWS, Event.DRIFT_FOUND, Event.DRIFT_GONE], State.SERVING),
        ([Event.ENGINE_HEALTHY, Event.VERDICT_ALLOWS, Event.ENGINE_ENDED], State.STOPPED),
        ([Event.STOP_REQUESTED], State.STOPPED),
    ],
)
def test_lives(events: list[Event], end: State) -> None:
    state = State.STARTING
    for event in events:
        state = transition(state, event)
    assert state is end


@given(st.lists(st.sampled_from(Event)))
def test_serving_is_reached_only_through_a_verdict_and_stopped_is_final(events: list[Event]) -> None:
    state, allowed = State.STARTING, False
    for event in events:
        before, state = state, transition(state, event)
        allowed = allowed or (before is State.VERIFYING and event is Event.VERDICT_ALLOWS)
        if state in (State.SERVING, State.DRIFTED, State.DRAINING):
            assert allowed
        if before is State.STOPPED:
            assert state is State.STOPPED


def test_the_gate_follows_the_board() -> None:
    gate = Gate()
    board = Board(gate)
    board.update(
        effective=Effective(dtype="fp8_e4m3", confidence=Confidence.PROVEN, scales=ScaleState.CHECKPOINT),
        record_digest="sha256:ab",
    )
    assert not gate.snapshot.open
    assert dict(gate.snapshot.headers)[b"x-kvguard-kv-cache-dtype"] == b"unknown"
    board.move(Event.ENGINE_HEALTHY, "verifying")
    board.move(Event.VERDICT_ALLOWS, "serving")
    assert gate.snapshot.open
    assert dict(gate.snapshot.headers) == {
        b"x-kvguard-kv-cache-dtype": b"fp8_e4m3",
        b"x-kvguard-kv-scales": b"checkpoint",
        b"x-kvguard-confidence": b"proven",
        b"x-kvguard-record": b"sha256:ab",
    }
    board.move(Event.ENGINE_ENDED, "the engine ended")
    assert (gate.snapshot.open, gate.snapshot.reason) == (False, "the engine ended")
