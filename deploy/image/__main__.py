"""Runs kvguard with the interpreter at hand (`python3 -I -S /opt/kvguard …`), whose own packages are not read or changed."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = HERE / f"cp{sys.version_info.major}{sys.version_info.minor}"

if not PACKAGES.is_dir():
    there = ", ".join(sorted(path.name for path in HERE.glob("cp3*"))) or "none"
    sys.stderr.write(f"kvguard: {sys.executable} is Python {sys.version.split()[0]}; {HERE} holds packages for {there}\n")
    sys.exit(2)

# Alone: a package of the engine's must not be taken for one of ours.
sys.path = [str(PACKAGES), *(path for path in sys.path if path != str(HERE))]
sys.argv[0] = "kvguard"

from kvguard.cli.main import main  # noqa: E402 - it is only found now

main()
