"""The launch plan: the same command, made explicit about its KV cache, moved to a private socket, readable inside.

Pure: it decides and explains, and starts nothing. Each change to the command is listed with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from kvguard.checkpoint.models import Declared
from kvguard.engine.command import Command, FlagUse, as_int
from kvguard.engine.hub import Published
from kvguard.engine.resolve import Resolution
from kvguard.facts.launch_modes import LaunchMode, launch_modes
from kvguard.verdict.runtime_scales import RuntimeScales
from kvguard.vocabulary import Frozen, UsageError

INSIDE_MODULE = "kvguard_inside"
TLS_FLAGS = ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers")
_TLS_SWITCH = "--enable-ssl-refresh"


class Change(Frozen):
    """One difference between the command as written and the command as run."""

    what: str
    why: str


class Listen(Frozen):
    """Where the wrapped command said vLLM should listen, and kvguard now does. `uds` wins over host and port."""

    host: str
    port: int
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None


class Plan(Frozen):
    """What will be started. `files` are written into the run directory first (name -> content)."""

    argv: tuple[str, ...]
    env: dict[str, str] = Field(repr=False)
    files: dict[str, str] = Field(repr=False)
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]
    listen: Listen
    api_keys: tuple[str, ...] = Field(default=(), repr=False)


def refused_modes(command: Command, env: Mapping[str, str]) -> tuple[LaunchMode, ...]:
    """Launch modes in the table that this command uses and kvguard does not guard."""
    return tuple(mode for mode in _used_modes(command, env) if mode.support == "refused")


def degraded_modes(command: Command, env: Mapping[str, str]) -> tuple[LaunchMode, ...]:
    """Launch modes in use that work with something lost."""
    return tuple(mode for mode in _used_modes(command, env) if mode.support == "degraded")


def _used_modes(command: Command, env: Mapping[str, str]) -> list[LaunchMode]:
    return [mode for mode in launch_modes() if _applies(mode.when, command, env)]


def _applies(when: Mapping[str, Any], command: Command, env: Mapping[str, str]) -> bool:
    if "subcommand" in when:
        return bool(command.words.subcommand == when["subcommand"])
    if "env" in when:
        return env.get(when["env"], "").lower() in ("1", "true", "yes", "on")
    flag = when["flag"]
    if "above" in when:
        value = as_int(command.value(flag))
        return value is not None and value > int(when["above"])
    if "equals" in when:
        return command.value(flag) in when["equals"]
    # Dotted JSON flags (--kv-transfer-config.kv_connector X) set the same option.
    dotted = any(use.name.startswith(flag + ".") for use in command.uses)
    return command.present(flag) or dotted


def listen_of(command: Command) -> Listen:
    """Where the command said to listen; vLLM's defaults are all interfaces and port 8000."""
    port_text = command.value("--port")
    port = 8000 if port_text is None else as_int(port_text)
    if port is None or not 0 < port < 65536:
        raise UsageError(f"--port {port_text!r}: a port is a number from 1 to 65535")
    reqs = command.value("--ssl-cert-reqs") or "0"
    if reqs not in ("0", "1", "2"):
        raise UsageError(f"--ssl-cert-reqs {reqs!r}: 0 (none), 1 (optional) or 2 (required)")
    if command.value("--ssl-certfile") is None:
        for flag in (*TLS_FLAGS, _TLS_SWITCH):
            if (use := command.last(flag)) is not None and command.present(flag):
                raise UsageError(f"{use.where}: TLS needs --ssl-certfile as well; nothing is served in the clear instead")
    return Listen(
        host=command.value("--host") or "0.0.0.0",  # noqa: S104 (vLLM's own default, which the command chose)
        port=port,
        uds=command.value("--uds"),
        ssl_keyfile=command.value("--ssl-keyfile"),
        ssl_certfile=command.value("--ssl-certfile"),
        ssl_ca_certs=command.value("--ssl-ca-certs"),
        ssl_cert_reqs=int(reqs),
        ssl_ciphers=command.value("--ssl-ciphers"),
    )


