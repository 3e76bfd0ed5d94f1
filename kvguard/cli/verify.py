"""`kvguard verify`: what a running engine's KV cache is, by whose evidence, and whether a policy allows it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvguard.cli.sizes import parse_size
from kvguard.cli.verification import Verification, as_document, show
from kvguard.engine.client import EngineClient
from kvguard.evidence.log import LogReader, read_log
from kvguard.files import read_regular_file
from kvguard.guard.outside import examine as examine_outside
from kvguard.guard.outside import look
from kvguard.guard.presence import is_strange, not_vllm
from kvguard.policy.models import Policy
from kvguard.policy.parse import load_policy
from kvguard.verdict.checks import violates
from kvguard.vocabulary import ExitCode, UsageError

_LOG_LIMIT = 512 << 20


def verify(
    target: Annotated[str, typer.Argument(metavar="URL|SOCKET", help="The engine's URL or Unix socket.")],
    *,
    policy: Annotated[Path | None, typer.Option(help="Policy file (YAML). Without one, only integrity is checked.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The model's directory; default: as the engine names it.")] = None,
    kv_bytes: Annotated[
        str | None, typer.Option(metavar="N|1GiB", help="Bytes of one engine's KV cache, all its ranks together.")
    ] = None,
    engine_log: Annotated[Path | None, typer.Option(help="The engine's log, from its start.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="The engine's API key.", show_envvar=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what KV cache a running engine really has, source by source, and judge it.

    Exits 0 when the policy allows it, 3 when it does not or cannot be verified, 2 when the engine cannot be asked.
    The cache tensors are not read from outside: that needs `kvguard serve`.

    Example: kvguard verify http://127.0.0.1:8000 --policy policy.yaml --engine-log engine.log
    """
    loaded = load_policy(policy) if policy is not None else None
    size = parse_size(kv_bytes, "--kv-bytes") if kv_bytes is not None else None
    log = read_log(read_regular_file(engine_log, _LOG_LIMIT, "engine log")) if engine_log is not None else LogReader()
    result = asyncio.run(
        examine(target, loaded, checkpoint=checkpoint, given_bytes=size, log=log, api_key=api_key, env=dict(os.environ))
    )
    if as_json:
        typer.echo(json.dumps(as_document(result), indent=2, allow_nan=False))
    else:
        show(result, Console())
    raise typer.Exit(ExitCode.POLICY_VIOLATION if violates(result.checks) else ExitCode.CLEAN)


async def examine(
    target: str,
    policy: Policy | None,
    *,
    checkpoint: Path | None,
    given_bytes: int | None,
    log: LogReader,
    api_key: str | None,
    env: dict[str, str],
) -> Verification:
    """Ask a running engine and judge what it says. UsageError when it does not answer."""
    async with EngineClient(target, api_key) as client:
        health = await client.health()
        if health.status is None:
            raise UsageError(
                f"{target}: no engine answers ({health.error}); required is the URL or the Unix socket of a running "
                "vLLM server: check address, and that the engine has started"
            )
        if is_strange(health.status) and not health.ok:
            raise not_vllm(target, health.problem)
        if not health.ok:
            raise UsageError(f"{target}: /health answers {health.problem}; wait until the engine is healthy")
        seen = await look(client, checkpoint=checkpoint, given_bytes=given_bytes, log=log, env=env)
        evidence, checks = await examine_outside(client, seen, policy, log)
    return Verification(
        target=target,
        engine_version=seen.version,
        checkpoint=seen.directory,
        declared=seen.declared,
        prediction=seen.prediction,
        evidence=evidence,
        checks=checks,
        notes=(*seen.notes, *evidence.problems),
    )
