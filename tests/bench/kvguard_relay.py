"""kvguard's data plane as `kvguard serve` runs it, in front of any socket: open gate, metrics, headers and sampling on.

The requests are drawn for and queued as on a live replica; what the probes themselves do to an engine is measured elsewhere.
`python tests/bench/kvguard_relay.py SOCKET PORT MANAGEMENT_PORT [--access-log] [--spans COLLECTOR]` serves until it is told to
stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from prometheus_client import CollectorRegistry

from kvguard.engine.client import EngineClient
from kvguard.guard.gate import Gate, Snapshot, Status, headers_for
from kvguard.guard.state import State
from kvguard.proxy.forward import Forwarder
from kvguard.proxy.management import management_app
from kvguard.proxy.management_server import serve_management
from kvguard.proxy.otlp import tracing_from
from kvguard.proxy.server import DataPlane, bind
from kvguard.proxy.upstream import Limits, Upstream
from kvguard.shadow.runner import Shadow
from kvguard.shadow.settings import Settings
from kvguard.telemetry.logging import configure
from kvguard.telemetry.metrics import GuardCollector, ProxyMetrics
from kvguard.vocabulary import Confidence, Effective, ScaleState
from shadow_fakes import IDLE, FakeReference

_EFFECTIVE = Effective(dtype="fp8_e4m3", confidence=Confidence.PROVEN, scales=ScaleState.CHECKPOINT)


async def _figures() -> Any:
    return IDLE


def _sampling() -> Shadow:
    """A real Shadow with probing on and no probes: offers are read, drawn for and queued."""
    shadow = Shadow(
        cast(EngineClient, None),
        FakeReference(),
        Settings(),
        served_model="bench",
        dtype="fp8_e4m3",
        batch_tokens=8192,
        batch_sequences=256,
        figures=_figures,
        in_flight=lambda: 0,
        generated=lambda: None,
    )
    shadow._loop = asyncio.get_running_loop()
    shadow._open = True
    return shadow


async def main(uds: str, port: int, management_port: int, *more: str) -> None:
    """Serve until SIGTERM."""
    gate = Gate()
    gate.snapshot = Snapshot(State.SERVING, True, "", 0, headers_for(_EFFECTIVE, "sha256:" + 64 * "a"))
    registry = CollectorRegistry()
    registry.register(GuardCollector(Status))
    tracing = tracing_from(more[more.index("--spans") + 1], {}) if "--spans" in more else None
    forwarder = Forwarder(
        gate, Upstream(uds=uds), ProxyMetrics(registry), Limits(), access_log="--access-log" in more, tracing=tracing
    )
    plane = DataPlane(forwarder, [bind("127.0.0.1", port)])
    shadow = _sampling()
    plane.start()
    plane.set_tap(shadow.tap)
    app = management_app(lambda: Status(state=State.SERVING), lambda: None, lambda: None, list, registry)
    stop, closed = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with bind("127.0.0.1", management_port) as management:
        management.listen()
        serving = asyncio.create_task(serve_management(app, management, closed))
        await stop.wait()
        offered = sum(row.offered.requests for row in shadow.report.rows)
        print(json.dumps({"offered": offered, "skipped": shadow.report.skipped}), flush=True)
        await asyncio.to_thread(plane.close)
        closed.set()
        with contextlib.suppress(Exception):
            await serving


if __name__ == "__main__":
    configure(json=False)
    gc.freeze()
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
