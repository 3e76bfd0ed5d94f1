"""How an engine may be launched, and what kvguard does with each way: a table in data."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from kvguard.facts.versions import read_data
from kvguard.vocabulary import Frozen


class LaunchMode(Frozen):
    """One way to launch vLLM that needs a decision.

    `when` holds one of: {flag, present}, {flag, above: n}, {flag, equals: [...]}, {env, truthy}, {subcommand}.
    `refused` modes end before any GPU time; `degraded` ones say what is lost. A command that uses none is supported.
    """

    id: str
    when: dict[str, Any]
    support: Literal["supported", "degraded", "refused"]
    because: str
    do: str
    source: str


@cache
def launch_modes() -> tuple[LaunchMode, ...]:
    """Every mode in the table; a command that matches none is supported."""
    return tuple(LaunchMode.model_validate(mode) for mode in read_data("launch_modes")["modes"])
