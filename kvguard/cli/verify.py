"""`kvguard verify`: what a running engine's KV cache is, by whose evidence, and whether a policy allows it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvguard.checkpoint.declared import declare
from kvguard.cli.sizes import parse_size
from kvguard.cli.verification import Verification, as_document, show
from kvguard.engine.checkpoint_files import read_checkpoint, resolve_model
from kvguard.engine.client import EngineClient, model_cards, socket_path
from kvguard.engine.command import Command
from kvguard.engine.peer import Peer, command_of, peer_of, ranks_of
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence.cache_size import kv_bytes, ranks_of_one_engine
from kvguard.evidence.log import LogReader, read_log
from kvguard.evidence.prediction import predict
from kvguard.files import read_regular_file
from kvguard.guard.verify import verify_engine
from kvguard.policy.models import Policy
from kvguard.policy.parse import load_policy
from kvguard.verdict.checks import judge, violates
from kvguard.vocabulary import Claim, ExitCode, Stage, UsageError

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
    notes: list[str] = []
    async with EngineClient(target, api_key) as client:
        health = await client.health()
        if health.status is None:
            raise UsageError(
                f"{target}: no engine answers ({health.error}); required is the URL or the Unix socket of a running "
                "vLLM server: check address, and that the engine has started"
            )
        if not health.ok:
            raise UsageError(f"{target}: /health answers {health.problem}; wait until the engine is healthy")
        version = await client.version() or _logged(log, "engine_version")
        if version is None:
            notes.append("neither /version nor the log names the engine's version")
        socket = socket_path(target)
        peer = peer_of(socket) if socket else None
        command = command_of(peer, version) if peer is not None and version else None
        directory = _directory(checkpoint, await _root(client, notes), peer, env, notes)
        declared = declare(read_checkpoint(directory)) if directory is not None else None
        page_claims = await _metrics(client)
        requested = _requested(command, log.claims(version), page_claims)
        calculated = bool(command and command.present("--calculate-kv-scales")) or _is_on(log.claims(version), page_claims)
        prediction = None
        if declared is not None and version is not None and requested is not None:
            prediction = predict(version, requested, declared, calculate_kv_scales=calculated)
        ranks = ranks_of(command) if command is not None else None
        if given_bytes is None and ranks is not None and ranks_of_one_engine(log.claims(version)) is None:
            given_bytes, _ = kv_bytes(page_claims, log.claims(version), ranks)
        evidence = await verify_engine(
            client,
            secret=None,
            log=log,
            version=version or "",
            declared=declared,
            prediction=prediction,
            calculated=calculated,
            allowed_sixteen_bit=policy.kv_cache.skip_layers if policy is not None else (),
            given_bytes=given_bytes,
        )
    model_dtype = _logged(log, "model_dtype") or (declared.model_dtype if declared is not None else None)
    return Verification(
        target=target,
        engine_version=version,
        checkpoint=directory,
        declared=declared,
        prediction=prediction,
        evidence=evidence,
        checks=judge(policy, evidence.effective, model_dtype=model_dtype, engine_version=version, declared=declared),
        notes=(*notes, *evidence.problems),
    )


async def _root(client: EngineClient, notes: list[str]) -> str | None:
    answer = await client.models()
    if not answer.ok:
        key = "; give --api-key" if answer.status == 401 else ""
        notes.append(f"/v1/models: {answer.problem}{key}")
    roots = [card.get("root") for card in model_cards(answer) if not card.get("parent")]
    return next((root for root in roots if isinstance(root, str) and root), None)


def _directory(given: Path | None, root: str | None, peer: Peer | None, env: dict[str, str], notes: list[str]) -> str | None:
    """The checkpoint's directory: as given, as the engine names it, or relative to where the engine was started."""
    if given is not None:
        return str(given)
    if root is None:
        notes.append("the engine does not say which checkpoint it runs: give --checkpoint")
        return None
    if peer is not None and not os.path.isabs(root) and os.path.isdir(os.path.join(peer.directory, root)):
        return os.path.join(peer.directory, root)
    # A relative name means a directory of the engine's, which is not ours to look for.
    if not os.path.isabs(root) and os.path.isdir(root):
        notes.append(f"the engine names its checkpoint {root}, relative to its own directory: give --checkpoint")
        return None
    try:
        return resolve_model(root, env)
    except UsageError as error:
        notes.append(f"{error}; give --checkpoint")
        return None


async def _metrics(client: EngineClient) -> tuple[Claim, ...]:
    answer = await client.metrics_text()
    try:
        return metrics_evidence.claims(metrics_evidence.parse_metrics(answer.body)) if answer.ok else ()
    except UsageError:
        return ()  # verify_engine reads the page too, and reports it


def _requested(command: Command | None, log: Iterable[Claim], metrics: Iterable[Claim]) -> str | None:
    """What was asked for: the command, else the log's arguments, else the front end's own copy; None: not known."""
    if command is not None:
        return command.value("--kv-cache-dtype") or "auto"
    for claim in log:
        if claim.stage is Stage.REQUESTED and claim.field == "kv_cache_dtype":
            return str(claim.value or "auto")
    for claim in metrics:
        if claim.field == "kv_cache_dtype":
            return str(claim.value or "auto")
    return None


def _is_on(log: Iterable[Claim], metrics: Iterable[Claim]) -> bool:
    return any(claim.field == "calculate_kv_scales" and claim.value is True for claim in (*log, *metrics))


def _logged(log: LogReader, field: str) -> str | None:
    return next((str(c.value) for c in log.claims() if c.field == field and c.value is not None), None)
