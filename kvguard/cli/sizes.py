"""Sizes of memory as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from kvguard.vocabulary import UsageError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power
_SIZE = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,9})?)\s*(?P<unit>[A-Za-z]{0,3})")


def parse_size(text: str, option: str) -> int:
    """Bytes of "1073741824", "10.5GiB", "24 GB" or "1G" (G is GiB, as vLLM and Kubernetes' Gi mean it).

    UsageError names the option and what it accepts.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match["unit"].upper() if match else ""
    unit = unit if unit in _UNITS else f"{unit}B"
    size = int(Decimal(match["number"]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if size <= 0:
        raise UsageError(f"{option} {text!r}: not a size; write bytes or a number with KiB, MiB, GiB, TiB, MB or GB")
    return size


def human_bytes(size: float) -> str:
    """A size for a table: "1.00 GiB", "23,040 B"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:,.2f} {unit}"
    return f"{size:,.0f} B"
