"""Plots as inline SVG text. Every word that comes from data is escaped; every number is formatted here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kvguard.compare.models import CONTROLS
from kvguard.compare.outcome import ArmResult, Outcome

_WIDTH = 640
_LEFT = 130
_INK, _SOFT, _LINE = "var(--ink)", "var(--soft)", "var(--line)"
_COLOURS = ("#2a6f97", "#c8553d", "#6a994e", "#7f5a83", "#b08900", "#4d4d4d")


def heat_map(arm: ArmResult) -> str:
    """Retrieval by length (across) and depth (down): the share answered right, "" without such items."""
    if not arm.cells:
        return ""
    lengths = sorted({cell.length for cell in arm.cells})
    depths = sorted({cell.depth for cell in arm.cells})
    wide, high, left = 90, 30, 70
    parts = []
    for cell in arm.cells:
        x, y = left + lengths.index(cell.length) * wide, 26 + depths.index(cell.depth) * high
        parts.append(
            f'<rect x="{x}" y="{y}" width="{wide - 2}" height="{high - 2}" fill="{_colour(cell.right)}">'
            f"<title>{cell.length} tokens, depth {cell.depth} %: {cell.right:.0%} of {cell.items}</title></rect>"
            f'<text x="{x + wide / 2 - 1:.0f}" y="{y + 19}" text-anchor="middle" fill="#111">'
            f"{cell.right * cell.items:.0f} of {cell.items}</text>"
        )
    parts += [
        f'<text x="{left + i * wide + wide / 2:.0f}" y="16" text-anchor="middle" fill="{_SOFT}">{length:,}</text>'
        for i, length in enumerate(lengths)
    ]
    parts += [
        f'<text x="{left - 8}" y="{45 + i * high}" text-anchor="end" fill="{_SOFT}">{depth} %</text>'
        for i, depth in enumerate(depths)
    ]
    label = f"Retrieval of {arm.arm}: share right by length in tokens and depth"
    return _svg(left + wide * len(lengths), 30 + high * len(depths), parts, label)


def capacity_bars(outcome: Outcome) -> str:
    """Tokens that the cache of each arm holds, and in how many bytes, as measured."""
    rows = [
        (arm.arm, float(arm.capacity.kv_tokens), f"{arm.capacity.kv_tokens:,} in {arm.capacity.kv_bytes / 2**30:,.2f} GiB")
        for arm in outcome.arms
        if arm.capacity.kv_tokens and arm.capacity.kv_bytes and arm.arm not in CONTROLS
    ]
    return _bars(rows, "KV tokens")


def throughput_bars(outcome: Outcome) -> str:
    """Generated tokens in a second at saturation; the mean of the runs."""
    rows = [
        (arm.arm, middle, f"{middle:,.1f} ({min(arm.speed.runs):,.1f} to {max(arm.speed.runs):,.1f})")
        for arm in outcome.arms
        if arm.speed.runs and not arm.speed.void
        for middle in (sum(arm.speed.runs) / len(arm.speed.runs),)
    ]
    return _bars(rows, "tokens per second at saturation")


def divergences(outcome: Outcome) -> str:
    """Each text's mean |Δ logprob| by arm on a logarithmic axis: one dot a text, a bar at the mean."""
    rows = [(arm, [max(value, 1e-4) for value in arm.divergence.by_text]) for arm in outcome.arms if arm.divergence.by_text]
    if not rows:
        return ""
    low = math.floor(math.log10(min(min(values) for _, values in rows)))
    high = max(math.ceil(math.log10(max(max(values) for _, values in rows))), low + 1)
    room, step, parts = _WIDTH - _LEFT - 20, 34, []

    def across(value: float) -> float:
        return _LEFT + room * (math.log10(value) - low) / (high - low)

    bottom = 10 + step * len(rows)
    for power in range(low, high + 1):
        x = across(10.0**power)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{bottom}" stroke="{_LINE}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="{_SOFT}">{10.0**power:g}</text>')
    for place, (arm, values) in enumerate(rows):
        y = 10 + step * place + step / 2
        parts.append(_name(arm.arm, y))
        colour = _COLOURS[place % len(_COLOURS)]
        parts += [f'<circle cx="{across(v):.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.55"/>' for v in values]
        middle = across(max(arm.divergence.decode.value or 0.0, 10.0**low))
        parts.append(
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y - 10:.1f}" y2="{y + 10:.1f}" '
            f'stroke="{colour}" stroke-width="3"/>'
        )
    return _svg(_WIDTH, bottom + 24, parts, "Mean |Δ logprob| against the 16-bit engine, by text")


