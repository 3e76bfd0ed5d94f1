"""A directory that is there whole or not at all: files and links beside a manifest of their digests, written last.

It is built under a temporary name beside its place, every file and the directory flushed to disk, the manifest after
all others, and then renamed. Whoever reads it accepts nothing that differs from its manifest in a byte, a link or a name,
so that a write that was killed at any moment, and a file that was changed later, are both found.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from kvguard.canonical import canonical_json, sha256_of
from kvguard.files import printable, read_regular_file
from kvguard.vocabulary import Frozen, Json, UsageError

MANIFEST = "kvguard-overlay.json"
PREFIX = "kvguard-"
"""Names of files in a sealed directory that are kvguard's own, and no part of a checkpoint."""

ABANDONED_AFTER = 3600.0
"""Seconds after which a temporary directory is of a writer that did not live to rename it, where locks do not say so."""

_MANIFEST_LIMIT = 64 << 20
_FILE_LIMIT = 512 << 20
_MARK = "seal"


class Manifest(Frozen):
    """What a sealed directory holds.

    `about` says what it is (the digest of it names the directory), `files` the sha256 of each file written there, `links`
    the target of each link. `source` is the directory that the links lead to.
    """

    model_config = ConfigDict(extra="forbid")

    form: int = Field(default=1, ge=1, le=1)
    about: dict[str, Any]
    digest: str
    source: str
    files: dict[str, str]
    links: dict[str, str]


class Sealed(Frozen):
    """A directory that agrees with its manifest."""

    path: str
    manifest: Manifest

    @property
    def digest(self) -> str:
        """`sha256:…` over `about`."""
        return self.manifest.digest


