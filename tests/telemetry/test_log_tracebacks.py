"""Local variables, which can be keys or prompts, are in no traceback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from kvguard.telemetry import logging as setup


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("json", [True, False, None])
def test_no_local_variable_is_logged(
    json: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: json is None, raising=False)
    setup.configure(json=json)
    try:
        prompt = "-".join(["quixotic", "bandicoot"])
        raise ZeroDivisionError(len(prompt))
    except ZeroDivisionError:
        structlog.get_logger("kvguard").exception("failed")
    setup.flush(60)
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "quixotic-bandicoot" not in said
