"""`kvguard probe` and `kvguard whatif`: one-shot quality probes of a guarded engine over a prompt file."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvguard.files import printable, read_regular_file
from kvguard.shadow.prompts import SELF_CHECK
from kvguard.shadow.what_if import NAMES, GivenScales
from kvguard.vocabulary import EngineFailed, UsageError

_FILE_LIMIT = 16 << 20
_TIMEOUT = 3600.0
LOOK_EVERY = 2.0
"""Seconds between looks at a live what-if."""

Target = Annotated[str, typer.Argument(metavar="URL", help="The management port, for example http://127.0.0.1:9464.")]
Prompts = Annotated[Path | None, typer.Option(help="Prompts, one a line, or JSON lines with a `prompt` key; default: ours.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens generated for each prompt.", min=1, max=4096)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def probe(
    url: Target,
    *,
    prompts: Prompts = None,
    max_tokens: MaxTokens = 64,
    greedy: Annotated[bool, typer.Option(help="Greedy replay; it understates the difference.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say how far the engine's quantized KV cache moves its answers to these prompts, with intervals.

    The engine must run behind `kvguard serve --shadow …`. Example: kvguard probe http://127.0.0.1:9464
    """
    _ask(url, prompts, [], max_tokens=max_tokens, greedy=greedy, as_json=as_json)


def whatif(
    url: Target,
    *,
    formats: Annotated[
        str, typer.Option(help=f"Cache formats to try, separated by commas, of {', '.join(NAMES)}.")
    ] = "fp8_e4m3,fp8_e5m2",
    rounding: Annotated[str, typer.Option(help="nearest, or truncate.")] = "nearest",
    scales: Annotated[
        str,
        typer.Option(
            metavar="engine|unit|FILE",
            help='The engine\'s own; 1.0; or a JSON file {"k": […], "v": […]}, for each layer one number or one a KV head.',
        ),
    ] = "engine",
    prompts: Prompts = None,
    max_tokens: MaxTokens = 64,
    greedy: Annotated[bool, typer.Option(help="Greedy replay; it understates the difference.")] = False,
    live: Annotated[bool, typer.Option("--live", help="On the requests that clients send now, in place of prompts.")] = False,
    probes: Annotated[int, typer.Option(help="With --live: how many probed requests to wait for.", min=2)] = 40,
    as_json: AsJson = False,
) -> None:
    """Say what other KV cache formats would change, on this engine, before anybody switches.

    Also on an engine that still runs 16-bit. Example: kvguard whatif http://127.0.0.1:9464 --formats fp8_e4m3,fp8_e5m2
    """
    names = [name.strip() for name in formats.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--formats: name at least one of {', '.join(NAMES)}")
    given = scales if scales in ("engine", "unit") else read_scales(Path(scales))
    chosen = [{"format": name, "rounding": rounding, "scales": given} for name in names]
    if live:
        if prompts is not None:
            raise UsageError("--live is about the requests that clients send; --prompts names others: give one of them")
        _watch(url.rstrip("/"), chosen, probes, as_json=as_json)
        return
    _ask(url, prompts, chosen, max_tokens=max_tokens, greedy=greedy, as_json=as_json)


def read_prompts(path: Path | None) -> list[str]:
    """Prompts of a file: JSON lines with `prompt`, or one a line. Raises UsageError naming file and line."""
    if path is None:
        return list(SELF_CHECK)
    name = printable(str(path))
    try:
        text = read_regular_file(path, _FILE_LIMIT, "prompt file").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"prompt file {name}: not UTF-8 at byte {error.start}") from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON may hold other line separators as they are
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            found.append(line.strip())
            continue
        try:
            prompt = json.loads(line).get("prompt")
            if isinstance(prompt, str):
                prompt.encode()  # an escaped lone surrogate is JSON, and no text
        except (ValueError, RecursionError) as error:
            raise UsageError(f"prompt file {name} line {number}: not JSON: {error}") from error
        if not isinstance(prompt, str) or not prompt:
            raise UsageError(f"prompt file {name} line {number}: a text under the key `prompt` is required")
        found.append(prompt)
    if not found:
        raise UsageError(f"prompt file {name}: no prompt in it")
    return found


