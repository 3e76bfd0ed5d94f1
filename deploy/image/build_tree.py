"""Builds the folder that carries kvguard into an engine's image: its packages, once for each Python that an engine may have.

`python build_tree.py WHEELS CONSTRAINTS TARGET [VERSION …]`; WHEELS holds kvguard's own wheel. Versions come from the
constraints alone, wheels from the index pip is configured with; nothing is compiled. The folder can be copied anywhere.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
# Newest first: an engine's image may be as old as glibc 2.28.
_GLIBC = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")


def install(wheel: Path, constraints: Path, target: Path, version: str) -> Path:
    """The packages for one version of Python, as `cp312`."""
    packages = target / f"cp{version.replace('.', '')}"
    machine = platform.machine()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--target", str(packages), "--constraint", str(constraints)]
    command += ["--implementation", "cp", "--python-version", version]
    for glibc in _GLIBC:
        command += ["--platform", f"{glibc}_{machine}"]
    subprocess.run([*command, str(wheel)], check=True)
    # Scripts start the interpreter that built them.
    shutil.rmtree(packages / "bin", ignore_errors=True)
    return packages


def main(wheels: str, constraints: str, target: str, *versions: str) -> None:
    """Build the folder."""
    (wheel,) = Path(wheels).glob("kvguard-*.whl")
    for version in versions or VERSIONS:
        install(wheel, Path(constraints), Path(target), version)
    for name in ("__main__.py", "health.py"):
        shutil.copyfile(Path(__file__).with_name(name), Path(target) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
