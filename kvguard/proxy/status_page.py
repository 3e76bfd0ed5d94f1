"""The management port's page for people: verdict, what differs from policy, evidence, memory, batch, quality.

One HTML document, rendered here, without scripts or anything fetched; it is readable on a phone. Every text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from kvguard.files import printable
from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.proxy.page_parts import Row, cards, code, nats, number, paragraph, share, size, table
from kvguard.vocabulary import Check, CheckResult

MAX_ROWS = 200
"""Claims shown at most; all of them are in /evidence."""

MAX_CHARACTERS = 300
"""Of a claim's value."""

_TONE = {
    State.STARTING: "idle",
    State.VERIFYING: "idle",
    State.SERVING: "good",
    State.REFUSED: "bad",
    State.DRIFTED: "bad",
    State.DRAINING: "warn",
    State.STOPPED: "idle",
}
_RESULT_TONE = {CheckResult.PASS: "good", CheckResult.FAIL: "bad", CheckResult.WARN: "warn", CheckResult.UNVERIFIED: "warn"}
_STAGES = (
    ("observed", "Observed: what the running engine shows"),
    ("predicted", "Predicted: what this vLLM makes of it"),
    ("declared", "Declared: what the checkpoint's files ask for"),
    ("requested", "Requested: what the command asks for"),
)
_LINKS = ("/record", "/policy", "/evidence", "/shadow", "/readyz", "/metrics", "/docs")


