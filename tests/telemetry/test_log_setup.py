"""The log goes to stderr, in the asked-for form."""

from __future__ import annotations

import json
import logging
import re

import pytest
import structlog

from kvguard.telemetry.logging import configure, flush
from kvguard.vocabulary import UsageError

WAIT_S = 60.0


def written(capsys: pytest.CaptureFixture[str]) -> str:
    """What stands on stderr once every line so far is written; nothing stands on stdout."""
    flush(WAIT_S)
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_json_lines_on_stderr(capsys):
    configure("info", json=True)
    structlog.get_logger("kvguard.x").warning("engine failed a request", route="/v1/models", status=502)
    err = written(capsys)
    record = json.loads(err)
    assert record.pop("timestamp").endswith("Z")
    assert record == {
        "logger": "kvguard",
        "event": "engine failed a request",
        "level": "warning",
        "route": "/v1/models",
        "status": 502,
    }


def test_plain_lines_begin_with_our_name_where_there_is_no_terminal(capsys):
    configure("info")
    structlog.get_logger("kvguard.x").info("gate opened", state="serving", reason="two words")
    err = written(capsys)
    line = r'kvguard \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ info  gate opened  state=serving reason="two words"\n'
    assert re.fullmatch(line, err)
    assert "\x1b" not in err


def test_colour_on_a_terminal(capsys, monkeypatch):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    configure("info")
    structlog.get_logger("kvguard.x").info("gate opened")
    err = written(capsys)
    assert err.startswith("kvguard ")
    assert "\x1b" in err
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger("kvguard.x").exception("failed")
    lines = written(capsys).splitlines()
    assert len(lines) > 1
    assert all(line.startswith("kvguard ") for line in lines)


def test_level_and_other_libraries(capsys):
    configure("warning", json=False)
    structlog.get_logger("kvguard.x").info("not shown")
    logging.getLogger("uvicorn.error").info("not shown either")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    err = written(capsys)
    assert err.count("\n") == 1
    assert err.startswith("kvguard ")
    assert err.endswith("Z warning Invalid HTTP request received.\n")


def test_tracebacks_stay_on_one_line(capsys):
    for as_json in (True, False):
        configure("info", json=as_json)
        try:
            raise ValueError("broken")
        except ValueError:
            structlog.get_logger("kvguard.x").exception("failed")
        err = written(capsys)
        assert err.count("\n") == 1
        assert "broken" in err


def test_what_the_engine_said_cannot_begin_a_line(capsys):
    configure("info", json=False)
    structlog.get_logger("kvguard.x").error("died\nfake\r\x1b[2J", reason="a\nb\u2028c", found="½ … ÷")
    err = written(capsys)
    assert err.count("\n") == 1
    assert err.isprintable() is False
    assert err[:-1].isprintable()
    assert "died\\nfake\\r\\x1b[2J" in err
    assert "½ … ÷" in err


def test_whoever_logs_what_cannot_be_shown_goes_on(capsys):
    class Shy:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    logging.getLogger().handlers.clear()  # pytest's own raise
    configure("info", json=True)
    structlog.get_logger("kvguard.x").info("not shown", what=Shy())
    structlog.get_logger("kvguard.x").info("shown")
    assert '"event": "shown"' in written(capsys)


def test_configuring_again_does_not_double_lines(capsys):
    configure("info", json=True)
    configure("info", json=True)
    structlog.get_logger("kvguard.x").info("once")
    assert written(capsys).count("\n") == 1


def test_unknown_level_is_a_usage_error():
    with pytest.raises(UsageError, match="'loud' is not one of debug, info, warning, error"):
        configure("loud")
