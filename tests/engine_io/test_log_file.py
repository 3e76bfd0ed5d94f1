"""The log of an engine that somebody else started: it grows, is rotated, and holds several starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvguard.engine.log_file import LogFile
from kvguard.vocabulary import UsageError

BANNER = "(APIServer pid=1) INFO 11-29 15:11:07 [api_server.py:1] vLLM API server version 0.32.0\n"
LOGO = "(MainProcess pid=1) INFO 11-29 15:11:07 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0\n"
NOISE = "(APIServer pid=1) INFO 11-29 15:11:07 [x.py:1] Using FlashAttention version 3\n"


def tokens(count: int) -> str:
    return (
        f"(EngineCore pid=2) INFO 11-29 15:11:07 [kv_cache_utils.py:1] CPU KV cache size: {count:,} tokens, "
        "Maximum concurrency for 2,048 tokens per request: 22.75x\n"
    )


def said(log: LogFile) -> list[int]:
    return [claim.value for claim in log.reader.claims("0.32.0") if claim.field == "kv_tokens"]


def test_it_is_read_as_it_grows_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = BANNER + tokens(93184)
    path.write_text(whole[:40])
    log = LogFile(path)
    for end in (len(BANNER) + 5, len(whole) - 1, len(whole)):
        path.write_text(whole[:end])
        assert log.poll() == ""
        assert said(log) == ([93184] if end == len(whole) else [])


@pytest.mark.parametrize("banner", [BANNER, LOGO])
def test_the_last_start_in_it_counts(tmp_path: Path, banner: str) -> None:
    path = tmp_path / "log"
    path.write_text(banner + tokens(93184) + banner + NOISE + tokens(46592) + NOISE)
    log = LogFile(path)
    assert said(log) == [46592]
    with path.open("a") as file:
        file.write(banner + tokens(93184))
    log.poll()
    assert said(log) == [93184]


def test_a_start_without_a_banner_is_what_stands_behind_the_mark(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(tokens(93184))
    log = LogFile(path)
    log.mark()
    with path.open("a") as file:
        file.write(tokens(46592))
    log.poll()
    assert said(log) == [93184, 46592]
    log.start_again()
    log.poll()
    assert said(log) == [46592]


def test_a_file_that_was_truncated_or_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(NOISE * 3 + tokens(93184))
    log = LogFile(path)
    path.write_text(tokens(46592))
    log.poll()
    assert said(log) == [46592]
    path.rename(tmp_path / "log.1")
    assert "cannot be read" in log.poll()
    path.write_text(tokens(1024))
    assert log.poll() == ""
    assert said(log) == [1024]


def test_a_line_longer_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * (3 << 20) + "\n" + BANNER + tokens(93184))
    assert said(LogFile(path)) == [93184]


def test_a_log_that_is_not_there_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="check --log"):
        LogFile(tmp_path / "none")