def losses(outcome: Outcome) -> str:
    """Each task's loss with its bounds, and the margin."""
    rows = [
        (f"{arm.arm}: {task.task}", task.paired.loss, task.paired.low, task.paired.high)
        for arm in outcome.arms
        for task in arm.tasks
        if task.paired is not None
    ]
    if not rows:
        return ""
    low = min(-0.05, *(row[2] for row in rows))
    high = max(0.05, 1.2 * outcome.rules.margin, *(row[3] for row in rows))
    left, step = 210, 24
    room, bottom = _WIDTH - left - 20, 10 + step * len(rows)

    def across(value: float) -> float:
        return left + room * (value - low) / (high - low)

    zero, margin = across(0.0), across(outcome.rules.margin)
    parts = [
        f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="6" y2="{bottom}" stroke="{_INK}"/>',
        f'<line x1="{margin:.1f}" x2="{margin:.1f}" y1="6" y2="{bottom}" stroke="#c8553d" stroke-dasharray="4 3"/>',
        *(
            f'<text x="{across(tick / 100):.1f}" y="{bottom + 16}" text-anchor="middle" fill="{_SOFT}">{tick}</text>'
            for tick in _ticks(100 * low, 100 * high)
        ),
        f'<text x="{margin:.1f}" y="{bottom + 30}" text-anchor="middle" fill="#c8553d">margin</text>',
    ]
    for place, (name, loss, least, most) in enumerate(rows):
        y = 10 + step * place + step / 2
        parts.append(_name(name, y, left))
        parts.append(f'<line x1="{across(least):.1f}" x2="{across(most):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_SOFT}"/>')
        parts.append(f'<circle cx="{across(loss):.1f}" cy="{y:.1f}" r="4" fill="{_COLOURS[0]}"/>')
    return _svg(_WIDTH, bottom + 38, parts, "Loss by task in points of 100, with both one-sided 95 % bounds")


def _ticks(low: float, high: float) -> list[int]:
    """Round numbers from `low` to `high`, 0 among them, at most a dozen."""
    step = next((step for step in (1, 5, 10, 25) if (high - low) / step <= 12), 50)
    return [tick for tick in range(-100, 101, step) if low <= tick <= high]


def _bars(rows: Sequence[tuple[str, float, str]], label: str) -> str:
    """A bar for each row of name, value and the value in words."""
    if not rows:
        return ""
    most = max(value for _, value, _ in rows) or 1.0
    room, step, parts = _WIDTH - _LEFT - 150, 32, []
    for place, (name, value, told) in enumerate(rows):
        y, wide = 6 + step * place, room * value / most
        parts.append(_name(name, y + 12))
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{wide:.1f}" height="{step - 10}" fill="{_COLOURS[place % len(_COLOURS)]}"/>'
        )
        parts.append(f'<text x="{_LEFT + wide + 6:.1f}" y="{y + 16}" fill="{_INK}">{told}</text>')
    return _svg(_WIDTH, 10 + step * len(rows), parts, label)


def _name(text: str, y: float, left: int = _LEFT) -> str:
    shown = text if len(text) <= left // 7 else text[: left // 7 - 1] + "…"
    return f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{_INK}">{escape(shown)}</text>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _colour(share: float) -> str:
    """From red over yellow to green; light enough for dark letters."""
    share = min(max(share, 0.0), 1.0)
    return f"hsl({120 * share:.0f} 60% 70%)"
