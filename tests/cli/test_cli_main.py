"""Errors a person must act on are one line and an exit code; and the places `kvguard serve` needs."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from guarded import KVGUARD
from kvguard.cli import main as command
from kvguard.cli import standing
from kvguard.engine.plan import Listen
from kvguard.proxy.server import TLS, bind
from kvguard.vocabulary import EngineDied, EngineFailed, PolicyRefusal, UsageError


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """`main` takes SIGTERM over; pytest shall have it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("no such file"), 2, "kvguard: no such file\n"),
        (PolicyRefusal("refused"), 3, "kvguard: refused\n"),
        (EngineFailed("failed"), 4, "kvguard: failed\n"),
        (EngineDied("died"), 5, "kvguard: died\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(command, "app", fail)
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == code
    assert capsys.readouterr().err == said


def test_a_management_port_that_another_start_has_just_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets may be bound to one port while neither listens."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        second = bind("127.0.0.1", port)
        first.listen()
        monkeypatch.setattr(standing, "bind", lambda *_: second)
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}: Address already in use; choose another --management-port"):
            standing._management_socket("127.0.0.1", port)
        assert second.fileno() == -1


def test_a_file_that_is_no_socket_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not standing._abandoned(tmp_path / "file")
    assert not standing._abandoned(tmp_path / "none")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.bind(str(tmp_path / "s"))
    assert standing._abandoned(tmp_path / "s")


def test_tls_is_as_the_command_said() -> None:
    listen = Listen(host="h", port=1, ssl_keyfile="k", ssl_certfile="c", ssl_ca_certs="ca", ssl_cert_reqs=2, ssl_ciphers="X")
    assert standing._tls(listen) == TLS(keyfile="k", certfile="c", ca_certs="ca", cert_reqs=2, ciphers="X")
    assert standing._tls(Listen(host="h", port=1)) is None


def test_the_termination_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGUARD_TERMINATION_LOG", raising=False)
    monkeypatch.setattr(standing, "_TERMINATION_LOG", tmp_path / "none")
    assert standing.termination_log() is None
    monkeypatch.setattr(standing, "_TERMINATION_LOG", tmp_path)
    assert standing.termination_log() == tmp_path
    monkeypatch.setenv("KVGUARD_TERMINATION_LOG", "/named")
    assert standing.termination_log() == Path("/named")


def test_our_own_start_counts_as_our_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < time.monotonic() - standing.process_start() < time.monotonic() + 3600

    def unreadable(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert time.monotonic() - standing.process_start() < 60


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_hurt(closed: str) -> None:
    """A file of ours must not take their numbers: it would get the engine's output."""
    done = subprocess.run(
        ["sh", "-c", f"exec {KVGUARD} --version {closed}"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("kvguard ") is (" >&-" not in f" {closed}")
    assert done.stderr == ""
