"""The process behind a Unix socket: its working directory and its command, as far as the kernel lets us see them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from kvguard.engine.command import Command, as_int, parse_command, split_words
from kvguard.files import read_regular_file
from kvguard.vocabulary import Frozen, UsageError

_CREDENTIALS = struct.Struct("3i")
_CONNECT_TIMEOUT = 5.0
_YAML_LIMIT = 1 << 20


class Peer(Frozen):
    """The process that listens. `directory` is its working directory, `arguments` its command line."""

    pid: int
    directory: str
    arguments: tuple[str, ...]


def peer_of(path: str) -> Peer | None:
    """Who listens on a Unix socket; None when it is another user's, in another PID namespace, or nobody."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_TIMEOUT)
            connection.connect(path)
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(raw)[0]
        if pid <= 0:
            return None
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        arguments = tuple(word.decode("utf-8", "replace") for word in command.rstrip(b"\0").split(b"\0"))
        return Peer(pid=pid, directory=os.readlink(f"/proc/{pid}/cwd"), arguments=arguments)
    except OSError:
        return None


def command_of(peer: Peer, version: str) -> Command | None:
    """The peer's vLLM command, parsed with its `--config` file; None when it is not one that can be understood."""
    arguments = peer.arguments
    if len(arguments) > 1 and arguments[0].rsplit("/", 1)[-1].startswith("python") and "-m" not in arguments[:2]:
        arguments = arguments[1:]
    try:
        return parse_command(split_words(arguments), version, _reader(peer.directory))
    except UsageError:
        return None


def ranks_of(command: Command) -> int | None:
    """Worker ranks that share one engine's cache, by the command's parallel sizes."""
    product = 1
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        value = command.value(flag)
        count = as_int(value) if value is not None else 1
        if count is None:
            return None
        product *= count
    return product or None


def _reader(directory: str) -> Callable[[str], bytes]:
    return lambda path: read_regular_file(Path(directory, path), _YAML_LIMIT, "vLLM --config file")
