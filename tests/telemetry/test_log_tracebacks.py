"""Local variables, which can be keys or prompts, are in no traceback."""

from __future__ import annotations

import sys

import pytest
import structlog

from kvguard.telemetry import logging as setup


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