def make_plan(
    command: Command,
    resolution: Resolution,
    declared: Declared,
    *,
    executable: Sequence[str],
    run_directory: Path,
    free_port: int,
    env: Mapping[str, str],
    colour: bool,
    name: str = "engine",
    runtime: RuntimeScales | None = None,
    published: Published | None = None,
) -> Plan:
    """The command to run, with its environment and the files it needs.

    `executable` replaces the words that named vLLM by absolute paths; `free_port` is given to the engine, which
    listens on the Unix socket only; `colour` says whether our own standard output is a terminal. `name` is that of the
    socket, and keeps the files of two engines in one run directory apart. `runtime`: how it gets runtime scales.
    `published`: where the checkpoint was read, if not on this disk.
    """
    edits = _Edits(command)
    socket = str(run_directory / f"{name}.sock")
    listen = listen_of(command)
    edits.drop("--host", "--port", "--uds")
    edits.add("--uds", socket)
    edits.add("--port", str(free_port))
    edits.note(f"listens on {socket}", "clients reach it through kvguard, where the command said, and no other way")

    tls = [flag for flag in (*TLS_FLAGS, _TLS_SWITCH) if command.last(flag)]
    if tls:
        edits.drop(*tls)
        edits.note(f"{', '.join(tls)} removed", "kvguard ends TLS on the public port with these files")

    new_env = dict(env)
    keys = _api_keys(command, env)
    if command.last("--api-key") and len(keys) == 1:
        edits.drop("--api-key")
        new_env["VLLM_API_KEY"] = keys[0]
        edits.note("--api-key moved to VLLM_API_KEY", "arguments are visible to every user of the machine")
    elif command.last("--api-key") and keys:
        edits.drop("--api-key")
        edits.configure("api-key", list(keys))
        edits.note("--api-key moved to a private --config file", "arguments are visible to every user of the machine")

    if published is not None and command.value("--revision") != published.commit:
        edits.drop("--revision")
        edits.add("--revision", published.commit)
        edits.note(
            f"--revision {published.commit}",
            f"the files read on {published.endpoint} are those that are downloaded; {published.revision} may move",
        )
    _state_dtype(edits, resolution, declared)
    if runtime is not None and not runtime.problem:
        _state_scales(edits, command, runtime)
    _carry_reader(edits, command, new_env, run_directory)

    new_env["PYTHONUNBUFFERED"] = "1"
    new_env["VLLM_RPC_BASE_PATH"] = str(run_directory)
    if colour and "NO_COLOR" not in env:
        new_env.setdefault("VLLM_LOGGING_COLOR", "1")
        new_env.setdefault("FORCE_COLOR", "1")

    argv, files = edits.result(executable, run_directory, "config.yaml" if name == "engine" else f"{name}.yaml")
    return Plan(
        argv=argv,
        env=new_env,
        files=files,
        changes=tuple(edits.changes),
        warnings=command.warnings,
        listen=listen,
        api_keys=keys,
    )


def _api_keys(command: Command, env: Mapping[str, str]) -> tuple[str, ...]:
    typed = tuple(key for key in command.values("--api-key") if key)
    return typed or tuple(key for key in (env.get("VLLM_API_KEY", ""),) if key)


def _state_dtype(edits: _Edits, resolution: Resolution, declared: Declared) -> None:
    """Write the resolved KV dtype into the command, or say why it is left."""
    if resolution.stated is not None:
        edits.drop("--kv-cache-dtype")
        edits.add("--kv-cache-dtype", resolution.stated)
        edits.note(f"--kv-cache-dtype {resolution.stated}", resolution.reason)
    if resolution.strip_scheme and declared.kv_scheme is not None:
        edits.drop("--hf-overrides")
        edits.add("--hf-overrides", json.dumps(resolution.hf_overrides, sort_keys=True))
        edits.note(f"--hf-overrides without {declared.kv_scheme.where}", resolution.reason)


