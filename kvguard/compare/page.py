"""The report as one HTML page that needs nothing else: no script, no font, no address."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape

from kvguard.compare.models import CONTROLS
from kvguard.compare.outcome import ArmResult, Outcome
from kvguard.compare.plots import capacity_bars, divergences, heat_map, losses, throughput_bars
from kvguard.compare.table import HEADINGS, TASK_HEADINGS, aside, decision_rows, divergence_text, tail_text, task_rows

_STYLE = """
:root { --ink: #1c1c1c; --soft: #666; --line: #ddd; --back: #fff; color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --soft: #aaa; --line: #444; --back: #181818 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto; max-width: 1100px;
  padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin-top: 2rem } h3 { font-size: 1rem; margin-bottom: .3rem }
.wide { overflow-x: auto } .wide > * { min-width: 56rem } .wide > svg { min-width: 0; max-width: none; display: block }
table { border-collapse: collapse; font-size: .87rem; width: 100% }
caption { text-align: left; color: var(--soft) }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word }
table.differences { table-layout: fixed; min-width: 40rem } .differences td { overflow-wrap: anywhere }
.tasks td:last-child { min-width: 18rem }
th { color: var(--soft); font-weight: 600 } code, pre { font: .82rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere }
pre { white-space: pre-wrap; border: 1px solid var(--line); padding: .6rem } svg { max-width: 100%; height: auto }
.verdict { display: inline-block; padding: .1rem .6rem; border-radius: .3rem; color: #fff; font-weight: 600 }
.free { background: #3c7a3c } .keep { background: #b23a2a } .cannot { background: #666 }
.maps { display: flex; flex-wrap: wrap; gap: 2rem }
"""
_TASKS = "Losses in points of 100, paired by item; truncated: 16-bit arm / this arm."
_CLASSES = {"free win": "free", "keep 16-bit": "keep", "cannot tell": "cannot"}


def page(outcome: Outcome) -> str:
    """The page. Everything that comes from data is escaped."""
    rules, production = outcome.rules, outcome.production
    judged = [arm for arm in outcome.arms if arm.verdict is not None]
    body = [
        f"<h1>KV cache comparison: {escape(outcome.model)}</h1>",
        f"<p>vLLM {escape(outcome.engine)}, seed {outcome.seed}{', quick' if outcome.quick else ''}. A loss under "
        f"{100 * rules.margin:g} points is accepted; the cache must hold {rules.capacity_ratio:g} times the tokens for each "
        f"byte. kvguard {escape(outcome.kvguard_version)}.</p>",
        *map(_verdict, judged),
        *_found(outcome),
        *(["<h1>With graphs and compilation, as served in production</h1>", *_found(production)] if production else []),
        *(part for arm in judged for part in _differences(arm)),
        "<h2>Not covered</h2>",
        _list(outcome.notes),
        "<h2>How to reproduce</h2>",
        *map(_command, (*outcome.arms, *(production.arms if production else ()))),
        f"<p>Plan <code>{escape(outcome.plan_digest)}</code>; limits "
        f"{escape(', '.join(f'{name} {value}' for name, value in outcome.limits.items()))}.</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(f'KV cache comparison: {outcome.model}')}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _found(outcome: Outcome) -> list[str]:
    """Tables and plots of the arms of one mode."""
    return [
        _table(HEADINGS, decision_rows(outcome), "One row for each arm; divergence is mean |Δ logprob| by token, with 95 %."),
        "<h2>Loss by task</h2>",
        _plot(losses(outcome)),
        _table(TASK_HEADINGS, task_rows(outcome), _TASKS, "tasks"),
        *_section("Long-context retrieval by length and depth", _maps(outcome)),
        *_section("Divergence by text", _plot(divergences(outcome))),
        _divergence_table(outcome),
        *_section("Capacity: tokens that the KV cache holds, as measured", _plot(capacity_bars(outcome))),
        *_section("Throughput: tokens per second at saturation", _plot(throughput_bars(outcome))),
    ]


def _verdict(arm: ArmResult) -> str:
    kind = _CLASSES[str(arm.verdict)]
    told = _list((*arm.why, *aside(arm)))
    return f'<p><span class="verdict {kind}">{escape(str(arm.verdict))}</span> {escape(arm.arm)}</p>{told}'


def _maps(outcome: Outcome) -> str:
    maps = [f"<div><h3>{escape(arm.arm)}</h3>{drawn}</div>" for arm in outcome.arms if (drawn := heat_map(arm))]
    return f'<div class="maps">{"".join(maps)}</div>' if maps else ""


def _divergence_table(outcome: Outcome) -> str:
    headings = (
        "config",
        "decode |Δ logprob|",
        "95th / 99th percentile",
        "top-1 flips",
        "KL, at least",
        "teacher forced |Δ logprob|",
        "95th / 99th percentile",
        "problems",
    )
    rows = [
        (
            arm.arm,
            divergence_text(found.decode),
            tail_text(found.tail),
            divergence_text(found.flips),
            divergence_text(found.kl),
            divergence_text(found.forced),
            tail_text(found.forced_tail),
            "; ".join(found.problems),
        )
        for arm in outcome.arms
        for found in (arm.divergence,)
        if found.by_text or found.problems
    ]
    note = (
        "Decode: the arm's own greedy tokens, scored by the 16-bit engine. Teacher forced: the arm over the 16-bit arm's text, "
        "which measures its prefill. Percentiles are over tokens."
    )
    return _table(headings, rows, note) if rows else ""


def _differences(arm: ArmResult) -> list[str]:
    rows = [(found["path"], found["reference"], found["arm"]) for found in arm.differences]
    same = f"{arm.identical[0]} of {arm.identical[1]} outputs are identical to the 16-bit arm's."
    return [
        f"<h2>What differs between the records: {escape(arm.arm)}</h2>",
        f"<p>{same}</p>",
        _table(("where", "16-bit", arm.arm), rows, kind="differences"),
    ]


def _plot(drawn: str) -> str:
    """A plot keeps its size, so that its words can be read, and is scrolled where the window is narrower."""
    return f'<div class="wide">{drawn}</div>' if drawn else ""


def _command(arm: ArmResult) -> str:
    kind = " (control)" if arm.arm in CONTROLS else ""
    return f"<h3>{escape(arm.arm)}{kind}</h3><pre>{escape(shlex.join(arm.command))}\nrecord {escape(arm.record_digest)}</pre>"


def _section(title: str, content: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", content] if content else []


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", kind: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in headings)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    inner = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{inner}>{said}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
