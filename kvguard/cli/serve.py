"""`kvguard serve`: start the wrapped vLLM, prove its KV cache, and serve it, or refuse."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from prometheus_client import CollectorRegistry

from kvguard.cli.calibrate import run_with_progress
from kvguard.engine.plan import Listen, Plan
from kvguard.engine.process import become_subreaper
from kvguard.engine.run_directory import RunDirectory
from kvguard.files import printable
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.lifecycle import Guard
from kvguard.guard.prepare import Prepared, plan_for, prepare, raise_file_limit, stdout_is_terminal
from kvguard.guard.reference_start import ReferenceStart, start_reference
from kvguard.guard.settings import SHADOW_IN_ENGINE, SHADOW_KEY, SHADOW_LAUNCH, SHADOW_OFF, Settings
from kvguard.policy.models import OnViolation, Policy
from kvguard.policy.parse import load_policy
from kvguard.proxy.forward import Forwarder
from kvguard.proxy.management import Probe, Watch, management_app, serve_management
from kvguard.proxy.server import TLS, DataPlane, bind
from kvguard.proxy.upstream import Limits, Upstream
from kvguard.record.redact import redact_argv
from kvguard.record.store import default_directory
from kvguard.reference.artefact import only_one, overlays_directory
from kvguard.reference.prompts import PromptSet, load_prompts
from kvguard.reference.scales import DEFAULT_HEADROOM
from kvguard.shadow.document import probe_document, report_document
from kvguard.shadow.runner import Shadow, ShadowReport
from kvguard.shadow.settings import parse_settings
from kvguard.telemetry.logging import configure
from kvguard.telemetry.metrics import GuardCollector, ProxyMetrics
from kvguard.telemetry.shadow_metrics import ShadowCollector
from kvguard.verdict.checks import describe, violates
from kvguard.vocabulary import Check, UsageError

log = structlog.get_logger("kvguard")
_TERMINATION_LOG = Path("/dev/termination-log")


def serve(
    context: typer.Context,
    *,
    policy: Annotated[Path | None, typer.Option(help="Policy file (YAML). Without one, only integrity is checked.")] = None,
    management_host: Annotated[
        str | None, typer.Option(help="Address of the management port; default: the API's host.")
    ] = None,
    management_port: Annotated[int, typer.Option(help="Port for /livez /readyz /metrics /record /evidence.")] = 9464,
    record_dir: Annotated[
        Path | None, typer.Option(help="Where run records are written; default: $XDG_STATE_HOME/kvguard/records.")
    ] = None,
    settle: Annotated[float, typer.Option(help="Seconds to keep accepting after SIGTERM.", min=0)] = 5.0,
    grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to the end of everything.", min=1)] = 25.0,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds the engine may take to become healthy; default: no limit.", min=1)
    ] = None,
    scales: Annotated[
        Path | None,
        typer.Option(help="Calibration whose KV scales to load (see `kvguard calibrate`); default: the one that fits."),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Calibrate first where runtime scales are required and no calibration fits.")
    ] = False,
    calibration_prompts: Annotated[Path | None, typer.Option(help="Texts to calibrate on; default: ours.")] = None,
    shadow: Annotated[
        str,
        typer.Option(
            metavar="off|in-engine|URL|SOCKET",
            help="Reference for quality probes of live traffic: a pass inside the engine, or a 16-bit engine behind kvguard.",
        ),
    ] = SHADOW_OFF,
    shadow_record: Annotated[
        str,
        typer.Option(
            metavar="FILE|DIRECTORY|URL",
            help="Run record of the engine at --shadow URL, to show it equal but for the KV cache.",
        ),
    ] = "",
    shadow_launch: Annotated[
        bool,
        typer.Option("--shadow-launch", help="Run a second engine of this command with a 16-bit KV cache as the reference."),
    ] = False,
    shadow_launch_flag: Annotated[
        list[str] | None,
        typer.Option(metavar="FLAG", help="A vLLM flag for that engine alone, e.g. --gpu-memory-utilization=0.4; repeatable."),
    ] = None,
    shadow_launch_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable for that engine alone, e.g. CUDA_VISIBLE_DEVICES=1; repeatable."),
    ] = None,
    shadow_set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of the probes, e.g. rate=0.01; repeatable.")
    ] = None,
    log_json: Annotated[bool, typer.Option(help="Write kvguard's own log as JSON lines.")] = False,
) -> None:
    """Start vLLM behind kvguard: explicit KV dtype, proven from the tensors, or refused.

    Put `kvguard serve --` before the command you have. kvguard listens where vLLM would have.

    Example: kvguard serve --policy policy.yaml -- vllm serve MODEL --max-model-len 8192
    """
    started = _process_start()
    launch_env = _variables(shadow_launch_env)
    configure(json=log_json or None)
    argv = tuple(context.args)
    loaded = load_policy(policy) if policy is not None else None
    raise_file_limit()
    become_subreaper()
    settings = Settings(
        settle=settle,
        grace=grace,
        start_timeout=start_timeout,
        record_directory=record_dir or default_directory(os.environ),
        termination_log=_termination_log(),
        shadow=_reference(shadow, shadow_record, launch=shadow_launch, flags=(*(shadow_launch_flag or ()), *launch_env)),
        shadow_record=shadow_record,
        shadow_key=os.environ.get(SHADOW_KEY, ""),
        shadow_settings=parse_settings(shadow_set or ()),
    )
    prompts = load_prompts(calibration_prompts)
    prepared = prepare(argv, loaded, os.environ, scales=scales, prompts=prompts)
    if calibrate and scales is None:
        prepared = calibrate_first(prepared, argv, loaded, prompts, settings)
    with RunDirectory(os.environ) as run_directory:
        plan = plan_for(prepared, run_directory, os.environ, colour=stdout_is_terminal())
        refused = refuses(prepared.checks, loaded)
        reference = (
            start_reference(prepared, shadow_launch_flag or (), run_directory, {**os.environ, **launch_env})
            if shadow_launch and not refused
            else None
        )
        for name, content in {**plan.files, **(reference.plan.files if reference else {})}.items():
            run_directory.write(name, content)
        with contextlib.suppress(OSError):  # nobody reads our output; the engine is started all the same
            show_plan(prepared, plan, loaded)
            show_reference(reference)
        code = _run(prepared, plan, loaded, settings, run_directory, argv, started, management_host, management_port, reference)
    sys.exit(code)


def calibrate_first(
    prepared: Prepared, argv: tuple[str, ...], policy: Policy | None, prompts: PromptSet, settings: Settings
) -> Prepared:
    """The same start after a calibration, where it lacks one; one start at a time on this machine. Exits if that fails."""
    with only_one(overlays_directory(os.environ)):
        prepared = prepare(argv, policy, os.environ, prompts=prompts)  # another start may have calibrated meanwhile
        if prepared.runtime is None or not prepared.runtime.missing:
            return prepared
        done = run_with_progress(argv, prompts, headroom=DEFAULT_HEADROOM, outputs=(1, 2), settings=settings)
        if isinstance(done, int):
            sys.exit(done)
        return prepare(argv, policy, os.environ, prompts=prompts)  # as any later start, which finds it in the cache


def show_plan(prepared: Prepared, plan: Plan, policy: Policy | None) -> None:
    """Print what will be started and every change to the command, with its reason, on standard error."""
    resolution, prediction = prepared.resolution, prepared.resolution.prediction
    write = sys.stderr.write
    write(f"kvguard: engine   vLLM {prepared.engine.full_version} ({prepared.engine.executable})\n")
    write(f"kvguard: model    {prepared.declared.directory}\n")
    for finding in prepared.declared.findings:
        write(f"kvguard: finding  {finding}\n")
    write(f"kvguard: policy   {_policy_words(policy)}\n")
    write(f"kvguard: KV cache {resolution.target}, scales {prediction.scales} (predicted: {prediction.reason})\n")
    if refuses(prepared.checks, policy):
        write("kvguard: the engine is not started\n")
        sys.stderr.flush()
        return
    for change in plan.changes:
        write(f"kvguard: change   {change.what}: {change.why}\n")
    for warning in (*plan.warnings, *prepared.degraded):
        write(f"kvguard: warning  {warning}\n")
    for check in prepared.checks:
        if not violates((check,)):  # the others are told as the refusal
            write(f"kvguard: check    {describe(check)}\n")
    write(f"kvguard: command  {' '.join(redact_argv(list(plan.argv)))}\n")
    sys.stderr.flush()


def show_reference(reference: ReferenceStart | None) -> None:
    """Print how the reference of shadow probes will be started, on standard error."""
    if reference is not None:
        sys.stderr.write(f"kvguard: reference {' '.join(redact_argv(list(reference.plan.argv)))}\n")
        sys.stderr.flush()


def refuses(checks: tuple[Check, ...], policy: Policy | None) -> bool:
    """Whether these checks, made before the start, keep the engine from being started."""
    return violates(checks) and (policy is None or policy.on_violation is not OnViolation.WARN)


def _reference(named: str, record: str, *, launch: bool, flags: Sequence[str]) -> str:
    if launch and named != SHADOW_OFF:
        raise UsageError(f"--shadow {named} and --shadow-launch: there is one reference; leave one of them out")
    if flags and not launch:
        raise UsageError("--shadow-launch-flag and --shadow-launch-env need --shadow-launch")
    if record and (launch or named in (SHADOW_OFF, SHADOW_IN_ENGINE)):
        raise UsageError("--shadow-record is for the engine that --shadow URL or SOCKET names")
    if launch:
        return SHADOW_LAUNCH
    if named in (SHADOW_OFF, SHADOW_IN_ENGINE) or named.startswith(("http://", "https://", "/", "unix:")):
        return named
    raise UsageError(f"--shadow {named!r}: required is off, in-engine, a URL, or the path of a Unix socket")


def _variables(given: Sequence[str] | None) -> dict[str, str]:
    """Environment variables of `NAME=VALUE` texts."""
    pairs = [text.partition("=") for text in given or ()]
    for name, equals, _ in pairs:
        if not equals or not name.isidentifier():
            raise UsageError(f"--shadow-launch-env {printable(name)!r}: required is NAME=VALUE")
    return {name: value for name, _, value in pairs}


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
        return "shadow probes are off, or the engine is not serving yet: start with `kvguard serve --shadow in-engine`"
    return shadow.watch([one.choice() for one in wanted.formats])


def _policy_words(policy: Policy | None) -> str:
    if policy is None:
        return "none: only integrity is checked"
    wanted = " or ".join(policy.kv_cache.dtype) or "any dtype"
    return f"{wanted}, scales {policy.kv_cache.scales}, at least {policy.kv_cache.min_confidence}, {policy.on_violation}"


def _run(
    prepared: Prepared,
    plan: Plan,
    policy: Policy | None,
    settings: Settings,
    run_directory: RunDirectory,
    argv: tuple[str, ...],
    started: float,
    management_host: str | None,
    management_port: int,
    reference: ReferenceStart | None,
) -> int:
    """Open the two ports, live the engine's life, close them."""
    gate = Gate()
    board = Board(gate)
    registry = CollectorRegistry()
    registry.register(GuardCollector(lambda: board.status))
    registry.register(ShadowCollector(lambda: board.shadow.report if board.shadow else ShadowReport()))
    observer = ProxyMetrics(registry)
    refused = refuses(prepared.checks, policy) and (policy is None or policy.on_violation is OnViolation.REFUSE)
    app = management_app(
        lambda: board.status,
        lambda: board.record,
        lambda: policy.model_dump(mode="json") if policy is not None else None,
        lambda: [claim.model_dump(mode="json") for claim in board.claims],
        registry,
        shadow=lambda: report_document(board.shadow.report) if board.shadow else None,
        probe=lambda question: _probe_once(board.shadow, question),
        watch=lambda wanted: _watch(board.shadow, wanted),
    )

    async def live(guard: Guard, data_plane: DataPlane, management: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, guard.request_stop)
        if refused:  # nothing will serve: the ports are never opened
            return await guard.run()
        closed = asyncio.Event()
        serving = asyncio.create_task(serve_management(app, management, closed))
        try:
            data_plane.start()
            return await guard.run()
        finally:
            await asyncio.to_thread(data_plane.close)  # here, where a further signal is still ours
            closed.set()
            with contextlib.suppress(Exception):
                await serving

    with (
        _api_socket(plan.listen) as listener,
        _management_socket(management_host or plan.listen.host, management_port) as management,
    ):
        forwarder = Forwarder(gate, Upstream(uds=str(run_directory.socket)), observer, Limits())
        data_plane = DataPlane(forwarder, [listener], _tls(plan.listen))
        guard = Guard(
            prepared,
            plan,
            policy,
            settings,
            board,
            data_plane,
            run_directory,
            argv=argv,
            started=started,
            reference=reference,
        )
        return asyncio.run(live(guard, data_plane, management))


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


def _termination_log() -> Path | None:
    """Kubernetes' termination log, where there is one that we may write."""
    named = os.environ.get("KVGUARD_TERMINATION_LOG")
    path = Path(named) if named else _TERMINATION_LOG
    return path if named or os.access(path, os.W_OK) else None


def _process_start() -> float:
    """When this process began, on `time.monotonic`'s clock, so that our own imports count as our time."""
    try:
        ticks = int(Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        age = 0.0
    return time.monotonic() - age
