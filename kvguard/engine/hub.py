"""Reading a checkpoint where it is published: its JSON files, its weights' headers and KV scales, and nothing else of it.

huggingface-hub names the commit, the files and where they lie, with the user's endpoint, token and offline switch; the
bytes are then asked for by range, so that a checkpoint of 400 GB costs its headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field

from kvguard.checkpoint.models import CheckpointFiles
from kvguard.engine.checkpoint_files import FileDigest, gather, hub_cache, local_model, read_checkpoint
from kvguard.engine.hub_repository import HubRepository
from kvguard.files import printable
from kvguard.vocabulary import Frozen, UsageError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TRUE = ("1", "ON", "YES", "TRUE")


class Published(Frozen):
    """Where a checkpoint was read from a hub. `commit` is what `revision` meant then; `bytes_read` of all its files."""

    repository: str
    revision: str
    commit: str
    endpoint: str
    bytes_read: int
    requests: int


class Located(Frozen):
    """A checkpoint's files; `published` where they were read from a hub, None for a local directory.

    `digests` are of a hub's files, where they were asked for, the same as of a downloaded copy.
    """

    files: CheckpointFiles = Field(repr=False)
    published: Published | None = None
    digests: tuple[FileDigest, ...] = ()


def locate(name: str, env: Mapping[str, str], revision: str | None = None, *, digests: bool = False) -> Located:
    """The checkpoint that a name means: a local directory, a snapshot in the local hub cache, else on the hub.

    With `digests` a hub's small files are read whole. UsageError, one line, where it is nowhere, not to be had with this
    token, or not to be asked for (HF_HUB_OFFLINE).
    """
    directory = local_model(name, env, revision)
    if directory is not None:
        return Located(files=read_checkpoint(directory))
    here = f"model {printable(name)!r}: no such directory, and not in the local hub cache {hub_cache(env)}"
    if not _REPOSITORY.fullmatch(name) or ".." in name:
        raise UsageError(f"{here}; a local model directory, or ORG/NAME of a hub, is needed")
    if offline := _offline(env):
        raise UsageError(f"{here}; the hub is not asked, because {offline} is set")
    return read_published(name, env, revision, digests=digests)


def snapshot_of(published: Published, env: Mapping[str, str]) -> str:
    """Where the local hub cache keeps these files once somebody has downloaded them."""
    name = f"models--{published.repository.replace('/', '--')}"
    return str(hub_cache(env) / name / "snapshots" / published.commit)


def read_published(repository: str, env: Mapping[str, str], revision: str | None = None, *, digests: bool = False) -> Located:
    """A hub's checkpoint, at the commit that the revision (default: main) means now. Errors as `locate`."""
    with HubRepository(repository, revision or "main", env.get("HF_ENDPOINT")) as hub:
        names = hub.open()
        files = gather(f"{repository}@{hub.commit}", names, hub.small, hub.weights)
        found = hub.digests(names, files) if digests else ()
        published = Published(
            repository=repository,
            revision=hub.revision,
            commit=hub.commit,
            endpoint=hub.endpoint,
            bytes_read=hub.bytes_read,
            requests=hub.requests,
        )
    return Located(files=files, published=published, digests=found)


def _offline(env: Mapping[str, str]) -> str:
    """The name of the variable that forbids to ask, "" when none does. The first that is set decides, as in huggingface-hub."""
    name = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if env.get(name)), "")
    return name if name and env[name].upper() in _TRUE else ""
