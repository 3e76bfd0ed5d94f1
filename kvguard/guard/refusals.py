"""Refusals that outlive a restart of the container, so that weights are not loaded again to be refused again.

A refusal is remembered under a digest of all that it rests on. The same start finds it and is refused before its engine is
started; a start in which anything of it changed begins as if nothing had been.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog
from pydantic import ValidationError

import kvguard
from kvguard.canonical import sha256_of
from kvguard.files import printable, read_regular_file
from kvguard.guard.prepare import Prepared
from kvguard.policy.models import OnViolation, Policy, policy_digest
from kvguard.record.redact import redact_argv, redact_env
from kvguard.verdict.checks import violations
from kvguard.vocabulary import Check, CheckResult, Frozen, UsageError

log = structlog.get_logger("kvguard")

_LIMIT = 1 << 20
_RELEVANT = re.compile(r"(VLLM|NVIDIA|CUDA|HIP|ROCR|TORCH|PYTORCH|FLASHINFER|TRITON)_")
_ELSEWHERE = re.compile(r"--(host|port|uds|ssl-.+|root-path|config)")  # where it is served; a file's flags count one by one
_BY_PLACE = frozenset({"VLLM_HOST_IP", "VLLM_PORT", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"})


class Refusal(Frozen):
    """What was refused, and when (ISO 8601, UTC). `checks` are those that failed."""

    refused_at: str
    checks: tuple[Check, ...]


def place(directory: Path, prepared: Prepared, policy: Policy | None, env: Mapping[str, str]) -> Path:
    """Where the refusal of this start is remembered: a file named after a digest over kvguard's and the engine's version, the
    command's flags, the plan, the checkpoint's files, the policy, and the environment that vLLM and the GPU runtime read.
    """
    engine, resolution = prepared.engine, prepared.resolution
    read = {name: text for name, text in env.items() if _RELEVANT.match(name) and name not in _BY_PLACE}
    digest = sha256_of(
        {
            "kvguard": kvguard.__version__,
            "engine": [engine.package, engine.full_version, engine.python_version],
            "flags": [
                redact_argv([use.name, *use.values]) for use in prepared.command.uses if not _ELSEWHERE.fullmatch(use.name)
            ],
            "plan": [resolution.target, prepared.runtime.model_dump(mode="json") if prepared.runtime is not None else None],
            "calibration": prepared.calibration,
            "prompts": prepared.prompts.digest,
            "files": [[item.name, item.kind, item.sha256] for item in prepared.digests],
            "policy": policy_digest(policy) if policy is not None else None,
            "environment": redact_env(read),
        }
    )
    return directory / f"{digest.removeprefix('sha256:')[:32]}.json"


def remember(path: Path | None, checks: Sequence[Check]) -> None:
    """Keep a refusal that evidence contradicts. What could not be verified may be readable next time, and is not kept.

    A place that cannot be written is reported, and the next start loads the weights again.
    """
    failed = tuple(check for check in violations(checks) if check.result is CheckResult.FAIL)
    if path is None or not failed:
        return
    text = Refusal(refused_at=datetime.now(UTC).isoformat(timespec="seconds"), checks=failed).model_dump_json(indent=1)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".refusal-", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except OSError as error:
        log.warning("the refusal could not be remembered", path=str(path), error=error.strerror)
    else:
        log.info("the refusal is remembered: the same start is refused before its engine is started", path=str(path))


def recall(path: Path, policy: Policy | None) -> tuple[Check, ...]:
    """The failed checks of the same start, each saying where it was remembered; () when there are none, or when the policy
    serves all the same. A file that is not a refusal is reported and taken for none.
    """
    if (policy is not None and policy.on_violation is OnViolation.WARN) or not path.exists():
        return ()
    try:
        found = Refusal.model_validate_json(read_regular_file(path, _LIMIT, "remembered refusal"))
    except (UsageError, ValidationError) as error:
        why = str(error) if isinstance(error, UsageError) else f"{error.error_count()} errors"
        log.warning("a remembered refusal cannot be read; the engine is started", path=str(path), error=printable(why))
        return ()
    again = f"nothing it rests on has changed since: change that, or delete {path} to load the weights again"
    return tuple(
        check.model_copy(
            update={
                "where": f"{check.where}; remembered from {found.refused_at}",
                "action": f"{check.action}; {again}" if check.action else again,
            }
        )
        for check in violations(found.checks)
    )
