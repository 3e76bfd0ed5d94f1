"""What can be known of an engine that somebody else started, without a word in its workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.models import CheckpointFiles, Declared
from kvguard.engine.checkpoint_files import read_checkpoint, resolve_model
from kvguard.engine.client import Answer, EngineClient, model_cards, socket_path, version_of
from kvguard.engine.command import Command
from kvguard.engine.peer import Peer, command_of, peer_of, ranks_of
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence.cache_size import kv_bytes, ranks_of_one_engine
from kvguard.evidence.log import LogReader
from kvguard.evidence.prediction import Prediction, predict
from kvguard.files import printable
from kvguard.guard.verify import Evidence, verify_engine
from kvguard.policy.models import Policy
from kvguard.verdict.checks import judge
from kvguard.vocabulary import Check, Claim, Frozen, Stage, UsageError


class Outside(Frozen):
    """One engine seen from outside. `command` is its own, where its socket tells us who listens; `model` its first model's
    name. `notes` say what could not be found out, and what to give for it."""

    version: str | None = None
    model: str = ""
    max_model_len: int | None = None
    pid: int | None = None
    command: Command | None = None
    directory: str | None = None
    files: CheckpointFiles | None = None
    declared: Declared | None = None
    prediction: Prediction | None = None
    calculated: bool = False
    given_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def prediction_claims(self) -> tuple[Claim, ...]:
        """What this version makes of the command and the files."""
        return self.prediction.claims if self.prediction is not None else ()


async def look(
    client: EngineClient, *, checkpoint: Path | None, given_bytes: int | None, log: LogReader, env: Mapping[str, str]
) -> Outside:
    """Ask a healthy engine what it is, and read its checkpoint where that can be found.

    Raises UsageError for what is certainly not vLLM, and for a checkpoint that was given, or found, and cannot be read.
    """
    notes: list[str] = []
    said = await client.get_json("/version")
    version = version_of(said) or logged(log, "engine_version")
    if version is None:
        notes.append("neither /version nor the log names the engine's version")
    socket = socket_path(client.target)
    peer = await asyncio.to_thread(peer_of, socket) if socket else None
    command = command_of(peer, version) if peer is not None and version else None
    models = await client.models()
    page = await client.metrics_text()
    if not log.claims() and (other := _other_server(said, models, page)):
        raise UsageError(
            f"{printable(client.target)}: what answers there is not vLLM: {other}; required is a running vLLM server"
        )
    if not models.ok:
        key = "; give --api-key" if models.status == 401 else ""
        notes.append(f"/v1/models: {models.problem}{key}")
    cards = [card for card in model_cards(models) if not card.get("parent")]
    card = cards[0] if cards else {}
    root = next((root for card in cards if isinstance(root := card.get("root"), str) and root), None)
    directory = _directory(checkpoint, root, peer, env, notes)
    overrides = command.json_object("--hf-overrides") if command is not None else None
    files = read_checkpoint(directory) if directory is not None else None
    declared = declare(files, overrides) if files is not None else None
    page_claims = _metrics(page)
    log_claims = log.claims(version)
    requested = _requested(command, log_claims, page_claims)
    calculated = bool(command and command.present("--calculate-kv-scales")) or _is_on(log_claims, page_claims)
    prediction = None
    if declared is not None and version is not None and requested is not None:
        prediction = predict(version, requested, declared, calculate_kv_scales=calculated)
    ranks = ranks_of(command) if command is not None else None
    if given_bytes is None and ranks is not None and ranks_of_one_engine(log_claims) is None:
        given_bytes, _ = kv_bytes(page_claims, log_claims, ranks)
    length = card.get("max_model_len")
    return Outside(
        version=version,
        model=str(card.get("id", "")),
        max_model_len=length if isinstance(length, int) else None,
        pid=peer.pid if peer is not None else None,
        command=command,
        directory=directory,
        files=files,
        declared=declared,
        prediction=prediction,
        calculated=calculated,
        given_bytes=given_bytes,
        notes=tuple(notes),
    )


async def examine(
    client: EngineClient, seen: Outside, policy: Policy | None, log: LogReader
) -> tuple[Evidence, tuple[Check, ...]]:
    """Read metrics and log, compute capacity, and judge what they show."""
    evidence = await verify_engine(
        client,
        secret=None,
        log=log,
        version=seen.version or "",
        declared=seen.declared,
        prediction=seen.prediction,
        calculated=seen.calculated,
        allowed_sixteen_bit=policy.kv_cache.skip_layers if policy is not None else (),
        given_bytes=seen.given_bytes,
    )
    model_dtype = logged(log, "model_dtype") or (seen.declared.model_dtype if seen.declared is not None else None)
    checks = judge(policy, evidence.effective, model_dtype=model_dtype, engine_version=seen.version, declared=seen.declared)
    return evidence, checks


def logged(log: LogReader, field: str) -> str | None:
    """What the log says of a field first."""
    return next((str(c.value) for c in log.claims() if c.field == field and c.value is not None), None)


def _directory(given: Path | None, root: str | None, peer: Peer | None, env: Mapping[str, str], notes: list[str]) -> str | None:
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


def _other_server(version: Answer, models: Answer, page: Answer) -> str:
    """What tells that this is another server, "" where something says vLLM, or what would say it cannot be had now."""
    cards = model_cards(models)
    owners = tuple(dict.fromkeys(str(card["owned_by"]) for card in cards if card.get("owned_by")))
    if "vllm" in owners or (page.ok and b"vllm:" in page.body):
        return ""
    named = version_of(version)
    withheld = any(answer.status is None or answer.status in _WITHHELD for answer in (version, models, page))
    if withheld or (named and cards and not owners):
        return ""
    found = {
        "/version": version.problem or (f"{named!r}" if named else "no version"),
        "/v1/models": models.problem or (f"models of {', '.join(owners)}" if owners else "no models of vLLM"),
        "/metrics": page.problem or "no series of vLLM",
    }
    return printable("; ".join(f"{path}: {text.removeprefix(path + ': ')}" for path, text in found.items()), 600)


_WITHHELD = (401, 403, 429, 500, 502, 503, 504)
"""Answers of a server, or of what stands before it, that say nothing about what it is."""


def _metrics(answer: Answer) -> tuple[Claim, ...]:
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
