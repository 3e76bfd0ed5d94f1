"""Reports: everything is in all of them, nothing from data is markup, and a browser shows the page without a fault."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from compare_fakes import arm, arms, plan, with_divergence
from kvguard.compare.judge import judge
from kvguard.compare.markdown import markdown
from kvguard.compare.models import AGAIN, REFERENCE, WEAK, ArmFile
from kvguard.compare.outcome import Outcome, Rules
from kvguard.compare.page import page
from kvguard.compare.production import with_production
from kvguard.compare.reports import NAMES, write_reports
from kvguard.vocabulary import UsageError

EVIL = "<script>alert(1)</script>\"'&|`[x](y)\n# h"
ALL = ("retrieval", "arithmetic", "strings", "conversation")
DELTAS = {REFERENCE: 0.02, "fp8_e4m3": 0.11, WEAK: 4.0, AGAIN: 0.02}


def files() -> list[ArmFile]:
    return with_divergence(arms(plan(ALL, items=80), lambda place: float(place % 8 > 0)), DELTAS)


def outcome(**more: object) -> Outcome:
    return judge([one.model_copy(update=more) for one in files()], Rules(), [EVIL])


class Tags(HTMLParser):
    VOID = frozenset({"meta", "rect", "line", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_well_formed_self_contained_and_escaped() -> None:
    text = page(outcome(model=EVIL, command=("vllm", "serve", EVIL)))
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert not {"src", "href", "onload", "onclick"} & tags.attributes
    assert "http" not in text.replace("http-equiv", "")
    assert "&lt;script&gt;" in text
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text


def test_the_page_holds_every_part() -> None:
    text = page(outcome())
    for part in (
        "Long-context retrieval by length and depth",
        "1945 tokens, depth 100 %",
        "Divergence by text",
        "Capacity: tokens that the KV cache holds",
        "46,592 in 1.00 GiB",
        "4 of 4",
        "Throughput",
        "What differs between the records: fp8_e4m3",
        "effective.dtype",
        "How to reproduce",
        "Loss by task",
        "46,592",
        "93,184",
        "23,040",
        "128.0 tokens/s",
        "keep 16-bit",
        "Not covered",
    ):
        assert part in text, part


def test_markdown_has_one_line_a_row_and_no_markup_from_data() -> None:
    text = markdown(outcome(model=EVIL))
    lines = text.split("\n")
    assert not [line for line in lines if line.startswith("# h")]
    assert "<script>" not in text
    table = [line for line in lines if line.startswith("| 16bit")]
    assert len(table) == 2
    header = next(line for line in lines if line.startswith("| config | KV bytes/token"))
    assert header.count("|") == table[0].replace("\\|", "").count("|")


def test_reports_are_written_and_json_reads_back(tmp_path: Path) -> None:
    found = outcome()
    paths = write_reports(found, tmp_path)
    assert [path.name for path in paths] == list(NAMES)
    assert Outcome.model_validate_json(paths[0].read_text()) == found
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o644}


def test_a_report_replaces_nothing_of_somebody_else(tmp_path: Path) -> None:
    """A report's own place, and a comparison's, may be written again."""
    found = outcome()
    write_reports(found, tmp_path / "new")
    write_reports(found, tmp_path / "new")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.md").write_text("my thesis")
    with pytest.raises(UsageError, match="mine: neither empty nor of a comparison; give another"):
        write_reports(found, tmp_path / "mine")
    assert (tmp_path / "mine/report.md").read_text() == "my thesis"
    (tmp_path / "mine/wish.json").write_text("{}")
    write_reports(found, tmp_path / "mine")


def test_reports_hold_no_prompt_and_no_answer() -> None:
    secret = "quixotic-bandicoot-58213"
    marked = [
        one.model_copy(
            update={"answers": tuple(row.model_copy(update={"text": f"{row.text} {secret}"}) for row in one.answers)}
        )
        for one in files()
    ]
    found = judge(marked, Rules())
    prompt = marked[0].plan.items[0].messages[0].content[:60]
    for text in (page(found), markdown(found), found.model_dump_json()):
        assert secret not in text
        assert prompt not in text


def test_arms_without_anything_still_make_a_report() -> None:
    """No scored task, no texts, no load: only capacity is known, and that is said."""
    asked = plan(("divergence",), items=0)
    bare = [arm(name, asked, throughput=()) for name in (REFERENCE, "fp8_e4m3", AGAIN)]
    found = judge(bare, Rules())
    assert "no task with scores was run" in found.arms[1].why[0]
    assert "<svg" in page(found)
    assert "cannot tell" in markdown(found)


MEASURE = "<script>document.title = `measured ${document.documentElement.scrollWidth} of ${innerWidth}`</script></body>"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut_off_at_the_side(tmp_path: Path, width: int) -> None:
    """Digests wrap, and tables and plots scroll by themselves: the page is never wider than its window."""
    found = outcome(model="/models/" + "x" * 300, command=("vllm", "serve", "y" * 300))
    found = with_production(found, found)
    text = page(found).replace("default-src 'none'", "script-src 'unsafe-inline'").replace("</body>", MEASURE)
    (tmp_path / "report.html").write_text(text)
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}/p")
    done = subprocess.run(
        ["chromium", *options, f"--window-size={width},2000", "--dump-dom", f"file://{tmp_path}/report.html"],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    measured = re.search(r"<title>measured (\d+) of (\d+)</title>", done.stdout)
    assert measured is not None, done.stderr[-2000:]
    assert int(measured[1]) <= int(measured[2])
    assert int(measured[2]) <= max(width, 500), "a desktop's window may have a least width"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    file, shot = tmp_path / "report.html", tmp_path / "shot.png"
    file.write_text(page(with_production(outcome(model=EVIL), outcome(model=EVIL))))
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/p",
    ]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", f"--screenshot={shot}", "--window-size=1200,2400", f"file://{file}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert shot.exists(), done.stderr[-2000:]
    assert shot.stat().st_size > 20_000
    assert "CONSOLE" not in done.stderr, done.stderr
