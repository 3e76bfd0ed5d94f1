"""How an engine may be launched, and what kvguard does with each way: a table in data."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, Literal

from kvguard.vocabulary import Frozen


class LaunchMode(Frozen):
    """One way to launch vLLM that needs a decision.

    `when` holds one of: {flag, present}, {flag, above: n}, {flag, equals: [...]}, {env, truthy}, {subcommand}.
    `refused` modes end before any GPU time; `degraded` ones say what is lost.
    """

    id: str
    when: dict[str, Any]
    support: Literal["refused", "degraded"]
    because: str
    do: str
    source: str


@cache
def launch_modes() -> tuple[LaunchMode, ...]:
    """Every mode in the table; a command that matches none is supported."""
    text = (resources.files("kvguard.facts") / "data/launch_modes.json").read_text("utf-8")
    return tuple(LaunchMode.model_validate(mode) for mode in json.loads(text)["modes"])
