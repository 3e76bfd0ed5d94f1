"""How many items a verdict takes, by simulation of paired answers: the table in the documentation."""

from __future__ import annotations

from kvguard.compare.draw import Draw
from kvguard.compare.statistics import sign_test, tango


def chance(
    items: int, loss: float, moved: float, margin: float, *, runs: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """(free win, loss shown, two-SE overlap accepts) as shares of `runs` simulated tasks.

    `moved` is the share of pairs whose answer changes without a loss, half of them each way; `loss` comes on top. The rule of
    thumb takes the two means as independent, each pair's reference being right half of the time.
    """
    draw = Draw(seed, "power", items, round(loss * 1e6), round(moved * 1e6))
    unit = 1_000_000
    to_lost, to_gained = round((loss + moved / 2) * unit), round((loss + moved) * unit)
    free = shown = overlap = 0
    for _ in range(runs):
        lost = gained = 0
        for _ in range(items):
            value = draw.below(unit)
            lost += value < to_lost
            gained += to_lost <= value < to_gained
        free += tango(lost, gained, items)[1] < margin
        shown += sign_test(lost, gained) <= 0.05
        error = (2 * 0.25 / items) ** 0.5
        overlap += abs(lost - gained) / items <= 2 * error
    return free / runs, shown / runs, overlap / runs


def power_rows(margin: float = 0.02, runs: int = 400) -> list[tuple[str, ...]]:
    """The documentation's table: items, pairs that move by chance, true loss, and the three shares."""
    rows: list[tuple[str, ...]] = []
    for items in (50, 200, 600, 1500):
        for moved in (0.02, 0.10):
            for loss in (0.0, 0.02, 0.05, 0.10):
                free, shown, overlap = chance(items, loss, moved, margin, runs=runs)
                rows.append((f"{items:,}", f"{moved:.0%}", f"{100 * loss:g}", f"{free:.0%}", f"{shown:.0%}", f"{overlap:.0%}"))
    return rows
