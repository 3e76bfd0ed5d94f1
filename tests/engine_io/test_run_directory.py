"""One private directory a start: short, ours, and gone afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvguard.engine import run_directory
from kvguard.engine.run_directory import MAX_PATH_BYTES, RunDirectory, base_directory, process_group_members, sweep
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
        "gone, second = (subprocess.Popen(child.args, process_group=0, **quiet) for _ in range(2))\n"
        "for one in (gone, second):\n"
        "    run.remember_engine(one.pid, 'reference')\n"
        "gone.kill()\n"
        "print(run.path, child.pid, second.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=30
    )
    stale, *pids = done.stdout.split()
    assert Path(stale).exists()
    assert all(process_group_members(int(pid)) for pid in pids)
    with RunDirectory(env) as live:
        assert not Path(stale).exists()
        assert not any(process_group_members(int(pid)) for pid in pids)
        with RunDirectory(env):
            assert live.path.exists()


def test_where_it_is(tmp_path: Path) -> None:
    short = Path(f"/tmp/kvgx-{os.getpid()}")
    short.mkdir()
    try:
        assert base_directory({"XDG_RUNTIME_DIR": str(short)}) == short / "kvguard"
    finally:
        short.rmdir()
    for runtime in (str(short), "/tmp/" + "x" * 80, ""):
        assert base_directory({"XDG_RUNTIME_DIR": runtime}) == Path(f"/tmp/kvguard-{os.getuid()}")


def test_a_place_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="/dev/null/x: Not a directory; set KVGUARD_RUN_DIR"):
        RunDirectory({"KVGUARD_RUN_DIR": "/dev/null/x"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDirectory, "write", full)
    with pytest.raises(UsageError, match="No space left on device; set KVGUARD_RUN_DIR"):
        RunDirectory(env)
    assert list(Path(env["KVGUARD_RUN_DIR"]).iterdir()) == []
    Path(env["KVGUARD_RUN_DIR"]).rmdir()


def test_what_is_not_ours_is_left_alone(env: dict[str, str]) -> None:
    base = Path(env["KVGUARD_RUN_DIR"])
    with RunDirectory(env):
        (base / "theirs").mkdir()
        (base / "file").touch()
        assert sweep(base) == []
    assert sorted(path.name for path in base.iterdir()) == ["file", "theirs"]
    (base / "file").unlink()
    (base / "theirs").rmdir()
    base.rmdir()


def test_a_base_that_goes_while_we_wait_for_it_is_made_again(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(env["KVGUARD_RUN_DIR"])
    waits = [base.rmdir, lambda: None, lambda: None]

    class Locking:
        LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

        @staticmethod
        def flock(descriptor: int, how: int) -> None:
            if waits:
                waits.pop(0)()
            fcntl.flock(descriptor, how)

    monkeypatch.setattr(run_directory, "fcntl", Locking)
    with RunDirectory(env) as run:
        assert run.path.exists()
    assert not base.exists()


def test_a_process_that_took_the_dead_engines_number_is_spared(env: dict[str, str]) -> None:
    """The leader's start time tells it from the engine; a group is ours only if it began after its leader."""
    base = Path(env["KVGUARD_RUN_DIR"])
    stale = base / "stale"
    stale.mkdir(parents=True)
    base.chmod(0o700)
    (stale / "lock").touch()
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    try:
        (stale / "engine.pid").write_text(f"{innocent.pid} 1")
        with RunDirectory(env):
            assert not stale.exists()
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


@pytest.mark.parametrize("note", ["", "x y", "1", "1 2 3", "\xff"])
def test_a_spoilt_note_ends_nothing(env: dict[str, str], note: str) -> None:
    base = Path(env["KVGUARD_RUN_DIR"])
    (base / "stale").mkdir(parents=True)
    base.chmod(0o700)
    (base / "stale/lock").touch()
    (base / "stale/engine.pid").write_text(note)
    with RunDirectory(env):
        assert not (base / "stale").exists()
