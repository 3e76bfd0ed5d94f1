"""One private directory a start: short, ours, and gone afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvguard.engine.run_directory import MAX_PATH_BYTES, RunDirectory, base_directory, process_group_members
from kvguard.vocabulary import UsageError


@pytest.fixture
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"KVGUARD_RUN_DIR": f"/tmp/kvg-{os.getpid()}"}


def test_created_private_and_removed(env: dict[str, str]) -> None:
    with RunDirectory(env) as run:
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        assert stat.S_IMODE((run.path / "secret").stat().st_mode) == 0o600
        assert len(os.fsencode(run.path)) <= MAX_PATH_BYTES
        assert "class WorkerExtension" in (run.path / "inside/kvguard_inside.py").read_text()
        assert len(run.secret) >= 32
    assert not Path(env["KVGUARD_RUN_DIR"]).exists()


def test_a_long_path_is_refused() -> None:
    with pytest.raises(UsageError, match="108"):
        base_directory({"KVGUARD_RUN_DIR": "/tmp/" + "x" * 80})


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    base = Path(f"/tmp/kvg-open-{os.getpid()}")
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    try:
        with pytest.raises(UsageError, match="0700"):
            RunDirectory({"KVGUARD_RUN_DIR": str(base)})
    finally:
        base.rmdir()


def test_a_stale_directory_and_its_engine_are_swept_and_a_live_one_is_not(env: dict[str, str]) -> None:
    code = (
        "import os, subprocess, sys\n"
        "from kvguard.engine.run_directory import RunDirectory\n"
        "run = RunDirectory(os.environ)\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], process_group=0, **quiet)\n"
        "run.remember_engine(child.pid)\n"
        "print(run.path, child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=30
    )
    stale, pid = done.stdout.split()
    assert Path(stale).exists()
    assert process_group_members(int(pid))
    with RunDirectory(env) as live:
        assert not Path(stale).exists()
        assert not process_group_members(int(pid))
        with RunDirectory(env):
            assert live.path.exists()
