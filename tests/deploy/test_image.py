"""The Dockerfile, and what it puts into an image, built and run here without one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
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


class Replayed:
    """The Dockerfile's build stage, step by step, in a folder in place of an image's root, with this interpreter as python3."""

    def __init__(self, root: Path) -> None:
        self.root, self.at = root, root
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_CONSTRAINT")}
        self.ran = 0

    def inside(self, path: str) -> Path:
        """A path of the image."""
        return self.root / path.lstrip("/") if path.startswith("/") else self.at / path

    def step(self, name: str, rest: str) -> None:
        match name:
            case "ENV":
                for key, value in (word.split("=", 1) for word in rest.split()):
                    self.env[key] = str(self.inside(value)) if value.startswith("/") else value
            case "WORKDIR":
                self.at = self.inside(rest)
                self.at.mkdir(parents=True)
            case "COPY":
                *sources, target = rest.split()
                for source in sources:
                    place = self.inside(target) / (source if target.endswith("/") else "")
                    if (ROOT / source).is_dir():
                        shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
                    else:
                        shutil.copyfile(ROOT / source, place)
            case "RUN":
                program, *words = json.loads(rest)
                assert program == "python3"
                command = [sys.executable, *(str(self.inside(word)) if word.startswith("/") else word for word in words)]
                # One version is enough here: the others differ in the wheels that are fetched.
                command += [VERSION] if words[0].endswith("build_tree.py") else []
                done = subprocess.run(
                    command, cwd=self.at, env=self.env, capture_output=True, text=True, timeout=600, check=False
                )
                if done.returncode != 0:
                    reason = f"pip cannot fetch the packages here: {done.stderr.strip().splitlines()[-1]}"
                    pytest.fail(done.stderr) if REQUIRED else pytest.skip(reason)
                self.ran += 1
            case "ARG":
                pass
            case _:
                pytest.fail(f"{name} {rest}: a step that is not replayed")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/opt/kvguard for this interpreter's version, built by the Dockerfile's own steps."""
    replayed = Replayed(tmp_path_factory.mktemp("image"))
    for line in stages()["build"].strip().splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            replayed.step(name, rest)
    assert replayed.ran == 2
    built = replayed.inside("/opt/kvguard")
    # What the two images take from it.
    for name in ("kvguard", "engine"):
        assert "COPY --from=build /opt/kvguard /opt/kvguard" in stages()[name]
        entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", stages()[name], re.MULTILINE)[1])  # type: ignore[index]
        health = json.loads(re.search(r"CMD (\[.*health.*\])$", stages()[name], re.MULTILINE)[1])  # type: ignore[index]
        assert all(replayed.inside(command[-1]).exists() for command in (entry, health))
    return built


@pytest.mark.parametrize("name", ["kvguard", "engine"])
def test_what_an_image_writes_to_is_under_tmp(name):
    """The root file system may be read-only, and this user owns nothing else."""
    (environment,) = re.findall(r"^ENV (.*)$", stages()[name], re.MULTILINE)
    places = dict(word.split("=", 1) for word in environment.split())
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        assert places[variable].startswith("/tmp"), variable


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
