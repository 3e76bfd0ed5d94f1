"""Sealed directories: whole or not at all, and nothing changed is accepted."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_fakes import refusal
from kvguard.canonical import canonical_json, sha256_of
from kvguard.engine import sealed as sealed_module
from kvguard.engine.sealed import MANIFEST, check_place, is_sealed, open_sealed, write_sealed

ABOUT = {"kind": "test", "scales": [0.1, 0.2]}
FILES = {"config.json": b'{"a": 1}\n', "kv_scales.safetensors": bytes(range(200))}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def seal(out: Path, source: Path, files: dict[str, bytes] | None = None):
    links = {"model.safetensors": str(source / "model.safetensors")}
    return write_sealed(out, about=ABOUT, source=str(source), files=FILES if files is None else files, links=links)


def unlock(directory: Path) -> Path:
    """Make a sealed directory writable, as somebody who breaks it would."""
    directory.chmod(0o755)
    for entry in directory.iterdir():
        if not entry.is_symlink():
            entry.chmod(0o644)
    return directory


def test_what_is_written_is_read_and_is_read_only(tmp_path: Path, source: Path) -> None:
    sealed = seal(tmp_path / "out", source)
    assert open_sealed(tmp_path / "out") == sealed
    assert sealed.digest == sha256_of(ABOUT)
    assert (tmp_path / "out/model.safetensors").read_bytes() == b"weights"
    assert oct((tmp_path / "out").stat().st_mode & 0o777) == "0o555"
    assert {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "out").iterdir() if not p.is_symlink()} == {"0o444"}
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_the_digest_does_not_know_the_place(tmp_path: Path, source: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(source, other)
    assert seal(tmp_path / "a", source).digest == seal(tmp_path / "b", other).digest


def test_the_same_content_is_kept_and_other_content_replaces_it(tmp_path: Path, source: Path) -> None:
    seal(tmp_path / "out", source)
    before = (tmp_path / "out").stat().st_ino
    seal(tmp_path / "out", source)
    assert (tmp_path / "out").stat().st_ino == before
    seal(tmp_path / "out", source, {"config.json": b"{}"})
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["config.json", MANIFEST, "model.safetensors"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source"]


def test_a_broken_one_is_made_again(tmp_path: Path, source: Path) -> None:
    seal(tmp_path / "out", source)
    (unlock(tmp_path / "out") / "config.json").write_bytes(b"{")
    sealed = seal(tmp_path / "out", source)
    assert open_sealed(tmp_path / "out") == sealed


def test_what_is_not_ours_is_left_alone(tmp_path: Path, source: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    assert "no overlay of kvguard's" in refusal(lambda: seal(tmp_path / "mine", source))
    (tmp_path / "file").write_text("x")
    assert "no overlay of kvguard's" in refusal(lambda: seal(tmp_path / "file", source))
    (tmp_path / "link").symlink_to(source)
    assert "no overlay of kvguard's" in refusal(lambda: seal(tmp_path / "link", source))
    assert (tmp_path / "mine/thesis.tex").read_text() == "x"
    (tmp_path / "empty").mkdir()
    seal(tmp_path / "empty", source)
    assert is_sealed(tmp_path / "empty")


def test_places_that_cannot_be_written(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in refusal(lambda: seal(tmp_path / "file/out", source))


def leftover(tmp_path: Path, name: str, age: float = 0.0) -> Path:
    directory = tmp_path / f".out.kvguard-{name}"
    directory.mkdir()
    (directory / "x").write_text("x")
    directory.chmod(0o555)
    then = time.time() - age
    os.utime(directory, (then, then))
    return directory


def test_leftovers_of_dead_writers_are_swept_and_those_of_live_ones_are_not(tmp_path: Path, source: Path) -> None:
    dead, alive = leftover(tmp_path, "dead"), leftover(tmp_path, "live", age=7200)
    (tmp_path / ".out.kvguard-file").write_text("x")
    descriptor = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        seal(tmp_path / "out", source)
        assert not dead.exists()
        assert alive.exists()
        assert (tmp_path / ".out.kvguard-file").exists()
    finally:
        os.close(descriptor)
    seal(tmp_path / "out", source)
    assert not alive.exists(), "also where the overlay itself is kept"


def test_without_locks_leftovers_go_by_age(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(sealed_module.fcntl, "flock", no_locks)
    old, young = leftover(tmp_path, "old", age=7200), leftover(tmp_path, "young")
    seal(tmp_path / "out", source)
    assert is_sealed(tmp_path / "out")
    assert not old.exists()
    assert young.exists()


def test_a_writer_whose_directory_was_swept_before_it_was_locked_takes_another(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, made = fcntl.flock, []

    def swept_once(descriptor: int, operation: int) -> None:
        made.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        if len(made) == 1:
            made[0].rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(sealed_module.fcntl, "flock", swept_once)
    seal(tmp_path / "out", source)
    assert open_sealed(tmp_path / "out").manifest.about == ABOUT
    assert len(made) == 2


def test_a_place_is_tried_before_it_is_needed(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "file/out: cannot be written" in refusal(lambda: check_place(tmp_path / "file/out"))
    assert "no overlay of kvguard's" in refusal(lambda: check_place(tmp_path / "file"))
    assert "no overlay of kvguard's" in refusal(lambda: check_place(source))
    assert "name too long" in refusal(lambda: check_place(tmp_path / ("x" * 300)))
    seal(tmp_path / "ours", source)
    (tmp_path / "empty").mkdir()
    for name in ("ours", "empty", "new", "deep/down"):
        check_place(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "empty", "file", "ours", "source"]
    assert list((tmp_path / "deep").iterdir()) == []
    assert open_sealed(tmp_path / "ours").manifest.about == ABOUT


def test_a_parent_that_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(sealed_module.tempfile, "mkdtemp", refused)
    assert refusal(lambda: check_place(tmp_path / "out")) == f"{tmp_path}/out: cannot be written: Permission denied"


# --- what is not accepted ---


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / MANIFEST).unlink(), "no kvguard-overlay.json in it"),
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (lambda d: (d / "extra.json").write_text("{}"), "extra.json is not in the manifest"),
        (lambda d: (d / "config.json").write_bytes(b'{"a": 2}\n'), "config.json is corrupt"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda d: ((d / "config.json").unlink(), (d / "config.json").symlink_to("/etc/hostname")), "is a link"),
        (
            lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").symlink_to("/elsewhere")),
            "model.safetensors is no link to",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, source: Path, damage, words: str) -> None:
    seal(tmp_path / "out", source)
    damage(unlock(tmp_path / "out"))
    assert words in refusal(lambda: open_sealed(tmp_path / "out"))


def test_a_checkpoint_that_is_gone_is_named(tmp_path: Path, source: Path) -> None:
    seal(tmp_path / "out", source)
    (source / "model.safetensors").unlink()
    assert "which is gone" in refusal(lambda: open_sealed(tmp_path / "out"))
    assert "no such directory" in refusal(lambda: open_sealed(tmp_path / "nowhere"))


def test_a_manifest_that_was_rewritten_needs_its_own_seal(tmp_path: Path, source: Path) -> None:
    seal(tmp_path / "out", source)
    manifest = unlock(tmp_path / "out") / MANIFEST
    document = json.loads(manifest.read_bytes())
    document["about"]["scales"] = [9.9]
    manifest.write_bytes(canonical_json(document) + b"\n")
    assert "corrupt or cut off" in refusal(lambda: open_sealed(tmp_path / "out"))
    del document["seal"]  # even with a fresh seal, the digest is not that of what it says it is about
    manifest.write_bytes(canonical_json({**document, "seal": sha256_of(document)}) + b"\n")
    assert "corrupt or cut off" in refusal(lambda: open_sealed(tmp_path / "out"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([MANIFEST, *FILES]), place=st.floats(0, 0.999), flipped=st.integers(1, 255), cut=st.booleans())
def test_no_cut_and_no_changed_byte_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, name: str, place: float, flipped: int, cut: bool
) -> None:
    base = tmp_path_factory.mktemp("sealed")
    (base / "source").mkdir()
    (base / "source/model.safetensors").write_bytes(b"weights")
    seal(base / "out", base / "source")
    path = unlock(base / "out") / name
    content = path.read_bytes()
    at = int(place * len(content))
    path.write_bytes(content[:at] if cut else content[:at] + bytes([content[at] ^ flipped]) + content[at + 1 :])
    assert refusal(lambda: open_sealed(base / "out"))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=80).map(str.encode))
def test_any_bytes_for_a_manifest_are_refused_in_words(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / MANIFEST).write_bytes(content)
        assert MANIFEST in refusal(lambda: open_sealed(Path(directory)))


# --- killed at every step ---

WRITER = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from kvguard.engine import sealed
left = int(sys.argv[4])

def counted(function, after):
    def call(*arguments, **named):
        global left
        left -= 1
        if left == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        last = left == 0
        try:
            return function(*arguments, **named)
        finally:
            if last:
                os.kill(os.getpid(), signal.SIGKILL)
    return call

for name in ("open", "mkdir", "symlink", "fsync", "rename", "chmod", "unlink", "rmdir"):
    setattr(os, name, counted(getattr(os, name), sys.argv[5] == "after"))
source, out = Path(sys.argv[2]), Path(sys.argv[3])
files = {"config.json": b"new", "kv_scales.safetensors": b"x" * 4096}
sealed.write_sealed(out, about={"kind": "new"}, source=str(source), files=files,
                    links={"model.safetensors": str(source / "model.safetensors")})
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("over", ["nothing", "an older one"])
def test_killed_at_any_moment_it_leaves_the_old_the_new_or_nothing(
    tmp_path: Path, source: Path, over: str, moment: str
) -> None:
    """SIGKILL at each system call that changes the disk: what a later start accepts is whole."""
    seen: set[str] = set()
    for step in range(1, 200):
        out = tmp_path / f"place-{step}" / "out"
        if over == "an older one":
            seal(out, source)
        command = [sys.executable, "-c", WRITER, str(Path.cwd()), str(source), str(out), str(step), moment]
        code = subprocess.run(command, check=False).returncode
        if is_sealed(out):
            about = open_sealed(out).manifest.about
            seen.add("old" if about == ABOUT else "new")
            assert about in (ABOUT, {"kind": "new"})
        else:
            assert not out.exists()
            seen.add("nothing")
        if code == 0:
            assert open_sealed(out).manifest.about == {"kind": "new"}
            break
        assert code == -signal.SIGKILL, (step, code)
    else:
        raise AssertionError("the writer never finished")
    assert step > 10, "the writer was not killed at its steps"
    assert seen >= ({"nothing", "new"} if over == "nothing" else {"old", "new"})
    assert seal(out, source).manifest.about == ABOUT, "a later writer is not hindered by what was left"
    for place in tmp_path.glob("place-*"):
        seal(place / "out", source)
        assert [entry.name for entry in place.iterdir()] == ["out"], "nor is anything left beside it"