def read_scales(path: Path) -> dict[str, Any]:
    """Scales of a JSON file, as the management port takes them. Raises UsageError naming file and key."""
    name = printable(str(path))
    text = read_regular_file(path, _FILE_LIMIT, "scales file")
    try:
        document = json.loads(text)
        if isinstance(document, dict):
            document.pop("layers", None)  # a calibration's scales.json names them
        return GivenScales.model_validate(document).model_dump(mode="json")
    except (ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            raise UsageError(f"scales file {name}: not JSON: {error}") from error
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:2])  # behind them are the forms that a layer's scales may have
        words = first["msg"] if len(first["loc"]) < 2 else "required is a number above 0, or a list of them for the KV heads"
        raise UsageError(f"scales file {name}{f' key {printable(where)}' if where else ''}: {words}") from None


def _watch(url: str, formats: list[dict[str, Any]], probes: int, *, as_json: bool) -> None:
    """Let live probes try the formats until enough requests were probed, or a person ends it; then let them stop."""
    report = _request("PUT", f"{url}/shadow/whatif", {"formats": formats}, "whatif", url)
    try:
        with Console(stderr=True).status("") as status, contextlib.suppress(KeyboardInterrupt):
            while (seen := _seen(report)) < probes:
                status.update(f"{seen} of {probes} requests probed; shadow probes are {report['state']} (Ctrl-C: show these)")
                time.sleep(LOOK_EVERY)
                report = _request("GET", f"{url}/shadow", None, "whatif", url)
    finally:
        _request("PUT", f"{url}/shadow/whatif", {"formats": []}, "whatif", url)
    document = {"requests": _seen(report), "problems": [], "estimates": report["whatif"]}
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    show(document, Console())


def _seen(report: dict[str, Any]) -> int:
    return min((found["requests"] for found in report["whatif"].values()), default=0)


def _ask(
    url: str, prompts: Path | None, formats: list[dict[str, Any]], *, max_tokens: int, greedy: bool, as_json: bool
) -> None:
    question = {"prompts": read_prompts(prompts), "formats": formats, "greedy": greedy, "max_tokens": max_tokens}
    document = _request("POST", f"{url.rstrip('/')}/shadow/probe", question, "estimates", url)
    if not document["requests"]:
        why = next(iter(document["problems"]), "the port gave no reason")
        raise EngineFailed(f"{printable(url)}: no prompt could be probed: {printable(why)}")
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    show(document, Console())


def _request(method: str, target: str, body: dict[str, Any] | None, key: str, url: str) -> dict[str, Any]:
    """The JSON object that the management port answers, with `key` in it. Raises UsageError with its own words."""
    try:
        answer = httpx.request(method, target, json=body, timeout=_TIMEOUT, trust_env=False)
        document = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"{printable(url)}: no management port of kvguard answers there ({printable(str(error))})") from error
    if answer.status_code != httpx.codes.OK or not isinstance(document, dict) or key not in document:
        raise UsageError(f"{printable(url)}: HTTP {answer.status_code}: {printable(_problem(document))}")
    return document


def _problem(document: Any) -> str:
    detail = document.get("detail", document.get("error")) if isinstance(document, dict) else document
    if isinstance(detail, dict):
        detail = detail.get("message")
    if isinstance(detail, list) and detail and isinstance(first := detail[0], dict):
        return f"{'.'.join(map(str, first.get('loc', ())))}: {first.get('msg')}"
    if not detail or detail == "Not Found":
        return "that is no answer of kvguard's management port (--management-port, 9464), which is required"
    return str(detail)


def show(document: dict[str, Any], console: Console) -> None:
    """The estimates as a table: mean |Δ logprob| and flips by token with 95 % intervals, clustered by request."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("comparison", "requests", "mean |Δ logprob|", "95 % interval", "flips", "95 % interval"):
        table.add_column(heading, min_width=8)
    for label, found in document["estimates"].items():
        delta, flips = found["abs_delta"], found["flip_rate"]
        table.add_row(
            label, str(found["requests"]), _number(delta["value"]), _range(delta), _percent(flips["value"]), _range(flips, 100)
        )
    console.print(table)
    console.print(
        "cost: the engine against the 16-bit pass; unexplained: against its own arithmetic; formats: what they would cost",
        markup=False,
    )
    if document.get("collapsed"):
        console.print(
            f"{document['collapsed']} of {document['requests']} answers collapsed: the engine is damaged", markup=False
        )
    for problem in document["problems"]:
        console.print(f"note: {printable(problem)}", markup=False)


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.1f} %"


def _range(found: dict[str, Any], times: float = 1.0) -> str:
    if found["low"] is None or found["high"] is None:
        return found["note"] or "—"
    digits = 4 if times == 1.0 else 1
    return f"{times * found['low']:.{digits}f} – {times * found['high']:.{digits}f}"
