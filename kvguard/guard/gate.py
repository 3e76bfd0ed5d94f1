"""The gate: one frozen snapshot that the data plane reads for each request, and the status behind it."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from kvguard.evidence.metrics import EngineFigures
from kvguard.guard.state import State
from kvguard.vocabulary import Check, Effective, Frozen

SERVING_STATES = frozenset({State.SERVING, State.DRIFTED, State.DRAINING})
"""States in which requests pass. Draining still serves: routers send requests for seconds after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the data plane needs to know for one request.

    `headers` are the four x-kvguard-* response headers, lower-case names, ready for ASGI.
    `reason` is one sentence for the body of a 503; `retry_after` is in seconds.
    """

    state: State
    open: bool
    reason: str
    retry_after: int
    headers: tuple[tuple[bytes, bytes], ...]


def headers_for(effective: Effective, record_digest: str) -> tuple[tuple[bytes, bytes], ...]:
    """The four headers that tell a benchmark harness what it measured; `unknown` where nothing is established."""
    return (
        (b"x-kvguard-kv-cache-dtype", effective.dtype.encode()),
        (b"x-kvguard-kv-scales", effective.scales.value.encode()),
        (b"x-kvguard-confidence", effective.confidence.value.encode()),
        (b"x-kvguard-record", (record_digest or "unknown").encode()),
    )


UNKNOWN_HEADERS = headers_for(Effective(), "")


class Gate:
    """Holds the current snapshot. Replacing a reference is atomic, so readers on another thread need no lock."""

    def __init__(self) -> None:
        self.snapshot = Snapshot(State.STARTING, False, "the engine is starting", 10, UNKNOWN_HEADERS)


class Canaries(Frozen):
    """Requests of ours to an engine that was silent while it served. `unanswered`: the last one; None before the first."""

    answered: int = 0
    failed: int = 0
    unanswered: bool | None = None


class Status(Frozen):
    """Everything the management port shows about one guarded engine.

    `unready` is why readiness fails although requests are served, "" when it does not. `last_verified` is Unix
    seconds. `record_digest` and `record_path` are "" before the record is written. `drift` is what differs from what was
    established, in words; `drift_counts` how often each field began to differ; `stale` why the last verification could not
    confirm the verdict; `policy_digest` and `scales_digest` those of the run record, "" where it has none.
    """

    state: State = State.STARTING
    reason: str = ""
    effective: Effective = Effective()
    checks: tuple[Check, ...] = ()
    last_verified: float | None = None
    record_digest: str = ""
    record_path: str = ""
    engine_version: str = ""
    model: str = ""
    unready: str = ""
    drift: str = ""
    drift_counts: dict[str, int] = Field(default_factory=dict)
    stale: str = ""
    policy_digest: str = ""
    scales_digest: str = ""
    canaries: Canaries = Canaries()
    on_violation: str = ""
    gauges: EngineFigures = EngineFigures()
