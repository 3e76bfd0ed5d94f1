"""Scales from what clients' requests spanned: read from a management port, checked against the checkpoint, no engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_calibrated_starts import LAYERS, Setting

from kvguard.reference.artefact import load_calibration
from kvguard.reference.ranges import LayerRange, Side, Spanned
from kvguard.reference.scales import scale_of
from kvguard.vocabulary import ExitCode

SIDE = Side(amax=(3.0, 5.0), count=100, saturated=0, underflowed=1, subnormal=2)
SPANNED = Spanned(
    ranges={f"model.layers.{index}.self_attn.attn": LayerRange(k=SIDE, v=SIDE) for index in range(LAYERS)},
    tokens=500,
    sequences=4,
)


class Port:
    """A management port that answers two documents."""

    def __init__(self, setting: Setting) -> None:
        digests = setting.read[2]
        subjects = [{"name": item.name, "digest": {"sha256": item.sha256.removeprefix("sha256:")}} for item in digests]
        self.pages: dict[str, tuple[int, Any]] = {
            "/shadow/ranges": (200, {"engine": "0.32.0+cpu", **SPANNED.model_dump(mode="json")}),
            "/record": (200, {"subject": subjects}),
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, document = outer.pages[self.path]
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@pytest.fixture
def port(setting: Setting) -> Iterator[Port]:
    made = Port(setting)
    with made.server:
        thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.server.shutdown()
        thread.join()


def test_an_artefact_from_traffic_is_named_by_what_was_measured(setting: Setting, port: Port, tmp_path: Path) -> None:
    done = setting.calibrate("--from-traffic", port.url, "--json", "--out", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    calibration = load_calibration(tmp_path / "one")
    assert calibration.digest == report["digest"]
    assert calibration.prompts == report["prompts"]["digest"]
    assert (report["prompts"]["texts"], report["prompts"]["tokens"]) == (4, 500)
    assert calibration.scales.k == dict.fromkeys(range(LAYERS), scale_of(5.0, 2.0))
    shown = setting.calibrate("--from-traffic", port.url, "--out", str(tmp_path / "two"))
    assert "500 tokens of 4 clients' requests" in shown.stdout
    assert load_calibration(tmp_path / "two").digest == calibration.digest


@pytest.mark.parametrize(
    ("page", "answer", "words"),
    [
        ("/shadow/ranges", (404, {"detail": "not measured: the policy"}), "HTTP 404: not measured: the policy"),
        ("/shadow/ranges", (200, []), "HTTP 200: no document"),
        ("/shadow/ranges", (200, {"engine": "0.32.0"}), "not understood (KeyError)"),
        ("/shadow/ranges", (200, {"engine": "0.31.0", **SPANNED.model_dump(mode="json")}), "measured on vLLM 0.31.0"),
        ("/record", (200, {"subject": []}), "serves other weights"),
        (
            "/record",
            (200, {"subject": [{"name": "model.safetensors", "digest": {"sha256": "0"}}]}),
            "serves other weights than",
        ),
    ],
)
def test_traffic_that_is_not_of_this_checkpoint(
    setting: Setting, port: Port, page: str, answer: tuple[int, Any], words: str
) -> None:
    port.pages[page] = answer
    done = setting.calibrate("--from-traffic", port.url)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_texts_and_traffic_are_one_or_the_other(setting: Setting, tmp_path: Path) -> None:
    done = setting.calibrate("--from-traffic", "http://127.0.0.1:1", "--prompts", str(tmp_path))
    assert done.returncode == ExitCode.USAGE
    assert "give one of them" in done.stderr
