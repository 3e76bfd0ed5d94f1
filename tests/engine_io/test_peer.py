"""The process behind a Unix socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvguard.engine.peer import Peer, command_of, peer_of, ranks_of


def test_the_listener_is_found(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        peer = peer_of(path)
    assert peer is not None
    assert (peer.pid, peer.directory) == (os.getpid(), os.getcwd())
    assert peer.arguments


def test_nobody_listens(tmp_path: Path) -> None:
    assert peer_of(str(tmp_path / "none")) is None
    assert peer_of(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (("/e/bin/python", "/e/bin/vllm", "serve", "m"), 1),
        (("/e/bin/python3.11", "/e/bin/vllm", "serve", "m", "--tensor_parallel_size=2", "-pp", "3"), 6),
        (("/e/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "-tp", "4"), 4),
        (("/e/bin/vllm", "serve", "m", "--tensor-parallel-size", "x"), None),
        (("/usr/bin/sleep", "1"), None),
        (("/e/bin/python", "/e/bin/vllm", "serve", "m", "--config", "missing.yaml"), None),
        ((), None),
    ],
)
def test_its_command(tmp_path: Path, arguments: tuple[str, ...], ranks: int | None) -> None:
    command = command_of(Peer(pid=1, directory=str(tmp_path), arguments=arguments), "0.32.0")
    assert (ranks_of(command) if command is not None else None) == ranks


def test_its_config_file_is_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("tensor-parallel-size: 2\n")
    peer = Peer(pid=1, directory=str(tmp_path), arguments=("/e/bin/vllm", "serve", "m", "--config", "engine.yaml"))
    command = command_of(peer, "0.32.0")
    assert command is not None
    assert ranks_of(command) == 2
