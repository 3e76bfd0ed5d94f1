"""Commands, checkpoints and resolutions for tests of the launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint_fakes import SMOLLM2, Tensors, files
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.models import Declared
from kvguard.engine.command import Command, parse_command, split_words
from kvguard.engine.resolve import Resolution, resolve
from kvguard.policy.models import Policy
from kvguard.policy.parse import parse_policy

VERSION = "0.32.0"


def command(*argv: str, version: str = VERSION, config: bytes = b"") -> Command:
    """`vllm serve m …` understood; `config` is what any `--config` file holds."""
    return parse_command(split_words(("vllm", "serve", "m", *argv)), version, lambda _: config)


def declared(config: Mapping[str, Any] = SMOLLM2, tensors: Tensors | None = None) -> Declared:
    """What a checkpoint in memory asks for."""
    return declare(files(config, tensors))


def policy(text: str) -> Policy:
    """A policy from YAML."""
    return parse_policy(text.encode(), "policy.yaml")


def dtype(*names: str) -> Policy:
    """A policy that requires one of these dtypes."""
    return policy(f"kv_cache:\n  dtype: [{', '.join(names)}]\n")


def resolved(
    *argv: str,
    version: str = VERSION,
    required: Policy | None = None,
    config: Mapping[str, Any] = SMOLLM2,
    platform: str | None = None,
) -> Resolution:
    """The KV dtype of the plan for a command on a checkpoint."""
    return resolve(
        command(*argv, version=version),
        version,
        declared(config),
        required,
        config.get("quantization_config", {}),
        platform=platform,
    )