def write_sealed(
    out: Path, *, about: Mapping[str, Json], source: str, files: Mapping[str, bytes], links: Mapping[str, str]
) -> Sealed:
    """Write the directory `out`: `files` by name, `links` by name to their targets, read-only.

    A sealed directory that is there with the same content is kept; one with other content is replaced; anything else is
    left alone. Raises UsageError, naming the place, when `out` is something else or cannot be written.
    """
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    manifest = Manifest(
        about=dict(about), digest=sha256_of(dict(about)), source=source, files=digests, links=dict(sorted(links.items()))
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        if (kept := _kept(out, manifest)) is not None:
            return kept
        with _working_directory(out) as work:
            try:
                _fill(work, files, links, manifest)
                _put(work, out)
            except BaseException:
                _remove(work)
                raise
        _flush_directory(out.parent)
    except OSError as error:
        raise UsageError(f"{printable(str(out))}: cannot be written: {error.strerror or error}") from error
    return Sealed(path=str(out), manifest=manifest)


def check_place(out: Path) -> None:
    """Raises UsageError when `write_sealed` could not write `out`, found by making its parent and a directory in it."""
    _refuse_foreign(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        with _working_directory(out) as work:
            work.rmdir()
    except OSError as error:
        raise UsageError(f"{printable(str(out))}: cannot be written: {error.strerror or error}") from error


def open_sealed(path: Path) -> Sealed:
    """The sealed directory at `path`, every file's digest and every link checked.

    Raises UsageError, naming what differs, for anything that does not agree with its manifest.
    """
    name = printable(str(path))
    if not path.is_dir():
        raise UsageError(f"{name}: no such directory")
    if not os.path.lexists(path / MANIFEST):
        raise UsageError(f"{name}: no {MANIFEST} in it: not written by kvguard, or not to the end; make it again")
    manifest = _read_manifest(path)
    expected = {MANIFEST, *manifest.files, *manifest.links}
    try:
        found = set(os.listdir(path))
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from error
    for entry in sorted(expected ^ found):
        what = "is missing" if entry in expected else "is not in the manifest"
        raise UsageError(f"{name}: {printable(entry)} {what}: the directory was changed after it was written; make it again")
    for entry, digest in manifest.files.items():
        if hashlib.sha256(_own_file(path / entry, name)).hexdigest() != digest:
            raise UsageError(f"{name}: {printable(entry)} is corrupt: its sha256 is not the manifest's; make it again")
    for entry, target in manifest.links.items():
        link = path / entry
        if not link.is_symlink() or os.readlink(link) != target:
            raise UsageError(f"{name}: {printable(entry)} is no link to {printable(target)}; make it again")
        if not link.exists():
            raise UsageError(f"{name}: {printable(entry)} leads to {printable(target)}, which is gone; make it again")
    return Sealed(path=str(path), manifest=manifest)


def is_sealed(path: Path) -> bool:
    """Whether there is a manifest; what it says is not checked."""
    return (path / MANIFEST).is_file()


def _read_manifest(path: Path) -> Manifest:
    content = _own_file(path / MANIFEST, printable(str(path)), _MANIFEST_LIMIT)
    broken = f"{printable(str(path))}: {MANIFEST} is corrupt or cut off; make it again"
    try:
        document = json.loads(content)
        mark = document.pop(_MARK)
        manifest = Manifest.model_validate(document)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, ValidationError):
        raise UsageError(broken) from None
    if mark != sha256_of(document) or _manifest_bytes(manifest) != content or manifest.digest != sha256_of(manifest.about):
        raise UsageError(broken)
    return manifest


def _manifest_bytes(manifest: Manifest) -> bytes:
    document = manifest.model_dump(mode="json")
    return canonical_json({**document, _MARK: sha256_of(document)}) + b"\n"


def _own_file(path: Path, directory: str, limit: int = _FILE_LIMIT) -> bytes:
    """A file that must be here and no link."""
    if path.is_symlink():
        raise UsageError(f"{directory}: {printable(path.name)} is a link, a file was written; make it again")
    return read_regular_file(path, limit, "overlay file")


def _kept(out: Path, manifest: Manifest) -> Sealed | None:
    """The directory that is there, if it has just this content. UsageError when what is there is not ours."""
    _refuse_foreign(out)
    if not os.path.lexists(out):
        return None
    with contextlib.suppress(UsageError):
        found = open_sealed(out)
        if found.manifest == manifest:
            return found
    return None


def _refuse_foreign(out: Path) -> None:
    """UsageError when `out` is there and neither ours nor an empty directory."""
    try:
        mode = os.lstat(out).st_mode
        if not stat.S_ISDIR(mode) or (any(out.iterdir()) and not is_sealed(out)):
            raise UsageError(f"{printable(str(out))}: is there already and is no overlay of kvguard's; name another place")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UsageError(f"{printable(str(out))}: cannot be read: {error.strerror or error}") from error


def _fill(work: Path, files: Mapping[str, bytes], links: Mapping[str, str], manifest: Manifest) -> None:
    for name, target in links.items():
        os.symlink(target, work / name)
    for name, content in files.items():
        _write(work / name, content)
    _flush_directory(work)
    _write(work / MANIFEST, _manifest_bytes(manifest))
    os.chmod(work, 0o555)  # noqa: S103 (read-only, for every reader)
    _flush_directory(work)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _put(work: Path, out: Path) -> None:
    """Rename `work` to `out`. What is there goes aside first; for that moment nothing is there."""
    aside = None
    if os.path.lexists(out):
        aside = Path(tempfile.mkdtemp(prefix=_temporary(out), dir=out.parent))
        os.rename(out, aside)  # onto the empty directory
    os.rename(work, out)
    if aside is not None:
        _remove(aside)


def _temporary(out: Path) -> str:
    return f".{out.name[:80]}.kvguard-"


@contextlib.contextmanager
def _working_directory(out: Path) -> Iterator[Path]:
    """A new directory beside `out`, locked for as long as this process lives and needs it: who gets the lock may remove it."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=_temporary(out), dir=out.parent))
        try:
            descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # swept already
            continue
        with contextlib.suppress(OSError):  # a file system without locks: `_sweep` goes by age there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.lexists(work):  # not swept before it was locked
            break
        os.close(descriptor)
    try:
        yield work
    finally:
        os.close(descriptor)


def _sweep(out: Path) -> None:
    """Remove temporary directories of this place whose writers are dead: nobody holds their lock."""
    for left in out.parent.glob(f"{glob.escape(_temporary(out))}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _is_abandoned(descriptor):
                    _remove(left)
            finally:
                os.close(descriptor)


def _is_abandoned(descriptor: int) -> bool:
    """Whether the lock of a temporary directory can be had, or, where there are no locks, whether it is old."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > ABANDONED_AFTER
    return True


def _remove(directory: Path) -> None:
    for place, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            os.chmod(place, stat.S_IRWXU)
    shutil.rmtree(directory, ignore_errors=True)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
