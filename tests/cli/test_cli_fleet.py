"""`kvguard fleet diff`: replicas against most of the others."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from kvguard.cli.main import app
from kvguard.record.build import build_record
from kvguard.vocabulary import UsageError
from record_samples import layer, sample


@pytest.fixture
def replica() -> Iterator[Callable[..., str]]:
    """Starts a management port that shows this record; gives its URL."""
    with contextlib.ExitStack() as stack:

        def start(record: dict[str, Any] | bytes, status: int = 200, location: str = "") -> str:
            body = record if isinstance(record, bytes) else json.dumps(record).encode()

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    found = self.path == "/record"
                    self.send_response(status if found else 404)
                    self.send_header("content-length", str(len(body)))
                    if location:
                        self.send_header("location", location)
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *_: Any) -> None:
                    """Nothing is logged."""

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start


def run(*argv: str) -> Any:
    return CliRunner().invoke(app, ["fleet", "diff", *argv])


def test_replicas_that_established_the_same(replica: Callable[..., str]) -> None:
    """Measured sizes, process ids and directories differ between equal starts."""
    urls = [
        replica(build_record(sample(pid=pid, tokens=93184 + 128 * pid, size=1073741824 + 1474560 * pid))) for pid in range(3)
    ]
    done = run(*urls)
    assert (done.exit_code, done.output) == (0, "no difference: all 3 replicas established the same\n")


def test_the_one_that_differs_is_named_with_what_differs(replica: Callable[..., str]) -> None:
    usual, other = build_record(sample()), build_record(sample(dtype="bfloat16", layers=[layer(0, dtype="bfloat16")]))
    urls = [replica(other), replica(usual), replica(usual)]
    done = run(*urls, "--json")
    assert done.exit_code == 3
    document = json.loads(done.output)
    assert (document["equal"], document["compared_with"]) == (False, urls[1])
    different, *same = document["replicas"]
    assert {"path": "effective.dtype", "a": "fp8_e4m3", "b": "bfloat16"} in different["differences"]
    assert [one["differences"] for one in same] == [[], []]
    shown = run(*urls)
    assert shown.exit_code == 3
    assert f"{urls[0]} differs" in shown.output
    assert "1 of 3 replicas differ" in shown.output


def test_scales_and_connectors_are_compared(replica: Callable[..., str]) -> None:
    """Prefill and decode peers with other scales are silent garbage."""
    other = sample(layers=[layer(0, k_scale=0.07)]).model_copy(update={"connectors": ({"kv_connector": "NixlConnector"},)})
    urls = [replica(build_record(sample(layers=[layer(0)]))), replica(build_record(other))]
    done = run(*urls, "--json")
    assert done.exit_code == 3
    paths = {item["path"] for item in json.loads(done.output)["replicas"][1]["differences"]}
    assert {"scales_digest", "connectors"} <= paths


@pytest.mark.parametrize(
    ("record", "status", "says"),
    [
        (b"{}", 200, "not a run record"),
        (b"<html>Sign in</html>", 200, "not a run record"),
        (b'{"detail":"the run record is written once the engine is verified or refused"}', 404, "no run record yet"),
        (b'{"detail":"Not Found"}', 404, "HTTP 404; required is the management port of a replica"),
        (b"", 503, "HTTP 503; required is the management port of a replica"),
        (b"x" * (33 << 20), 200, "which no run record has"),
    ],
)
def test_what_is_no_record_is_a_usage_error(replica: Callable[..., str], record: bytes, status: int, says: str) -> None:
    done = run(replica(build_record(sample())), replica(record, status))
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)


def test_a_redirection_is_named_and_not_followed(replica: Callable[..., str]) -> None:
    record = build_record(sample())
    there = replica(record)
    done = run(there, replica(b"", 307, f"{there}/record"))
    assert isinstance(done.exception, UsageError)
    assert f"HTTP 307 to {there}/record, which is not followed; required is the management port" in str(done.exception)


def test_a_replica_that_does_not_answer_and_too_few() -> None:
    for urls in (["http://127.0.0.1:1", "http://127.0.0.1:2"], ["http://127.0.0.1:1"], ["http://127.0.0.1:1"] * 2, ["x", "y"]):
        assert isinstance(run(*urls).exception, UsageError)
