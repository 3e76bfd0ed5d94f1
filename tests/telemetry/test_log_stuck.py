"""A standard error that nobody reads holds up nobody who logs, and ends no process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import structlog

from kvguard.telemetry import backlog
from kvguard.telemetry.logging import _StderrHandler, configure, flush

WAIT_S = 120.0
LINES = 500  # of 200 bytes: more than a pipe holds
log = structlog.get_logger("kvguard")


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The reading end of a full pipe, which is standard error."""
    reading, writing = os.pipe()
    fill(writing)
    with open(writing, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure(json=True)
        yield reading
    os.close(reading)


def fill(descriptor: int) -> None:
    """Until not one byte more goes in."""
    os.set_blocking(descriptor, False)
    for size in (4096, 1):
        while True:
            try:
                os.write(descriptor, b"x" * size)
            except BlockingIOError:
                break
    os.set_blocking(descriptor, True)


def read_lines(reading: int, last: str) -> list[dict[str, object]]:
    """What was logged, as far as the line whose event is `last`; what filled the pipe stands before."""
    got = b""
    while last.encode() not in got:
        got += os.read(reading, 65536)
    return [json.loads(line) for line in got.lstrip(b"x").splitlines()]


def on_a_thread(work: object) -> None:
    """So that the test ends too where `work` does not."""
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it waits for standard error"


def test_a_loop_that_logs_goes_on(unread: int) -> None:
    turns: list[int] = []

    async def control() -> None:
        for number in range(LINES):
            log.info("verified", number=number, text="y" * 150)
            logging.getLogger("uvicorn.error").warning("a library's line")
            await asyncio.sleep(0)
            turns.append(number)

    on_a_thread(lambda: asyncio.run(control()))
    assert len(turns) == LINES
    log.info("the last")
    lines = read_lines(unread, "the last")
    assert [line["number"] for line in lines if line["event"] == "verified"] == list(range(LINES))
    assert sum(line["event"] == "a library's line" for line in lines) == LINES


def test_what_could_not_be_written_is_counted(unread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "_MOST_WAITING", 3)
    [waiting] = [one._backlog._waiting for one in logging.getLogger().handlers if isinstance(one, _StderrHandler)]

    def write() -> None:
        log.info("verified", number=0)
        end = time.monotonic() + WAIT_S
        while waiting:  # until the thread stands before the full pipe with the first line
            assert time.monotonic() < end
        for number in range(1, 20):
            log.info("verified", number=number)

    on_a_thread(write)
    lines = read_lines(unread, "verified")
    flush(WAIT_S)  # what waited has left
    log.info("the last")
    lines += read_lines(unread, "the last")
    assert [line["number"] for line in lines if line["event"] == "verified"] == [0, 1, 2, 3]
    assert [(line["level"], line["event"]) for line in lines[-2:]] == [
        ("warning", "standard error was not read: 16 lines before this one are missing"),
        ("info", "the last"),
    ]


def test_a_process_ends_as_it_would() -> None:
    """Its exit code says why an engine is not served."""
    code = "import structlog, kvguard.telemetry.logging as setup\nsetup.configure()\n"
    code += "for _ in range(500): structlog.get_logger().info('y' * 200)\nraise SystemExit(5)"
    reading, writing = os.pipe()
    fill(writing)
    try:
        done = subprocess.run([sys.executable, "-c", code], stderr=writing, timeout=WAIT_S, check=False)
    finally:
        os.close(writing)
        os.close(reading)
    assert done.returncode == 5
