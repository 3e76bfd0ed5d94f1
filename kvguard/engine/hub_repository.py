"""One repository of a hub at one commit: its files' names, whole small files, and ranges of large ones."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from kvguard.checkpoint.models import CheckpointFiles
from kvguard.checkpoint.safetensors_header import decode_floats, header_length, parse_header
from kvguard.engine.checkpoint_files import COMMIT, MAX_FILES, TEXTS, FileDigest, Weights, digest_of, scale_tensors
from kvguard.engine.hub_errors import hub_error, unanswered
from kvguard.files import printable
from kvguard.vocabulary import UsageError

FIRST_BYTES = 64 << 10
"""What is asked of a weight file first; most headers fit, and longer ones take a second request."""

_GAP = 256
"""Scales that lie this close together are read at once."""

_SMALL = 256 << 20
_TOGETHER = 8
_TIMEOUT = 60.0
_T = TypeVar("_T")


class HubRepository:
    """One repository; `open` fixes the commit. Errors are UsageError of one line, without addresses that may be signed."""

    def __init__(self, repository: str, revision: str, address: str | None) -> None:
        """`address` is the hub's, huggingface-hub's own by default."""
        self.repository, self.revision, self.commit = repository, revision, ""
        self._sha256: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        _check_address(address)
        self._library = _library()
        address = address or str(self._library.constants.ENDPOINT)
        self.endpoint = _plain_address(address)
        self._address = address.rstrip("/")
        self.bytes_read = self.requests = 0
        self._count = threading.Lock()
        self._client = httpx.Client(timeout=_TIMEOUT, follow_redirects=True)

    def __enter__(self) -> HubRepository:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def open(self) -> list[str]:
        """The names of the files at the commit, which is fixed from here on."""
        api = self._library.HfApi(endpoint=self._address)
        info = self._asked(
            partial(api.model_info, self.repository, revision=self.revision, files_metadata=True, timeout=_TIMEOUT), ""
        )
        siblings = info.siblings or []
        if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
            raise UsageError(f"{self._where('')}: the hub names no commit for revision {printable(self.revision)!r}")
        if len(siblings) > MAX_FILES:
            raise UsageError(f"{self._where('')}: {len(siblings)} files, more than the {MAX_FILES} of any checkpoint")
        self.commit = info.sha
        # As in a local directory: vLLM reads the files of the repository's root.
        named = [s for s in siblings if isinstance(s.rfilename, str)]
        files = {s.rfilename: s for s in named if "/" not in s.rfilename and s.rfilename.isprintable()}
        self._sha256 = {name: str(s.lfs["sha256"]) for name, s in files.items() if s.lfs}
        return sorted(files)

    def small(self, name: str, limit: int) -> bytes:
        """A whole small file."""
        location, size = self._head(name)
        if size > limit:
            raise UsageError(f"{self._where(name)}: {size} bytes, more than the {limit} that such a file may have")
        content = self._range(name, location, 0, size)
        self._whole[name] = hashlib.sha256(content).hexdigest()
        return content

    def digests(self, names: Sequence[str], files: CheckpointFiles) -> tuple[FileDigest, ...]:
        """As `digest_files` gives them for a downloaded copy: large files by the sha256 that the hub names them by."""
        headers = {header.file: header for header in files.safetensors}
        found = []
        for name in (*(name for name in names if name.endswith(TEXTS)), *headers, *files.other_weights):
            weights = name in headers or name in files.other_weights
            if weights and name in self._sha256:
                found.append(FileDigest(name=name, sha256=self._sha256[name], kind="hub_blob"))
            elif name in self._sha256 or name in self._whole:
                found.append(FileDigest(name=name, sha256=self._sha256.get(name) or self._whole[name], kind="full"))
            else:
                found.append(digest_of(name, self.small(name, _SMALL), headers.get(name), weights=weights))
        return tuple(sorted(found, key=lambda digest: digest.name))

    def weights(self, names: Sequence[str]) -> Sequence[Weights]:
        """Headers and KV scales of weight files, several files at a time."""
        if len(names) < 2:
            return [self._weights(name) for name in names]
        with ThreadPoolExecutor(_TOGETHER) as pool:
            return list(pool.map(self._weights, names))

    def _weights(self, name: str) -> Weights:
        location, size = self._head(name)
        first = self._range(name, location, 0, min(FIRST_BYTES, size))
        end = 8 + header_length(first, name, size)
        if end > len(first):
            first += self._range(name, location, len(first), end)
        header = parse_header(first[:end], name, size)
        values = {}
        tensors = scale_tensors(header)
        for group in _neighbours([(header.header_bytes + t.start, header.header_bytes + t.end, n) for n, t in tensors.items()]):
            start, stop = group[0][0], max(end for _, end, _ in group)
            data = first[start:stop] if stop <= len(first) else self._range(name, location, start, stop)
            for begin, finish, tensor in group:
                decoded = decode_floats(tensors[tensor], data[begin - start : finish - start])
                if decoded is not None:
                    values[tensor] = decoded
        return header, values

    def _head(self, name: str) -> tuple[str, int]:
        """Where a file's bytes lie, and how many there are."""
        url = self._library.hf_hub_url(self.repository, name, revision=self.commit, endpoint=self._address)
        found = self._asked(partial(self._library.get_hf_file_metadata, url, timeout=_TIMEOUT), name)
        if found.commit_hash not in (None, self.commit):
            raise UsageError(f"{self._where(name)}: the hub answers for commit {printable(found.commit_hash)}")
        if found.size is None:
            raise UsageError(f"{self._where(name)}: the hub does not say how long it is")
        return str(found.location), int(found.size)

    def _range(self, name: str, location: str, start: int, stop: int) -> bytes:
        """The bytes from `start` to before `stop`; a hub that would send more is not listened to."""
        if start == stop:
            return b""
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
        if urlsplit(location)[:2] == urlsplit(self._address)[:2]:  # signed addresses elsewhere need, and get, no token
            token = self._library.utils.build_hf_headers().get("authorization")
            headers |= {"authorization": token} if token else {}
        data = b""
        try:
            with self._client.stream("GET", location, headers=headers) as response:
                if response.status_code not in (200, 206) or (response.status_code == 200 and start):
                    raise UsageError(f"{self._where(name)}: HTTP {response.status_code} for bytes {start}-{stop - 1}")
                for part in response.iter_raw():
                    data += part
                    if len(data) >= stop - start:
                        break
        except httpx.HTTPError as error:
            raise UsageError(f"{self._where(name)}: {unanswered(error)}") from None
        with self._count:
            self.requests += 1
            self.bytes_read += len(data)
        if len(data) < stop - start:
            raise UsageError(f"{self._where(name)}: {stop - start} bytes asked from {start}, {len(data)} came; truncated?")
        return data[: stop - start]

    def _asked(self, question: Callable[[], _T], name: str) -> _T:
        """The library's answer, or its error as a sentence of ours: its own are of several lines, with addresses."""
        try:
            return question()
        except Exception as error:
            words = hub_error(error, self._library.errors, self.revision, token=self._has_token())
            raise UsageError(f"{self._where(name)}: {words}") from None

    def _has_token(self) -> bool:
        return "authorization" in self._library.utils.build_hf_headers()

    def _where(self, name: str) -> str:
        at = f"@{self.commit[:12]}" if self.commit else ""
        return f"{self.repository}{at}{f' {printable(name)}' if name else ''} on {self.endpoint}"


def _library() -> Any:
    """huggingface-hub, silent. It is imported only here: a guard that reads local files never loads it."""
    import huggingface_hub  # noqa: PLC0415 (half a second, for those who read from a hub)
    import huggingface_hub.constants  # noqa: PLC0415
    import huggingface_hub.errors  # noqa: PLC0415
    import huggingface_hub.utils  # noqa: PLC0415

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would add lines of its own to ours
    return huggingface_hub


def _check_address(address: str | None) -> None:
    """Raise UsageError for what is no address: huggingface-hub reads it as it is imported, and fails."""
    if not address:
        return
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(
            f"HF_ENDPOINT {printable(address.rpartition('@')[2])!r}: not an address; required is https://HOST[:PORT]"
        )


def _plain_address(address: str) -> str:
    """An address as it may be shown: without what stands before an @, a query or a fragment."""
    parts = urlsplit(address)
    return printable(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/"))


def _neighbours(places: list[tuple[int, int, str]]) -> list[list[tuple[int, int, str]]]:
    """Places of a file in groups that one request reads."""
    groups: list[list[tuple[int, int, str]]] = []
    for place in sorted(places):
        if groups and place[0] - max(end for _, end, _ in groups[-1]) <= _GAP:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups
