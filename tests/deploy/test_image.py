"""The Dockerfile, and what it puts into an image, built and run here without one."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from charts import ROOT, tool
from toolbox import REQUIRED

IMAGE = ROOT / "deploy" / "image"
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_hadolint_finds_nothing():
    done = subprocess.run(
        [str(tool("hadolint")), str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM \S+ AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", ["kvguard", "engine"])
def test_both_images_are_labelled_checked_and_not_roots(name):
    text = stages()[name]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", text, re.MULTILINE)
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in text
    assert 'CMD ["python3", "-I", "-S", "/opt/kvguard/health.py"]' in text
    assert 'ENTRYPOINT ["python3", "-I", "-S", "/opt/kvguard"]' in text
    assert "\nRUN " not in text, "nothing is run as root in an image that is shipped"


def test_no_step_needs_a_shell():
    for line in re.findall(r"^(?:RUN|CMD|ENTRYPOINT) (.*)$", DOCKERFILE, re.MULTILINE):
        assert line.startswith("["), line


def test_the_context_holds_what_is_copied_and_no_more():
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[0] == "*"
    copied = {
        word.removeprefix("./")
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for word in line.split()
    }
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/opt/kvguard for this interpreter's version, built as the Dockerfile builds it."""
    folder = tmp_path_factory.mktemp("image")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    commands = (
        [sys.executable, "-m", "pip", "wheel", *quiet, "--wheel-dir", str(folder / "wheels"), str(ROOT)],
        [
            sys.executable,
            str(IMAGE / "build_tree.py"),
            str(folder / "wheels"),
            str(ROOT / "constraints.txt"),
            str(folder / "tree"),
            VERSION,
        ],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            reason = f"pip cannot fetch the packages here: {done.stderr.strip().splitlines()[-1]}"
            pytest.fail(done.stderr) if REQUIRED else pytest.skip(reason)
    return folder / "tree"


def run(tree: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", str(tree), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={"PATH": os.environ["PATH"], **env}
    )


def test_it_runs_without_the_interpreters_own_packages(tree, tmp_path):
    done = run(tree, "--version", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "kvguard 0.1.0\n"), done.stderr
    checked = run(tree, "policy", "example", "fp8-calibrated")
    assert checked.returncode == 0
    assert "dtype: fp8_e4m3" in checked.stdout
    assert run(tree, "serve", "--", "vllm", "serve", "/no/such/model").returncode == 2


def test_it_can_be_copied_elsewhere_and_needs_no_writing(tree, tmp_path):
    """What the chart's init container does."""
    subprocess.run(["cp", "-R", f"{tree}/.", str(tmp_path / "target")], check=True)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert run(tmp_path / "target", "--version", PYTHONDONTWRITEBYTECODE="1").returncode == 0
    assert not list(tree.rglob("*.pth"))
    assert len(before) > 100


def test_another_python_is_refused_by_version(tree):
    other = tree.parent / "other"
    other.mkdir()
    (other / "__main__.py").write_bytes((IMAGE / "__main__.py").read_bytes())
    (other / "cp999").mkdir()
    done = run(other, "--version")
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvguard: {sys.executable} is Python {VERSION}.")
    assert done.stderr.count("\n") == 1


def test_versions_are_those_of_the_constraints(tree):
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line)
    pinned = {name.lower().replace("-", "_"): version for name, version in pinned.items()}
    found = {}
    for path in (tree / f"cp{VERSION.replace('.', '')}").glob("*.dist-info"):
        name, version = path.name.removesuffix(".dist-info").split("-", 1)
        found[name.lower()] = version
    assert len(found) > 20
    assert found.pop("kvguard") == "0.1.0"
    assert found.items() <= pinned.items()


def test_nothing_in_it_starts_another_interpreter_or_says_where_it_was_built(tree):
    packages = tree / f"cp{VERSION.replace('.', '')}"
    assert not (packages / "bin").exists()
    source = hashlib.sha256((ROOT / "kvguard" / "proxy" / "status_page.css").read_bytes()).hexdigest()
    assert hashlib.sha256((packages / "kvguard" / "proxy" / "status_page.css").read_bytes()).hexdigest() == source


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_follows_the_answer(status, code):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        env = {**os.environ, "KVGUARD_HEALTH_URL": f"http://127.0.0.1:{server.server_port}/livez"}
        done = subprocess.run([sys.executable, str(IMAGE / "health.py")], env=env, capture_output=True, timeout=60, check=False)
        server.shutdown()
        thread.join()
    assert done.returncode == code


def test_the_health_check_fails_when_nobody_answers():
    env = {**os.environ, "KVGUARD_HEALTH_URL": "http://127.0.0.1:9/livez"}
    assert (
        subprocess.run(
            [sys.executable, str(IMAGE / "health.py")], env=env, capture_output=True, timeout=60, check=False
        ).returncode
        == 1
    )
