"""Finished arms as files, and the order in which they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvguard.compare.models import AGAIN, CONTROLS, EAGER, WEAK, ArmFile, is_sixteen_bit
from kvguard.compare.results import read_arm
from kvguard.vocabulary import UsageError


def read_arms(paths: Sequence[Path]) -> tuple[tuple[ArmFile, ...], ...]:
    """Finished arms of files, as `in_order` has them: those run eagerly, then those with graphs and compilation on.

    One of the two may be missing. Raises UsageError for files that are none, or arms that are given twice or are too few.
    """
    arms = [read_arm(path) for path in paths]
    eager = [arm for arm in arms if EAGER in arm.command]
    compiled = [arm for arm in arms if EAGER not in arm.command]
    both = bool(eager and compiled)
    modes = ((eager, "eager"), (compiled, "with graphs and compilation"))
    return tuple(_checked(some, f" among the arms that ran {mode}" if both else "") for some, mode in modes if some)


def _checked(arms: Sequence[ArmFile], where: str) -> tuple[ArmFile, ...]:
    names = [arm.arm for arm in arms]
    if len(set(names)) != len(names):
        raise UsageError(f"--from: arm {next(name for name in names if names.count(name) > 1)!r} is given twice")
    sixteen = [arm for arm in arms if is_sixteen_bit(arm.arm)]
    others = [arm for arm in arms if arm not in sixteen and arm.arm not in CONTROLS]
    if len(sixteen) not in (1, 2) or not others:
        found = ", ".join(names)
        raise UsageError(f"--from: required are the 16bit arm and at least one quantized one{where}; found {found}")
    return in_order(arms)


def in_order(arms: Sequence[ArmFile]) -> tuple[ArmFile, ...]:
    """The reference, the quantized arms, the 16-bit arm on its own backend where there is one, and the controls.

    Of two 16-bit arms the reference is the one on the backend of the first quantized arm.
    """
    quantized = [arm for arm in arms if arm.arm not in CONTROLS and not is_sixteen_bit(arm.arm)]
    backends = quantized[0].effective.attention_backends
    sixteen = [arm for arm in arms if is_sixteen_bit(arm.arm)]
    first, *own = sorted(sixteen, key=lambda arm: arm.effective.attention_backends != backends)
    return (first, *quantized, *own, *(arm for name in (WEAK, AGAIN) for arm in arms if arm.arm == name))
