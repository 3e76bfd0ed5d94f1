"""`kvguard attach`: guard an engine that somebody else started, from outside."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvguard.cli.sizes import parse_size
from kvguard.cli.standing import stand, termination_log
from kvguard.engine.client import check_engine, socket_path
from kvguard.engine.plan import Listen
from kvguard.guard.attached import Attached, Target
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.prepare import raise_file_limit
from kvguard.guard.settings import Settings
from kvguard.policy.parse import load_policy
from kvguard.proxy.otlp import tracing_from
from kvguard.proxy.server import DataPlane
from kvguard.proxy.upstream import Upstream
from kvguard.record.store import default_directory
from kvguard.telemetry.logging import configure
from kvguard.vocabulary import UsageError


def attach(
    *,
    engine: Annotated[str, typer.Option(metavar="URL|SOCKET", help="The engine's URL or Unix socket.")],
    host: Annotated[str, typer.Option(help="Where kvguard listens.")] = "0.0.0.0",  # noqa: S104 (as vLLM's own default)
    port: Annotated[int, typer.Option(help="Where kvguard listens.", min=1, max=65535)] = 8000,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate of kvguard's own port.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file (YAML). Without one, only integrity is checked.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The model's directory; default: as the engine names it.")] = None,
    log: Annotated[Path | None, typer.Option(help="The engine's log file, followed as it grows.")] = None,
    kv_bytes: Annotated[
        str | None, typer.Option(metavar="N|1GiB", help="Bytes of one engine's KV cache, all its ranks together.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", help="The engine's API key, for kvguard's own requests.", show_envvar=True),
    ] = None,
    management_host: Annotated[str | None, typer.Option(help="Address of the management port; default: --host.")] = None,
    management_port: Annotated[int, typer.Option(help="Port for /livez /readyz /metrics /record /evidence.")] = 9464,
    record_dir: Annotated[
        Path | None, typer.Option(help="Where run records are written; default: $XDG_STATE_HOME/kvguard/records.")
    ] = None,
    settle: Annotated[float, typer.Option(help="Seconds to keep accepting after SIGTERM.", min=0)] = 5.0,
    grace: Annotated[float, typer.Option(help="Seconds from SIGTERM to the end of everything.", min=1)] = 25.0,
    start_timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the engine to be healthy; default: no limit.", min=1)
    ] = None,
    restart_timeout: Annotated[
        float | None, typer.Option(help="Seconds the engine may be away once it was served; default: no limit.", min=1)
    ] = None,
    reverify: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How often to verify again while serving; 0: only on signs of change.", min=0),
    ] = 60.0,
    log_json: Annotated[bool, typer.Option(help="Write kvguard's own log as JSON lines.")] = False,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log a line for each request, without its content.")] = False,
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send spans of requests to this OTLP collector; needs kvguard[otel].")
    ] = None,
) -> None:
    """Guard an engine that somebody else started: wait for it, verify it from outside, and serve it, or refuse.

    The same gate, proxy, headers, metrics and record as `kvguard serve`, without the cache tensors, so that what it shows is
    corroborated at most. The engine itself is never touched.

    Example: kvguard attach --engine http://127.0.0.1:8001 --policy policy.yaml --log engine.log --port 8000
    """
    configure(json=log_json or None)
    loaded = load_policy(policy) if policy is not None else None
    if (ssl_certfile is None) != (ssl_keyfile is None) and ssl_certfile is None:
        raise UsageError("--ssl-keyfile: TLS needs --ssl-certfile as well; nothing is served in the clear instead")
    check_engine(engine)
    tracing = tracing_from(otlp_endpoint, os.environ)
    raise_file_limit()
    target = Target(
        address=engine,
        api_key=api_key or None,
        checkpoint=checkpoint,
        kv_bytes=parse_size(kv_bytes, "--kv-bytes") if kv_bytes is not None else None,
        log=log,
    )
    settings = Settings(
        settle=settle,
        grace=grace,
        start_timeout=start_timeout,
        restart_timeout=restart_timeout,
        reverify=reverify,
        record_directory=record_dir or default_directory(os.environ),
        termination_log=termination_log(),
    )
    socket = socket_path(engine)
    listen = Listen(
        host=host,
        port=port,
        ssl_certfile=str(ssl_certfile) if ssl_certfile else None,
        ssl_keyfile=str(ssl_keyfile) if ssl_keyfile else None,
    )
    board = Board(Gate())

    def life(surface: DataPlane) -> Attached:
        argv = ("kvguard", "attach", "--engine", engine)
        return Attached(target, loaded, settings, board, surface, env=dict(os.environ), argv=argv)

    code = stand(
        life,
        board,
        loaded,
        listen,
        Upstream(uds=socket) if socket else Upstream(uds=None, base_url=engine),
        management_host=management_host,
        management_port=management_port,
        access_log=access_log,
        tracing=tracing,
    )
    sys.exit(code)
