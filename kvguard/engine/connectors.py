"""Where blocks of the KV cache may come from besides the engine itself: written elsewhere, with somebody's dtype and scales."""

from __future__ import annotations

import json
from typing import Any

from kvguard.engine.command import Command
from kvguard.vocabulary import Json

_PLAIN = ("--kv-offloading-size", "--kv-offloading-backend")
_SHOWN = ("kv_connector", "kv_role", "kv_connector_module_path", "ec_connector", "ec_role")


def connectors_of(command: Command) -> tuple[Json, ...]:
    """KV connectors, encoder connectors and offloading that a command turns on, one object for each flag.

    Addresses, ports and extra settings are left out: they differ between equal starts.
    """
    found: list[Json] = []
    for flag in ("--kv-transfer-config", "--ec-transfer-config"):
        config = _config(command, flag)
        if config:
            found.append({"flag": flag, **{name: config[name] for name in _SHOWN if name in config}})
    plain = {flag.removeprefix("--").replace("-", "_"): value for flag in _PLAIN if (value := command.value(flag)) is not None}
    if "kv_offloading_size" in plain:
        found.append({"flag": "--kv-offloading-size", **plain})
    return tuple(found)


def _config(command: Command, flag: str) -> dict[str, Any]:
    """A JSON flag with its dotted spellings (--kv-transfer-config.kv_connector X)."""
    config: dict[str, Any] = {}
    if (text := command.value(flag)) is not None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = {"kv_connector": "unreadable"}
        config = dict(value) if isinstance(value, dict) else {}
    for use in command.uses:
        if use.name.startswith(flag + ".") and use.values:
            config[use.name.removeprefix(flag + ".")] = use.values[-1]
    return config
