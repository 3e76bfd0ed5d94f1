"""`kvguard probe` and `kvguard whatif`: prompt files, the question, tables and JSON, errors of one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvguard.cli import main as command
from kvguard.cli import probe as probe_module
from kvguard.cli.main import app
from kvguard.cli.probe import read_prompts
from kvguard.shadow.document import estimates, probe_document
from kvguard.shadow.models import COST, UNEXPLAINED, Observation, stratum
from kvguard.shadow.prompts import SELF_CHECK
from kvguard.shadow.statistics import sums_of
from kvguard.vocabulary import UsageError
from shadow_streams import scored

WHATIF = "fp8_e5m2 nearest, scales engine"
SEEN = [
    Observation(1.0, stratum(9, 1), {COST: scored(0.1 + n / 100, flips=2), UNEXPLAINED: scored(0.03), WHATIF: scored(0.2)})
    for n in range(5)
]


class Management:
    """A management port that answers `/shadow/probe`."""

    def __init__(self) -> None:
        self.questions: list[dict[str, Any]] = []
        self.status, self.body = 200, json.dumps(probe_document(SEEN, ["prompt 6: [bold]broken"])).encode()
        self.bodies: list[bytes] = []
        """Answered first, one each."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.questions.append({"path": self.path, **json.loads(body)})
                self.do_GET()

            do_PUT = do_POST

            def do_GET(self) -> None:
                body = outer.bodies.pop(0) if outer.bodies else outer.body
                self.send_response(outer.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def management() -> Iterator[Management]:
    found = Management()
    with found.server:
        thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.server.shutdown()
        thread.join()


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output, result.exception


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "prompts"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- prompt files ---


def test_without_a_file_the_prompts_are_ours() -> None:
    assert read_prompts(None) == list(SELF_CHECK)


def test_lines_and_json_lines(tmp_path: Path) -> None:
    lines = ["\ufeffWhat is this?\r", "", "   ", '{"prompt": "two\\nlines", "id": 3}', ' {"prompt": "a\u2028b"}\r', "[1, 2]"]
    assert read_prompts(written(tmp_path, "\n".join(lines))) == ["What is this?", "two\nlines", "a\u2028b", "[1, 2]"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("fine\n{broken\n", "line 2: not JSON: Expecting property name"),
        ('\n\n{"prompt": "a"} more', "line 3: not JSON: Extra data"),
        ('{"a":' * 100_000, "line 1: not JSON: maximum recursion"),
        ('{"prompt": "\\ud800"}', "line 1: not JSON: "),
        ('{"text": "a"}', "line 1: a text under the key `prompt` is required"),
        ('{"prompt": ""}', "line 1: a text under the key `prompt` is required"),
        ('{"prompt": ["a"]}', "line 1: a text under the key `prompt` is required"),
        ("", "no prompt in it"),
        (" \n\t\n", "no prompt in it"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, content: str, words: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UsageError) as caught:
        read_prompts(path)
    assert f"prompt file {path}" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"a prompt\n\xff\n")
    with pytest.raises(UsageError, match=r"prompt file .*prompts: not UTF-8 at byte 9$"):
        read_prompts(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(UsageError, match="not a regular file"):
        read_prompts(tmp_path)


# --- the question ---


def test_probe_asks_and_shows_a_table(management: Management, tmp_path: Path) -> None:
    prompts = str(written(tmp_path, "one\ntwo\n"))
    code, shown, _ = run("probe", management.url + "/", "--prompts", prompts, "--max-tokens", "9", "--greedy")
    assert code == 0
    question = {"prompts": ["one", "two"], "formats": [], "greedy": True, "max_tokens": 9}
    assert management.questions == [{"path": "/shadow/probe", **question}]
    rows = [line.split() for line in shown.splitlines()]
    assert [COST, "5", "0.1200", "0.1004", "–", "0.1396", "6.2", "%"] in [row[:8] for row in rows]
    assert [UNEXPLAINED, "5", "0.0300", "0.0300", "–", "0.0300", "0.0", "%"] in [row[:8] for row in rows]
    assert "note: prompt 6: [bold]broken" in shown


def test_whatif_asks_for_formats(management: Management) -> None:
    code, shown, _ = run(
        "whatif", management.url, "--formats", "fp8_e5m2, fp8_e4m3,", "--rounding", "truncate", "--scales", "unit"
    )
    assert (code, WHATIF in shown) == (0, True)
    [question] = management.questions
    assert question["prompts"] == list(SELF_CHECK)
    assert question["formats"] == [
        {"format": name, "rounding": "truncate", "scales": "unit"} for name in ("fp8_e5m2", "fp8_e4m3")
    ]


def test_whatif_with_scales_of_a_file(management: Management, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"k": [0.5, [0.25, 0.125]], "v": [1, 2]}))
    assert run("whatif", management.url, "--formats", "int8", "--scales", str(path))[0] == 0
    [question] = management.questions
    assert question["formats"][0]["scales"] == {"k": [0.5, [0.25, 0.125]], "v": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "Input should be a valid dictionary"),
        ('{"k": [1]}', "key v: Field required"),
        ('{"k": [1], "v": [1, 1]}', "k scales for 1 layers, v scales for 2"),
        ('{"k": [0], "v": [1]}', "key k.0: required is a number above 0, or a list of them for the KV heads"),
        ('{"k": [NaN], "v": [1]}', "key k.0: required is"),
        ('{"k": [1], "v": [true]}', "key v.0: required is"),
        ('{"k": [1, "1"], "v": [1, 1]}', "key k.1: required is"),
        ('{"k": [[1, 0]], "v": [1]}', "key k.0: required is"),
        ('{"k": [], "v": []}', "key k: "),
    ],
)
def test_a_scales_file_that_is_wrong(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(content)
    _, _, error = run("whatif", "http://127.0.0.1:1", "--scales", str(path))
    assert isinstance(error, UsageError)
    assert str(error).startswith(f"scales file {path}")
    assert words in str(error)
    assert "\n" not in str(error)


def _live(requests: int) -> bytes:
    seen = SEEN[:requests]
    found = {label: estimates(sums_of(seen, label)) for label in (COST, WHATIF)}
    return json.dumps({"state": "probing", "reason": "", "whatif": found}).encode()


def test_live_whatif_waits_for_requests_and_then_lets_go(management: Management, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "LOOK_EVERY", 0)
    management.bodies = [_live(0), _live(2), _live(5), _live(0)]
    code, shown, _ = run("whatif", management.url, "--live", "--probes", "5", "--formats", "fp8_e5m2")
    assert code == 0
    formats = [{"format": "fp8_e5m2", "rounding": "nearest", "scales": "engine"}]
    assert management.questions == [{"path": "/shadow/whatif", "formats": wanted} for wanted in (formats, [])]
    rows = [line.split() for line in shown.splitlines()]
    assert [COST, "5", "0.1200"] in [row[:3] for row in rows]
    assert WHATIF in shown
    assert management.bodies == []


def test_live_whatif_that_is_interrupted_shows_what_there_is(management: Management, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(probe_module.time, "sleep", interrupted)
    management.bodies = [_live(3), _live(0)]
    code, shown, _ = run("whatif", management.url, "--live", "--json")
    assert (code, json.loads(shown)["requests"]) == (0, 3)
    assert management.questions[-1] == {"path": "/shadow/whatif", "formats": []}


def test_live_whatif_takes_no_prompts(tmp_path: Path) -> None:
    _, _, error = run("whatif", "http://127.0.0.1:1", "--live", "--prompts", str(written(tmp_path, "a")))
    assert "give one of them" in str(error)


def test_json_is_the_answer_as_it_is(management: Management) -> None:
    code, shown, _ = run("whatif", management.url, "--json")
    assert (code, json.loads(shown)) == (0, json.loads(management.body))


def test_without_a_sample_the_table_says_so(management: Management) -> None:
    empty = Observation(1.0, stratum(9, 1), {COST: scored(1.0, tokens=0)})
    management.body = json.dumps(probe_document([empty], [])).encode()
    code, shown, _ = run("probe", management.url)
    assert (code, "no samples" in shown, "—" in shown) == (0, True, True)


# --- errors ---


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, {"detail": "shadow probes are off"}, "HTTP 404: shadow probes are off"),
        (404, {"error": {"message": "no\nsuch path"}}, "HTTP 404: no\ufffdsuch path"),
        (
            422,
            {"detail": [{"loc": ["body", "formats", 0, "format"], "msg": "Input should be x"}]},
            "body.formats.0.format: Input should be x",
        ),
        (422, {"detail": []}, "HTTP 422: that is no answer of kvguard's management port"),
        (200, [1], "HTTP 200: [1]"),
        (404, {"detail": "Not Found"}, "HTTP 404: that is no answer of kvguard's management port (--management-port, 9464)"),
        (200, {"object": "list"}, "HTTP 200: that is no answer of kvguard's management port"),
        (200, b"<html>", "no management port of kvguard answers there"),
        (500, b"\xff", "no management port of kvguard answers there"),
    ],
)
def test_answers_that_are_no_estimates(management: Management, status: int, body: Any, words: str) -> None:
    management.status, management.body = status, body if isinstance(body, bytes) else json.dumps(body).encode()
    _, _, error = run("probe", management.url)
    assert isinstance(error, UsageError)
    assert str(error).startswith(management.url)
    assert words in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:9464", "http://[::1", "ftp://x", ""])
def test_nobody_there(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["kvguard", "probe", url])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        command.main()
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.startswith("kvguard: ")
    assert said.count("\n") == 1
    assert "no management port of kvguard answers there" in said


def test_formats_must_be_named() -> None:
    _, _, error = run("whatif", "http://127.0.0.1:1", "--formats", " , ")
    assert str(error).startswith("--formats: name at least one of fp8_e4m3, fp8_e5m2, int8, ")


def test_a_limit_out_of_range_is_a_usage_error() -> None:
    assert run("probe", "http://127.0.0.1:1", "--max-tokens", "0")[0] == 2
