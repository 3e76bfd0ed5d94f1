"""The launched reference before it starts: the primary's command with the model's own KV dtype, or why there is none."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvguard.engine.connectors import connectors_of
from kvguard.engine.plan import Plan
from kvguard.engine.run_directory import RunDirectory
from kvguard.guard.prepare import Prepared, plan_for, prepare
from kvguard.policy.models import MODEL_DTYPE, KVCachePolicy, Policy
from kvguard.verdict.checks import describe, violations
from kvguard.vocabulary import Confidence, UsageError

NAME = "reference"
"""Of the launched engine's socket and files in the run directory, and before each line of its log."""

SIXTEEN_BIT = Policy(kv_cache=KVCachePolicy(dtype=(MODEL_DTYPE,), min_confidence=Confidence.PROVEN))
"""What the reference must be, in a policy's words."""

_LEFT_OUT = frozenset(
    {
        "--kv-cache-dtype-skip-layers",
        "--calculate-kv-scales",
        "--kv-events-config",
        "--enable-log-requests",
        "--kv-transfer-config",
        "--ec-transfer-config",
        "--kv-offloading-size",
        "--kv-offloading-backend",
    }
)
"""Flags of a quantized cache, of an address or a store that two engines cannot share, and those that would log probes'
prompts."""

_DTYPE = "--kv-cache-dtype"


@dataclass(frozen=True, slots=True)
class ReferenceStart:
    """A reference that can be started. `argv` is its command as it stands in its record."""

    prepared: Prepared
    argv: tuple[str, ...]
    plan: Plan = field(repr=False)

    @property
    def key(self) -> str | None:
        """The engine's API key."""
        return self.plan.api_keys[0] if self.plan.api_keys else None


def start_reference(
    primary: Prepared, flags: Sequence[str], run_directory: RunDirectory, env: Mapping[str, str]
) -> ReferenceStart:
    """Decide how the reference of this primary is started. `flags` are the user's own for it, each a shell word or more.

    The KV dtype is resolved as for a policy of `16bit`: stated where the version honours that, else a checkpoint's scheme
    is stripped. Raises UsageError when a 16-bit cache cannot be had.
    """
    more = [word for each in flags for word in _words(each)]
    prefix, kept = primary.command.words.prefix, _without(primary, _LEFT_OUT)
    pinned = ("--revision", primary.published.commit) if primary.published else ()
    argv = (*prefix, *kept, *more, *pinned, _DTYPE, "auto")
    try:
        prepared = prepare(argv, SIXTEEN_BIT, env, hub=True)
    except UsageError as error:
        raise UsageError(f"--shadow-launch: the reference's command: {error}") from error
    command = prepared.command
    if any(use.name == _DTYPE and len(kept) <= use.start < len(kept) + len(more) for use in command.uses if use.count):
        raise UsageError(f"--shadow-launch-flag {_DTYPE}: the reference's KV cache is always 16-bit; leave this flag out")
    if connectors := connectors_of(command):
        flag = connectors[0]["flag"]
        raise UsageError(f"--shadow-launch: the reference's command: {flag}: it takes no KV blocks from elsewhere")
    if problems := [describe(check) for check in violations(prepared.checks)]:
        raise UsageError(f"--shadow-launch: no 16-bit reference of this model: {'; '.join(problems)}")
    if prepared.resolution.model_dtype is None:
        why = "the model's own dtype is not known before the start, and 16bit is that; state it with --dtype"
        raise UsageError(f"--shadow-launch: no 16-bit reference of this model: {why}")
    plan = plan_for(prepared, run_directory, env, colour=False, name=NAME)
    return ReferenceStart(prepared, argv, plan)


def _words(flag: str) -> list[str]:
    try:
        return shlex.split(flag)
    except ValueError as error:
        raise UsageError(f"--shadow-launch-flag {flag!r}: {error}") from error


def _without(primary: Prepared, names: frozenset[str]) -> tuple[str, ...]:
    """The primary's arguments as written, without these flags. What a --config file says of them stays."""
    command = primary.command
    gone: set[int] = set()
    for use in command.uses:
        if use.name.replace("--no-", "--", 1).partition(".")[0] in names:
            gone.update(range(use.start, use.start + use.count))
    return tuple(word for place, word in enumerate(command.words.arguments) if place not in gone)
