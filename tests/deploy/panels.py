"""The dashboards' queries as Grafana would send them with everything selected, and which of them may find nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from charts import ROOT
from watching import Watch, until

MAY_BE_EMPTY = {
    "Drift timeline": "a replica that never drifted has no bar",
    "Silent engines": "empty until an engine has been silent for five minutes",
}
"""Titles of panels that are empty when all is well, and the words with which their description says so."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One query of one panel."""

    dashboard: str
    panel: str
    about: str
    expression: str


def queries() -> list[Asked]:
    """Every query of every panel, variables filled in."""
    found = []
    for path in sorted((ROOT / "deploy" / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".+").replace("$instance", ".+")
                found.append(Asked(path.stem, panel["title"], panel["description"], expression))
    return found


def all_find(watch: Watch, asked: list[Asked], ask: Callable[[], object], limit: float) -> None:
    """Wait until each query has found something once, but for those that may be empty; `ask` sends a request in between."""
    left = [one for one in asked if one.panel not in MAY_BE_EMPTY]

    def found() -> bool:
        ask()
        left[:] = [one for one in left if not watch.query(one.expression)]
        return not left

    try:
        until(found, "every panel has data", limit)
    except AssertionError:
        raise AssertionError([f"{one.dashboard}: {one.panel}: {one.expression}" for one in left]) from None
