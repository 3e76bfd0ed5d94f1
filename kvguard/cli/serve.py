"""`kvguard serve`: start the wrapped vLLM, prove its KV cache, and serve it, or refuse."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import structlog
import typer

from kvguard.cli.calibrate import run_with_progress
from kvguard.cli.standing import process_start, stand, termination_log
from kvguard.engine.plan import Plan
from kvguard.engine.process import become_subreaper
from kvguard.engine.run_directory import RunDirectory
from kvguard.files import printable
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.lifecycle import Guard
from kvguard.guard.prepare import Prepared, plan_for, prepare, raise_file_limit, stdout_is_terminal
from kvguard.guard.reference_start import ReferenceStart, start_reference
from kvguard.guard.refusals import place, recall
from kvguard.guard.settings import SHADOW_IN_ENGINE, SHADOW_KEY, SHADOW_LAUNCH, SHADOW_OFF, Settings
from kvguard.policy.models import OnViolation, Policy
from kvguard.policy.parse import load_policy
from kvguard.proxy.otlp import tracing_from
from kvguard.proxy.server import DataPlane
from kvguard.proxy.upstream import Upstream
from kvguard.record.redact import redact_argv
from kvguard.record.store import default_directory
from kvguard.reference.artefact import only_one, overlays_directory
from kvguard.reference.prompts import PromptSet, load_prompts
from kvguard.reference.scales import DEFAULT_HEADROOM
from kvguard.shadow.settings import parse_settings
from kvguard.telemetry.logging import configure
from kvguard.verdict.checks import describe, violates
from kvguard.vocabulary import Check, UsageError

if TYPE_CHECKING:  # what it imports is an extra
    from kvguard.proxy.tracing import Tracing

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
    refusals: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Remember refusals here: a start in which nothing changed is refused again without loading the weights.",
        ),
    ] = None,
    settle: Annotated[float, typer.Option(help="Seconds to keep accepting after SIGTERM.", min=0)] = 5.0,
    grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to the end of everything.", min=1)] = 25.0,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds the engine may take to become healthy; default: no limit.", min=1)
    ] = None,
    reverify: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How often to verify again while serving; 0: only on signs of change.", min=0),
    ] = 60.0,
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
    access_log: Annotated[bool, typer.Option("--access-log", help="Log a line for each request, without its content.")] = False,
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send spans of requests to this OTLP collector; needs kvguard[otel].")
    ] = None,
) -> None:
    """Start vLLM behind kvguard: explicit KV dtype, proven from the tensors, or refused.

    Put `kvguard serve --` before the command you have. kvguard listens where vLLM would have.

    Example: kvguard serve --policy policy.yaml -- vllm serve MODEL --max-model-len 8192
    """
    started = process_start()
    launch_env = _variables(shadow_launch_env)
    configure(json=log_json or None)
    argv = tuple(context.args)
    loaded = load_policy(policy) if policy is not None else None
    tracing = tracing_from(otlp_endpoint, os.environ)
    raise_file_limit()
    become_subreaper()
    settings = Settings(
        settle=settle,
        grace=grace,
        start_timeout=start_timeout,
        reverify=reverify,
        record_directory=record_dir or default_directory(os.environ),
        termination_log=termination_log(),
        shadow=_reference(
            shadow,
            shadow_record,
            launch=shadow_launch,
            flags=(*(shadow_launch_flag or ()), *launch_env),
            settings=shadow_set or (),
        ),
        shadow_record=shadow_record,
        shadow_key=os.environ.get(SHADOW_KEY, ""),
        shadow_settings=parse_settings(shadow_set or ()),
    )
    prompts = load_prompts(calibration_prompts)
    prepared = prepare(argv, loaded, os.environ, scales=scales, prompts=prompts, hub=True)
    if calibrate and scales is None:
        prepared = calibrate_first(prepared, argv, loaded, prompts, settings)
    if refusals is not None:
        remembered = place(refusals, prepared, loaded, os.environ)
        settings = settings.model_copy(update={"refusal": remembered})
        prepared = prepared.model_copy(update={"checks": (*prepared.checks, *recall(remembered, loaded))})
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
        code = _run(
            prepared,
            plan,
            loaded,
            settings,
            run_directory,
            argv,
            started,
            management_host,
            management_port,
            reference,
            access_log,
            tracing,
        )
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


def _reference(named: str, record: str, *, launch: bool, flags: Sequence[str], settings: Sequence[str]) -> str:
    if launch and named != SHADOW_OFF:
        raise UsageError(f"--shadow {named} and --shadow-launch: there is one reference; leave one of them out")
    if flags and not launch:
        raise UsageError("--shadow-launch-flag and --shadow-launch-env need --shadow-launch")
    if record and (launch or named in (SHADOW_OFF, SHADOW_IN_ENGINE)):
        raise UsageError("--shadow-record is for the engine that --shadow URL or SOCKET names")
    if settings and named == SHADOW_OFF and not launch:
        raise UsageError("--shadow-set sets probes, which are off: add --shadow in-engine, --shadow URL or --shadow-launch")
    if launch:
        return SHADOW_LAUNCH
    is_url = named.startswith(("http://", "https://")) and bool(urlsplit(named).hostname)
    if named in (SHADOW_OFF, SHADOW_IN_ENGINE) or is_url or named.startswith(("/", "unix:")):
        return named
    raise UsageError(
        f"--shadow {named!r}: required is off, in-engine, http(s)://HOST[:PORT], or the absolute path of a Unix socket"
    )


def _variables(given: Sequence[str] | None) -> dict[str, str]:
    """Environment variables of `NAME=VALUE` texts."""
    pairs = [text.partition("=") for text in given or ()]
    for name, equals, _ in pairs:
        if not equals or not name.isidentifier():
            raise UsageError(f"--shadow-launch-env {printable(name)!r}: required is NAME=VALUE")
    return {name: value for name, _, value in pairs}


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
    access_log: bool,
    tracing: Tracing | None,
) -> int:
    """Open the two ports, live the engine's life, close them."""
    board = Board(Gate())
    refused = refuses(prepared.checks, policy) and (policy is None or policy.on_violation is OnViolation.REFUSE)

    def guard(surface: DataPlane) -> Guard:
        return Guard(
            prepared,
            plan,
            policy,
            settings,
            board,
            surface,
            run_directory,
            argv=argv,
            started=started,
            reference=reference,
        )

    return stand(
        guard,
        board,
        policy,
        plan.listen,
        Upstream(uds=str(run_directory.socket)),
        management_host=management_host,
        management_port=management_port,
        opens=not refused,
        access_log=access_log,
        tracing=tracing,
    )
