"""Pieces of an HTML page: tables and cards that a phone can show, and figures as people read them. All text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_ABSENT = "not given"

Row = Sequence[str]
"""Cells of one table row, as HTML."""


def table(heads: Sequence[str], rows: Sequence[Row], caption: str = "") -> str:
    """A table whose cells name their column, so that a narrow screen can stack them."""
    if not rows:
        return "<p>None.</p>"
    top = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "\n".join(
        "<tr>"
        + "".join(f'<td data-label="{escape(name)}"><span>{cell}</span></td>' for name, cell in zip(heads, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table>{top}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def cards(title: str, figures: Sequence[tuple[str, str]]) -> str:
    """A title above figures with their names; the figures are HTML."""
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in figures)
    return f'<h2>{escape(title)}</h2>\n<dl class="cards">{shown}</dl>'


def paragraph(text: str) -> str:
    """A paragraph, nothing for no text."""
    return f"<p>{escape(text)}</p>" if text else ""


def code(text: str) -> str:
    """A name or value as it stands in a file or command."""
    return f"<code>{escape(text)}</code>"


def number(value: float | None) -> str:
    """Thousands apart, no decimals."""
    return _ABSENT if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A ratio as a percentage."""
    return _ABSENT if value is None else f"{value:.1%}".replace("%", " %")


def nats(value: float | None) -> str:
    """A difference of log probabilities."""
    return _ABSENT if value is None else f"{value:.4f} nats"


def size(value: float | None) -> str:
    """Bytes in the largest unit that gives at least 1."""
    if value is None:
        return _ABSENT
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"
