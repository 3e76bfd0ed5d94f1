"""The gate of a pipeline: which verdict is required, and by which rules, as a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError

from kvguard.compare.outcome import RANK, Outcome, Rules
from kvguard.files import printable, read_regular_file
from kvguard.vocabulary import Frozen, UsageError

FILE_LIMIT = 1 << 16


class Gate(Frozen):
    """A gate's file."""

    require: Literal["free win", "cannot tell"] = Field(
        default="free win",
        description="The least verdict that passes. `cannot tell` refuses only a shown loss. Default: `free win`.",
    )
    arms: tuple[str, ...] = Field(default=(), description="The arms that must pass. Default: every quantized arm.")
    margin_points: float = Field(
        default=2.0, gt=0, le=50, description="The loss that is accepted, in points (hundredths). Default: 2."
    )
    capacity_ratio: float = Field(
        default=1.5, ge=1, le=16, description="Least gain in tokens for each byte. Default: 1.5; hybrid models never double."
    )
    truncation_percent: float = Field(
        default=5.0, ge=0, le=100, description="Answers that may end by their length before a task is void. Default: 5."
    )

    @property
    def rules(self) -> Rules:
        """What the verdicts are held against."""
        return Rules(
            margin=self.margin_points / 100, capacity_ratio=self.capacity_ratio, truncation=self.truncation_percent / 100
        )

    def check_arms(self, compared: Sequence[str]) -> None:
        """Raises UsageError for an arm that must pass and is not among those that are compared."""
        for name in self.arms:
            if name not in compared:
                raise UsageError(f"gate: arm {printable(name)!r} is not compared; found {', '.join(compared)}")


def load_gate(path: Path) -> Gate:
    """The gate in a file. Raises UsageError naming file and key."""
    name = printable(str(path))
    content = read_regular_file(path, FILE_LIMIT, "gate")
    try:
        document = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"gate {name}: not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(document, dict):
        raise UsageError(f"gate {name}: required is a mapping with some of {', '.join(Gate.model_fields)}")
    try:
        return Gate.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise UsageError(f"gate {name}: {printable('.'.join(map(str, first['loc'])))}: {first['msg']}") from None


def below(gate: Gate, outcome: Outcome) -> tuple[str, ...]:
    """What does not pass, one line for each arm. Raises UsageError for an arm that was not compared."""
    verdicts = {arm.arm: arm.verdict for arm in outcome.arms if arm.verdict is not None}
    gate.check_arms(tuple(verdicts))
    return tuple(
        f"arm {name}: required is {gate.require!r}, found {verdict!r}"
        for name, verdict in verdicts.items()
        if (not gate.arms or name in gate.arms) and RANK[verdict] < RANK[gate.require]
    )
