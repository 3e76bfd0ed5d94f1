"""One private directory a start: the engine's socket, its ipc sockets, the secret and our one file inside it.

The path is short, because Unix socket names end at 108 bytes and vLLM appends 37 to it. A lock held for the
life of the process tells a live directory from a stale one; stale ones are swept at the next start, with any
engine that their owner left running.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import stat
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

from kvguard.vocabulary import UsageError

MAX_PATH_BYTES = 70
_PID = ".pid"
_CURE = "set KVGUARD_RUN_DIR to a short writable path"


def base_directory(env: Mapping[str, str]) -> Path:
    """`$KVGUARD_RUN_DIR`, `$XDG_RUNTIME_DIR/kvguard`, or `/tmp/kvguard-<uid>`: the first that is short enough."""
    named = env.get("KVGUARD_RUN_DIR")
    if named:
        if len(os.fsencode(named)) + 9 > MAX_PATH_BYTES:
            raise UsageError(f"KVGUARD_RUN_DIR={named}: at most {MAX_PATH_BYTES - 9} bytes, socket names add up to 108")
        return Path(named)
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir() and len(os.fsencode(runtime)) + 17 <= MAX_PATH_BYTES:
        return Path(runtime) / "kvguard"
    return Path("/tmp") / f"kvguard-{os.getuid()}"  # noqa: S108 (0700 and owner are checked below)


class RunDirectory:
    """The directory of one start. Use as a context manager; leaving removes it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Sweep what earlier starts left, then make this start's directory. Raises UsageError where that is not possible."""
        base = base_directory(env)
        self.path = base / secrets.token_hex(4)
        self.socket = self.path / "engine.sock"
        self.secret = secrets.token_urlsafe(32)
        try:
            with _turn(base):
                sweep(base)
                self.path.mkdir(mode=0o700)
                self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.write("secret", self.secret)
            inside = resources.files("kvguard.engine.inside") / "kvguard_inside.py"
            (self.path / "inside").mkdir(mode=0o700)
            self.write("inside/kvguard_inside.py", inside.read_text("utf-8"))
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise UsageError(f"run directory {self.path}: {error.strerror}; {_CURE}") from error

    def write(self, name: str, content: str) -> None:
        """Create a file that only this user can read."""
        descriptor = os.open(self.path / name, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)

    def remember_engine(self, pid: int, name: str = "engine") -> None:
        """Note an engine's process group, so that a later sweep can end what a killed kvguard left.

        A second engine under the same `name` replaces the first, which must have ended.
        """
        (self.path / (name + _PID)).unlink(missing_ok=True)
        self.write(name + _PID, f"{pid} {_start_time(pid)}")

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        base = self.path.parent
        with contextlib.suppress(OSError, UsageError), _turn(base):
            base.rmdir()  # the last one out


@contextlib.contextmanager
def _turn(base: Path) -> Iterator[None]:
    """Hold `base`, made where it is missing, so that starts sweep, create and remove one after the other."""
    while True:
        _private(base)
        try:
            held = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # removed meanwhile by the last one out
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            if _is(held, base):  # not removed, or made anew, while we waited
                yield
                return
        finally:
            os.close(held)


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _private(base: Path) -> None:
    """Make sure `base` is a directory of ours that nobody else can enter. Raises UsageError."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.lstat()
    except OSError as error:
        raise UsageError(f"run directory {base}: {error.strerror}; {_CURE}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"run directory {base}: required is a directory owned by uid {os.getuid()} with mode 0700, found "
            f"uid {found.st_uid} mode {stat.S_IMODE(found.st_mode):04o}; remove it or set KVGUARD_RUN_DIR"
        )


def sweep(base: Path) -> list[str]:
    """Remove directories whose owner is gone, ending engines they left; returns what was swept. Others' are left alone."""
    swept = []
    for path in base.iterdir():
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its kvguard lives
        else:
            _end_leftover(path)
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path.name)
        finally:
            os.close(lock)
    return swept


def _end_leftover(path: Path) -> None:
    for note in path.glob(f"*{_PID}"):
        _end_group(note)


def _end_group(note: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        leader, started = (int(word) for word in note.read_text("ascii").split())
        # The group's leader may be gone while its workers live on: then members that began after it are ours.
        if _start_time(leader) in (started, 0):
            for pid in process_group_members(leader):
                if _start_time(pid) >= started:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)


def _start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat: start time in clock ticks since boot; 0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def process_group_members(group: int) -> list[int]:
    """Processes of a process group, or session, that still exist (zombies excluded)."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and str(group) in (fields[2], fields[3]):
            members.append(int(entry.name))
    return members
