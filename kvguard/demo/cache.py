"""The cache outside the tree where engines and models are kept, and how runs share it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvguard.vocabulary import EngineFailed

_OF_OUR_OWN_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONWARNINGS", "VIRTUAL_ENV")


class SetupFailed(EngineFailed):
    """The engine or the model could not be set up (exit 4)."""


def say(line: str) -> None:
    """One line of progress."""
    print(f"kvguard: {line}", flush=True)


@contextmanager
def exclusive(lock: Path, what: str) -> Iterator[None]:
    """Hold `lock` (a file, made if missing, never removed) so that two runs do not make `what` at the same time."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that makes {what}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def foreign_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a Python that is not ours: nothing that points into our own."""
    return {name: value for name, value in environ.items() if name not in _OF_OUR_OWN_PYTHON}


def pip(python: Path, *arguments: str) -> str:
    """Run the pip of `python`'s environment, its progress on our stdout; returns its errors, "" when it worked."""
    command = [str(python), "-I", "-m", "pip", *arguments, "--no-input", "--disable-pip-version-check"]
    sys.stdout.flush()
    done = subprocess.run(command, env=foreign_environ(), stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return ""
    return done.stderr.strip() or f"exit code {done.returncode}"


def last_line(errors: str) -> str:
    """The last line that says ERROR, else the last that says anything, of a program's error output."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    worst = [line for line in lines if line.startswith("ERROR")]
    return (worst or lines or ["no reason given"])[-1]