def status_page(status: Status, claims: Sequence[dict[str, Any]], *, has_policy: bool, shadow: dict[str, Any] | None) -> str:
    """The page. `claims` are claims as JSON data, `shadow` the report of `/shadow`, or None while probing is off."""
    title = f"{status.effective.dtype} · {status.state.value} · kvguard"
    body = "\n".join(
        (
            _verdict(status, has_policy),
            _differences(status),
            _memory(status),
            _batch(status),
            _quality(shadow),
            _checks(status.checks),
            _evidence(status, claims),
            _footer(status),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_css()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def content_security_policy() -> str:
    """Allows the page's own style and nothing else, whatever an engine manages to have shown."""
    digest = base64.b64encode(hashlib.sha256(_css().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@cache
def _css() -> str:
    return (files("kvguard.proxy") / "status_page.css").read_text("utf-8")


def _verdict(status: Status, has_policy: bool) -> str:
    effective = status.effective
    ready = status.state in (State.SERVING, State.DRIFTED) and not status.unready
    held = f"policy, on violation: {status.on_violation}" if has_policy else "no policy: only integrity is checked"
    lines = [
        f'<p><span class="badge {_TONE[status.state]}">{escape(status.state.value)}</span> '
        f'<span class="soft">{"ready" if ready else "not ready"}</span></p>',
        f"<h1>KV cache {code(effective.dtype)}, {escape(effective.confidence.value)}; "
        f"scales {code(effective.scales.value)}</h1>",
        paragraph(status.unready or (status.reason if status.reason != status.state.value else "")),
        paragraph(effective.scales_detail),
        f'<p class="soft">{escape(status.model or "no model yet")} on vLLM {escape(status.engine_version or "?")}, '
        f"{escape(', '.join(effective.attention_backends) or 'backend unknown')}; {escape(held)}</p>",
        f'<p class="bad">Drifted: {escape(status.drift)}</p>' if status.drift else "",
        f'<p class="warn">The last verification could not confirm this: {escape(status.stale)}</p>' if status.stale else "",
        *(f'<p class="bad">Sources contradict each other: {escape(text)}</p>' for text in effective.contradictions),
    ]
    return "\n".join(line for line in lines if line)


def _differences(status: Status) -> str:
    """The checks that did not pass, worded to be acted on."""
    open_checks = [check for check in status.checks if check.result is not CheckResult.PASS]
    if not status.checks:
        return "<h2>What differs from policy</h2>\n<p>Nothing has been checked yet.</p>"
    if not open_checks:
        return "<h2>What differs from policy</h2>\n<p>Nothing: every check passes.</p>"
    rows = [
        (code(check.name), _result(check), escape(check.required), escape(check.found), escape(check.action))
        for check in open_checks
    ]
    return "<h2>What differs from policy</h2>\n" + table(("check", "result", "required", "found", "what to do"), rows)


def _memory(status: Status) -> str:
    gauges = status.gauges
    return cards(
        "KV memory",
        (
            ("held", size(gauges.kv_bytes_used)),
            ("capacity", size(gauges.kv_bytes_total)),
            ("tokens held", number(gauges.kv_tokens_used)),
            ("tokens it takes", number(gauges.kv_tokens_total or status.effective.kv_tokens)),
            ("bytes a token", number(gauges.bytes_per_token or status.effective.bytes_per_token)),
            ("blocks pinned", share(gauges.kv_pinned_ratio)),
        ),
    )


def _batch(status: Status) -> str:
    gauges = status.gauges
    occupancy = gauges.running / gauges.limit if gauges.running is not None and gauges.limit else None
    return cards(
        "Batch",
        (
            ("running", number(gauges.running)),
            ("waiting", number(gauges.waiting)),
            ("limit", number(gauges.limit)),
            ("occupancy", share(occupancy)),
            ("preemptions", number(gauges.preemptions_total)),
        ),
    )


def _quality(shadow: dict[str, Any] | None) -> str:
    if shadow is None or shadow.get("state") == "off":
        return "<h2>Quality</h2>\n<p>Shadow probes are off: nothing is known of what this cache costs in quality.</p>"
    estimates = shadow.get("estimates") or {}
    rows = []
    for name, found in estimates.items():
        for measure, label, shown in (("abs_delta", "mean |Δ logprob|", nats), ("flip_rate", "top-1 flips", share)):
            one = found.get(measure) or {}
            interval = f"{shown(one.get('low'))} to {shown(one.get('high'))}" if one.get("low") is not None else "no interval"
            rows.append((escape(str(name)), escape(label), shown(one.get("value")), interval, number(found.get("requests"))))
    alarm = shadow.get("alarm") or {}
    reason, evidence = (str(part.get("reason") or "") for part in (shadow, alarm))
    said = " — ".join(part for part in (reason, evidence if evidence not in reason else "") if part)
    state = str(shadow.get("state"))
    tone = {"probing": "good", "regression": "bad", "blind": "warn", "refused": "warn"}.get(state, "idle")
    head = f'<h2>Quality</h2>\n<p><span class="badge {tone}">{escape(state)}</span> {escape(said)}</p>\n'
    baseline = shadow.get("baseline")
    caption = f"noise floor {nats(baseline)}" if baseline is not None else "no noise floor is known yet"
    return head + table(("comparison", "measure", "estimate", "95 % interval", "requests"), rows, caption)


def _checks(checks: Iterable[Check]) -> str:
    rows = [(code(one.name), _result(one), escape(one.required), escape(one.found), escape(one.where)) for one in checks]
    return "<h2>Checks</h2>\n" + table(("check", "result", "required", "found", "read where"), rows)


def _evidence(status: Status, claims: Sequence[dict[str, Any]]) -> str:
    supporting = {(claim.source.value, claim.field, claim.where) for claim in status.effective.supported_by}
    parts = ["<h2>Evidence</h2>"]
    shown = 0
    for stage, title in _STAGES:
        of_stage = [claim for claim in claims if claim.get("stage") == stage]
        rows = [_claim(claim, supporting) for claim in of_stage[: MAX_ROWS - shown]]
        shown += len(rows)
        more = f"; {len(of_stage) - len(rows)} more in /evidence" if len(of_stage) > len(rows) else ""
        is_open = " open" if stage == "observed" else ""
        shown_claims = table(("source", "field", "value", "read where", "note"), rows)
        parts.append(f"<details{is_open}><summary>{escape(title)} ({len(of_stage)}{more})</summary>\n{shown_claims}</details>")
    return "\n".join(parts)


def _claim(claim: dict[str, Any], supporting: set[tuple[str, str, str]]) -> Row:
    source, field, where = (str(claim.get(key, "")) for key in ("source", "field", "where"))
    value = claim.get("value")
    said = code(printable(str(value), MAX_CHARACTERS)) if value is not None else '<span class="soft">no information</span>'
    if (source, field, where) in supporting:
        said += ' <span class="good">decides</span>'
    return escape(source), code(field), said, escape(where), escape(str(claim.get("note") or ""))


def _footer(status: Status) -> str:
    verified = (
        "never" if status.last_verified is None else datetime.fromtimestamp(status.last_verified, UTC).isoformat(" ", "seconds")
    )
    record = f"Run record {code(status.record_digest)}" if status.record_digest else "No run record yet"
    path = f" in {code(status.record_path)}" if status.record_path else ""
    links = "\n".join(f'<a href="{link}">{link}</a>' for link in _LINKS)
    said = f"<p>{record}{path}. Last verified: {escape(verified)}.</p>"
    return f'<footer>\n{said}\n<nav aria-label="documents">{links}</nav>\n</footer>'


def _result(check: Check) -> str:
    advisory = "" if check.enforced else ' <span class="soft">(not enforced)</span>'
    return f'<strong class="{_RESULT_TONE[check.result]}">{escape(check.result.value)}</strong>{advisory}'