def _state_scales(edits: _Edits, command: Command, runtime: RuntimeScales) -> None:
    """Have the engine calculate its scales, or load those of an overlay instead of the checkpoint."""
    if runtime.way == "flag":
        if not command.present("--calculate-kv-scales"):
            edits.drop("--calculate-kv-scales")
            edits.add("--calculate-kv-scales")
            edits.note("--calculate-kv-scales", runtime.reason)
        return
    if command.last("--calculate-kv-scales"):
        edits.drop("--calculate-kv-scales")
        edits.note("--calculate-kv-scales removed", runtime.reason)
    edits.load(runtime.overlay)
    edits.note(f"model {runtime.overlay}", f"the same weights with calibrated scales; {runtime.reason}")
    if not command.present("--served-model-name"):
        edits.add("--served-model-name", command.model)
        edits.note(f"--served-model-name {command.model}", "clients know the model by the name in the command")


def _carry_reader(edits: _Edits, command: Command, env: dict[str, str], run_directory: Path) -> None:
    """Add the reader: a worker extension and a middleware, composed with those the command already has."""
    theirs = command.value("--worker-extension-cls")
    if theirs:
        env["KVGUARD_INSIDE_EXTENSION"] = theirs
        edits.drop("--worker-extension-cls")
        edits.note(f"worker extension {theirs} wrapped", "vLLM takes one; kvguard's inherits from it")
    edits.add("--worker-extension-cls", f"{INSIDE_MODULE}.WorkerExtension")
    edits.add("--middleware", f"{INSIDE_MODULE}.EvidenceMiddleware")
    edits.note("--worker-extension-cls and --middleware added", "each worker's cache tensors and scales are read from inside")
    inside = str(run_directory / "inside")
    env["PYTHONPATH"] = inside + (":" + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
    env["KVGUARD_INSIDE_SECRET_FILE"] = str(run_directory / "secret")


class _Edits:
    """Collects removals and additions, then writes the command line and, where needed, a filtered YAML file."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._dropped: set[str] = set()
        self._added: list[str] = []
        self._configured: dict[str, Any] = {}
        self._model: str | None = None
        self.changes: list[Change] = []

    def configure(self, key: str, value: Any) -> None:
        """Say it in the YAML file instead of an argument."""
        self._configured[key] = value

    def load(self, model: str) -> None:
        """Name another model, wherever the command named its own."""
        self._model = model
        self.drop("--model")

    def drop(self, *names: str) -> None:
        self._dropped.update(names)

    def add(self, *tokens: str) -> None:
        self._added.extend(tokens)

    def note(self, what: str, why: str) -> None:
        self.changes.append(Change(what=what, why=why))

    def _gone(self, use: FlagUse) -> bool:
        name = use.name.partition(".")[0]  # --hf-overrides.a.b sets --hf-overrides
        return name in self._dropped or (name.startswith("--no-") and "--" + name[5:] in self._dropped)

    def result(
        self, executable: Sequence[str], run_directory: Path, config_name: str
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        command = self._command
        files: dict[str, str] = {}
        arguments = list(command.words.arguments)
        keep = [True] * len(arguments)
        for use in command.uses:
            if use.count and self._gone(use):
                for index in range(use.start, use.start + use.count):
                    keep[index] = False
        gone = {use.key for use in command.uses if not use.count and self._gone(use)}
        if self._model is not None:
            flags = {index for use in command.uses for index in range(use.start, use.start + use.count)}
            keep = [wanted and index in flags for index, wanted in enumerate(keep)]
            gone |= {key for key in ("model", "model_tag") if key in (command.config_data or {})}
        if gone or self._configured:
            data = {key: value for key, value in (command.config_data or {}).items() if key not in gone}
            if self._model is None and command.config_path is None and arguments[0].startswith("-"):
                # With a file, vLLM takes the model from the first word or from the file (0.32.0 argparse_utils.py:535).
                data["model"] = command.model
            files[config_name] = yaml.safe_dump({**data, **self._configured}, sort_keys=False)
            path = str(run_directory / config_name)
            for use in command.uses:
                if use.name == "--config" and use.count == 2:
                    arguments[use.start + 1] = path
            if command.config_path is None:
                self.add("--config", path)
        if gone:
            self.note(f"{command.config_path} copied without {', '.join(sorted(gone))}", "kvguard states or owns them")
        kept = [token for token, wanted in zip(arguments, keep, strict=True) if wanted]
        model = [] if self._model is None else [self._model]
        if model and command.words.launcher == "module":
            model = ["--model", *model]
        return (*executable, *model, *kept, *self._added), files
