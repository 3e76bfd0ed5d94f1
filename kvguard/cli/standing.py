"""A guard standing in front of an engine: its two ports opened, its life lived, the ports closed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry

from kvguard.engine.plan import Listen
from kvguard.guard.board import Board
from kvguard.policy.models import Policy
from kvguard.proxy.changes import ChangeObserver
from kvguard.proxy.forward import Forwarder
from kvguard.proxy.management import management_app
from kvguard.proxy.management_server import serve_management
from kvguard.proxy.server import TLS, DataPlane, bind
from kvguard.proxy.shadow_routes import SHADOW_OFF, Probe, Watch
from kvguard.proxy.upstream import Limits, Upstream
from kvguard.shadow.document import probe_document, ranges_document, report_document
from kvguard.shadow.report import ShadowReport
from kvguard.shadow.runner import Shadow
from kvguard.telemetry.metrics import GuardCollector, ProxyMetrics
from kvguard.telemetry.shadow_metrics import ShadowCollector
from kvguard.vocabulary import UsageError

if TYPE_CHECKING:  # what it imports is an extra
    from kvguard.proxy.tracing import Tracing

_TERMINATION_LOG = Path("/dev/termination-log")


class Life(Protocol):
    """The life of a guarded engine, started by us or attached to."""

    def request_stop(self) -> None:
        """Begin to stop; from a signal handler of the loop."""

    def request_changed(self, path: str, *, answered: bool) -> None:
        """A request that can change the engine came, or was answered; from the data plane's thread."""

    async def run(self) -> int:
        """Live it; returns the exit code."""


def stand(
    make: Callable[[DataPlane], Life],
    board: Board,
    policy: Policy | None,
    listen: Listen,
    upstream: Upstream,
    *,
    management_host: str | None,
    management_port: int,
    opens: bool = True,
    access_log: bool = False,
    tracing: Tracing | None = None,
) -> int:
    """Open the API port and the management port, live the life that `make` gives, close them. Returns the exit code.

    `opens` False: it is known that nothing will serve, and the ports are only taken. `access_log`: a line for each request.
    Raises UsageError for ports that cannot be had.
    """
    registry = CollectorRegistry()
    registry.register(GuardCollector(lambda: board.status))
    registry.register(ShadowCollector(lambda: board.shadow.report if board.shadow else ShadowReport()))
    observer = ChangeObserver(ProxyMetrics(registry))
    app = management_app(
        lambda: board.status,
        lambda: board.record,
        lambda: policy.model_dump(mode="json") if policy is not None else None,
        lambda: [claim.model_dump(mode="json") for claim in board.claims],
        registry,
        shadow=lambda: report_document(board.shadow.report) if board.shadow else None,
        probe=lambda question: _probe_once(board.shadow, question),
        watch=lambda wanted: _watch(board.shadow, wanted),
        ranges=lambda: ranges_document(board.shadow.report, board.status.engine_version) if board.shadow else None,
    )

    async def live(data_plane: DataPlane, management: socket.socket) -> int:
        life = make(data_plane)
        observer.changes = life.request_changed
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, life.request_stop)
        if not opens:
            return await life.run()
        closed = asyncio.Event()
        serving = asyncio.create_task(serve_management(app, management, closed))
        gc.freeze()  # what is here by now stays: to look through it again would hold up every stream for a moment
        try:
            data_plane.start()
            return await life.run()
        finally:
            await asyncio.to_thread(data_plane.close)  # here, where a further signal is still ours
            closed.set()
            with contextlib.suppress(Exception):
                await serving

    with (
        _api_socket(listen) as listener,
        _management_socket(management_host or listen.host, management_port) as management,
    ):
        forwarder = Forwarder(board.gate, upstream, observer, Limits(), access_log=access_log, tracing=tracing)
        return asyncio.run(live(DataPlane(forwarder, [listener], _tls(listen)), management))


async def _probe_once(shadow: Shadow | None, question: Probe) -> dict[str, Any] | None:
    """Run a one-shot probe on the control loop; None while there is no reference that could score."""
    if shadow is None or shadow.report.state in ("off", "waiting", "checking", "refused"):
        return None
    choices = [one.choice() for one in question.formats]
    observations, problems = await shadow.probe_once(
        question.prompts, choices, greedy=question.greedy, max_tokens=question.max_tokens
    )
    return probe_document(observations, problems)


def _watch(shadow: Shadow | None, wanted: Watch) -> str:
    """Let live probes try these formats; why they cannot, "" when they do."""
    if shadow is None:
        return SHADOW_OFF
    return shadow.watch([one.choice() for one in wanted.formats])


def _management_socket(host: str, port: int) -> socket.socket:
    """The management port, listening at once: two starts may bind one port, and only the first may listen."""
    management = bind(host, port)
    try:
        management.listen()
    except OSError as error:
        management.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --management-port") from error
    return management


@contextlib.contextmanager
def _api_socket(listen: Listen) -> Iterator[socket.socket]:
    """The public socket: where the wrapped command said that vLLM should listen. A Unix socket's file goes with it."""
    if listen.uds is None:
        with bind(listen.host, listen.port) as listener:
            yield listener
        return
    path = Path(listen.uds)
    if _abandoned(path):
        path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(str(path))
        except OSError as error:
            raise UsageError(f"cannot listen on the Unix socket {path}: {error.strerror or error}; check --uds") from error
        ours = path.stat()
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(ours, path.stat()):
                    path.unlink()


def _abandoned(path: Path) -> bool:
    """Whether a Unix socket's file is there, and nobody listens on it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(path.stat().st_mode):
            probe.settimeout(1.0)
            return probe.connect_ex(str(path)) == errno.ECONNREFUSED
    return False


def _tls(listen: Listen) -> TLS | None:
    if listen.ssl_certfile is None:
        return None
    return TLS(
        keyfile=listen.ssl_keyfile,
        certfile=listen.ssl_certfile,
        ca_certs=listen.ssl_ca_certs,
        cert_reqs=listen.ssl_cert_reqs,
        ciphers=listen.ssl_ciphers,
    )


def termination_log() -> Path | None:
    """Kubernetes' termination log, where there is one that we may write."""
    named = os.environ.get("KVGUARD_TERMINATION_LOG")
    path = Path(named) if named else _TERMINATION_LOG
    return path if named or os.access(path, os.W_OK) else None


def process_start() -> float:
    """When this process began, on `time.monotonic`'s clock, so that our own imports count as our time."""
    try:
        ticks = int(Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        age = 0.0
    return time.monotonic() - age
