"""`kvguard fleet`: replicas compared with each other by the run records that their management ports show."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from kvguard.cli.record_tables import text
from kvguard.files import printable
from kvguard.record.diff import Difference, diff_records
from kvguard.record.store import MAX_BYTES, parse_record
from kvguard.vocabulary import ExitCode, UsageError

app = typer.Typer(no_args_is_help=True, help="Compare the replicas of a fleet.")

_DEADLINE = 10.0
_AT_ONCE = 16
_NOT_YET = b"the run record is written"
"""What a management port answers beside its 404 as long as there is none."""


@app.callback()
def fleet() -> None:
    """Compare the replicas of a fleet."""


@app.command()
def diff(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Management URLs, http://HOST:9464.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which replicas differ from the most of them, and in what. Exit 0 when none does, 3 when one does, 2 on bad input.

    Compared are the run records: the engine, the command, the checkpoint's files, the effective KV cache, its scales, KV
    connectors, the policy. Measured sizes count only where the caches' widths differ.

    Example: kvguard fleet diff http://chat-0:9464 http://chat-1:9464 http://chat-2:9464
    """
    names = list(dict.fromkeys(urls))
    if len(names) < 2:
        raise UsageError("fleet diff: two replicas at least, as management URLs such as http://HOST:9464")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        records = dict(zip(names, pool.map(fetch_record, names), strict=True))
    usual = most_common(records)
    differing = {name: found for name in names if (found := diff_records(records[usual], records[name]))}
    if as_json:
        typer.echo(json.dumps(_document(names, usual, records, differing), indent=2))
    else:
        _show(Console(), usual, names, differing)
    if differing:
        raise typer.Exit(ExitCode.POLICY_VIOLATION)


def fetch_record(url: str) -> dict[str, Any]:
    """The run record of a replica. UsageError when there is none, or what answers is no record."""
    place = f"{url.rstrip('/')}/record"
    try:
        with httpx.stream("GET", place, timeout=_DEADLINE, trust_env=False) as answer:
            body = bytearray()
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > MAX_BYTES:
                    raise UsageError(f"{printable(place)}: more than {MAX_BYTES} bytes, which no run record has")
            status, elsewhere = answer.status_code, answer.headers.get("location")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(
            f"{printable(url)}: no run record: {printable(str(error))}; required is the management port of a replica"
        ) from None
    if status == httpx.codes.OK:
        return parse_record(bytes(body), place)
    if status == httpx.codes.NOT_FOUND and _NOT_YET in body:
        raise UsageError(f"{printable(place)}: no run record yet; it is written with the first verdict")
    redirected = f" to {printable(elsewhere)}, which is not followed" if elsewhere else ""
    raise UsageError(
        f"{printable(place)}: HTTP {status}{redirected}; required is the management port of a replica (--management-port, 9464)"
    )


def most_common(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The first replica whose record has the content that most replicas have."""
    digests = {name: record["predicate"]["content_digest"] for name, record in records.items()}
    (usual, _), *_ = Counter(digests.values()).most_common(1)
    return next(name for name, digest in digests.items() if digest == usual)


def _document(
    names: Sequence[str],
    usual: str,
    records: Mapping[str, Mapping[str, Any]],
    differing: Mapping[str, Sequence[Difference]],
) -> dict[str, Any]:
    return {
        "equal": not differing,
        "compared_with": usual,
        "replicas": [
            {
                "url": name,
                "content_digest": records[name]["predicate"]["content_digest"],
                "scales_digest": records[name]["predicate"]["scales_digest"],
                "connectors": records[name]["predicate"]["connectors"],
                "differences": [item.model_dump(mode="json") for item in differing.get(name, ())],
            }
            for name in names
        ],
    }


def _show(console: Console, usual: str, names: Sequence[str], differing: Mapping[str, Sequence[Difference]]) -> None:
    if not differing:
        console.print(f"no difference: all {len(names)} replicas established the same")
        return
    for name, found in differing.items():
        table = Table("what", "most replicas", printable(name), title=f"{printable(name)} differs", title_justify="left")
        for item in found:
            table.add_row(text(item.path), text(item.a), text(item.b))
        console.print(table)
    same = [name for name in names if name not in differing]
    console.print(f"{len(differing)} of {len(names)} replicas differ from {printable(usual)}; {len(same)} agree with it")
