"""Reading a model directory: JSON files, safetensors headers, the KV scale tensors' bytes, and digests of them all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kvguard.checkpoint.json_config import MAX_CONFIG_BYTES, kind, one_line, strict_json
from kvguard.checkpoint.mistral import PARAMS
from kvguard.checkpoint.models import CheckpointFiles, SafetensorsHeader, TensorInfo
from kvguard.checkpoint.safetensors_header import decode_floats, header_length, parse_header
from kvguard.checkpoint.scales import MAX_SCALE_BYTES
from kvguard.facts.scale_names import scale_name
from kvguard.vocabulary import Frozen, UsageError

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 128 << 20
MAX_TOKENIZER_CONFIG_BYTES = 64 << 20
MAX_FILES = 20_000

_FULL_DIGEST_BYTES = 256 << 20
_SCALES_FILE_BYTES = 64 << 20
_HEAD_BYTES = 1 << 20
_CHUNK = 1 << 20

TEXTS = (".json", ".jinja", ".model")
"""How the names of files end that are digested whole."""

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_REVISION = re.compile(r"\w[\w./-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A hub revision that names one commit, and can never mean another."""


class FileDigest(Frozen):
    """A file's digest. `full`: sha256 of its bytes. `header_and_size`: sha256 of its first bytes and its size (for
    safetensors the whole header). `hub_blob`: the sha256 by which the hub's cache names the file, not recomputed.
    """

    name: str
    sha256: str
    kind: Literal["full", "header_and_size", "hub_blob"]


def resolve_model(name: str, env: Mapping[str, str], revision: str | None = None) -> str:
    """The local directory a model name means, see `local_model`. UsageError when there is none: nothing is downloaded."""
    directory = local_model(name, env, revision)
    if directory is None:
        at = f" at revision {one_line(revision)!r}" if revision else ""
        raise UsageError(
            f"model {one_line(name)!r}{at}: no such directory, and not in the local hub cache {hub_cache(env)}; "
            "a local model directory is needed (nothing is downloaded)"
        )
    return directory


def local_model(name: str, env: Mapping[str, str], revision: str | None = None) -> str | None:
    """The local directory a model name means: itself when it is one, else its snapshot in the local hub cache, or None.

    The cache is `$HF_HUB_CACHE`, `$HF_HOME/hub` or `~/.cache/huggingface/hub`; the snapshot is what refs/REVISION names
    ("main" by default), or REVISION where that is a commit. UsageError for what is no name.
    """
    if "\0" in name or not name:
        raise UsageError(f"model {one_line(name)!r}: a local model directory is needed")
    if os.path.isdir(name):
        return name
    if os.path.lexists(name):
        raise UsageError(f"{one_line(name)}: not a directory; a local model directory is needed")
    revision = revision or "main"
    if not _HUB_NAME.fullmatch(name) or ".." in name or not _REVISION.fullmatch(revision) or ".." in revision:
        return None
    cache = hub_cache(env) / f"models--{name.replace('/', '--')}"
    try:
        commit = _read_small(str(cache / "refs" / revision), 4096).decode("ascii", "replace").strip()
    except UsageError:
        commit = revision if COMMIT.fullmatch(revision) else ""
    snapshot = cache / "snapshots" / commit
    return str(snapshot) if re.fullmatch(r"\w[\w.-]*", commit) and ".." not in commit and snapshot.is_dir() else None


def hub_cache(env: Mapping[str, str]) -> Path:
    """Where huggingface-hub keeps what it downloaded."""
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"])
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/"), ".cache"), "huggingface"))
    return Path(home) / "hub"


def read_checkpoint(directory: str) -> CheckpointFiles:
    """The files of a model directory that say something about its KV cache; weights' data are not read.

    With model.safetensors.index.json only the files it names count, as in vLLM's loader; without it, every
    *.safetensors. Where there are consolidated*.safetensors, those are the weights, and params.json the config (0.27.1
    transformers_utils/config.py:692, 0.32.0 default_loader.py:170). Each file is opened once, and of weights only the
    header and the KV scales' bytes are read. UsageError, naming the file, for a missing directory or config, and for
    unreadable, irregular, oversized or broken files.
    """
    return gather(
        directory,
        _listing(directory),
        lambda name, limit: _read_small(os.path.join(directory, name), limit),
        lambda shards: [_read_safetensors(directory, name) for name in shards],
    )


Weights = tuple[SafetensorsHeader, dict[str, tuple[float, ...]]]
"""A weight file's header, and the values of the KV scales in it by tensor."""


def gather(
    place: str,
    names: Sequence[str],
    read: Callable[[str, int], bytes],
    weights: Callable[[Sequence[str]], Sequence[Weights]],
) -> CheckpointFiles:
    """As `read_checkpoint`, from files that are elsewhere: `place` is named in errors, `names` are all that there are.

    `read` gives a small file's bytes, at most so many; `weights` what is read of each weight file.
    """
    consolidated = [name for name in names if name.startswith("consolidated") and name.endswith(".safetensors")]
    native = bool(consolidated) and PARAMS in names
    if "config.json" not in names and not native:
        raise UsageError(f"{one_line(place)}: no config.json; a Hugging Face model directory is needed")

    def small(name: str, limit: int) -> bytes | None:
        return read(name, limit) if name in names else None

    config = small("config.json", MAX_CONFIG_BYTES)
    index_name = f"consolidated.{INDEX.removeprefix('model.')}" if consolidated else INDEX
    index = small(index_name, MAX_INDEX_BYTES)
    shards = consolidated or [name for name in names if name.endswith(".safetensors")]
    if index is not None:
        shards = _named_by_index(index, frozenset(names), index_name)
    headers = []
    values: dict[str, tuple[float, ...]] = {}
    for header, found in weights(shards):
        headers.append(header)
        values.update(found)
    return CheckpointFiles(
        directory=place,
        config_json=config,
        params_json=small(PARAMS, MAX_CONFIG_BYTES) if native else None,
        hf_quant_config_json=small("hf_quant_config.json", MAX_CONFIG_BYTES),
        index_json=index,
        has_chat_template=_has_chat_template(names, read),
        safetensors=tuple(headers),
        scale_values=values,
        other_weights=tuple(name for name in names if name.endswith(_OTHER_WEIGHTS) and name not in _NOT_WEIGHTS),
    )


def _listing(directory: str) -> list[str]:
    """Names in a directory that UTF-8 can write, sorted."""
    try:
        names = sorted(os.listdir(directory))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{one_line(directory)}: not a readable model directory: {reason}") from None
    if len(names) > MAX_FILES:
        raise UsageError(f"{one_line(directory)}: {len(names)} files, more than the {MAX_FILES} of any checkpoint")
    return [name for name in names if name.isprintable()]


@contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """A file descriptor and the size of a regular file; symbolic links are followed, nothing blocks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{one_line(path)}: not a regular file")
        yield descriptor, status.st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    finally:
        os.close(descriptor)


def _unreadable(path: str, error: Exception) -> UsageError:
    reason = str(error)
    if isinstance(error, OSError):
        reason = "not a regular file" if error.errno == errno.ENXIO else error.strerror or str(error)
    return UsageError(f"{one_line(path, 500)}: cannot be read: {reason}")


def _read_at(descriptor: int, length: int, offset: int) -> bytes:
    parts = []
    while length > 0:
        part = os.pread(descriptor, min(length, 64 << 20), offset)
        if not part:
            break
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def _read_small(path: str, limit: int) -> bytes:
    with _opened(path) as (descriptor, size):
        if size > limit:
            raise UsageError(f"{one_line(path)}: {size} bytes, more than the {limit} that such a file may have")
        return _read_at(descriptor, limit, 0)


def _named_by_index(index: bytes, present: frozenset[str], index_name: str = INDEX) -> list[str]:
    value = strict_json(index, index_name)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict):
        raise UsageError(f"{index_name}: weight_map: expected an object that names a file for each tensor")
    files = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise UsageError(f"{index_name}: weight_map: {one_line(tensor)!r}: expected a file name, found {kind(name)}")
        files.add(name)
    missing = sorted(files - present)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"{index_name}: weight_map names {one_line(missing[0])!r}{more}, not in the directory; download is incomplete?"
        )
    return sorted(files)


def _read_safetensors(directory: str, name: str) -> Weights:
    with _opened(os.path.join(directory, name)) as (descriptor, size):
        first = _read_at(descriptor, 8, 0)
        length = header_length(first, name, size)
        header = parse_header(first + _read_at(descriptor, length, 8), name, size)
        values = {}
        for tensor, info in scale_tensors(header).items():
            data = _read_at(descriptor, info.end - info.start, header.header_bytes + info.start)
            decoded = decode_floats(info, data)
            if decoded is not None:
                values[tensor] = decoded
        return header, values


def scale_tensors(header: SafetensorsHeader) -> dict[str, TensorInfo]:
    """The KV scales of a weight file that are small enough to be read."""
    return {
        name: info
        for name, info in header.tensors.items()
        if info.end - info.start <= MAX_SCALE_BYTES and scale_name(name) is not None
    }


def _has_chat_template(names: Sequence[str], read: Callable[[str, int], bytes]) -> bool:
    if "chat_template.jinja" in names or "chat_template.json" in names:
        return True
    if "tokenizer_config.json" not in names:
        return False
    try:
        data = read("tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES)
        value = strict_json(data, "tokenizer_config.json")
    except UsageError:
        return False
    return isinstance(value, dict) and bool(value.get("chat_template"))


def digest_files(directory: str, files: CheckpointFiles) -> tuple[FileDigest, ...]:
    """Digests of a checkpoint's JSON files, chat template and weight files, by name.

    Full for JSON, templates and safetensors that hold only KV scales; header and size for other weights, or the hub
    cache's own sha256 for a weight file that links into its blobs. UsageError when a file cannot be read any more.
    """
    headers = {header.file: header for header in files.safetensors}
    texts = [name for name in _listing(directory) if name.endswith(TEXTS)]
    digests = [_digest_text(directory, name) for name in texts]
    digests += [_digest_weights(directory, name, headers.get(name)) for name in (*headers, *files.other_weights)]
    return tuple(sorted(digests, key=lambda digest: digest.name))


def digest_of(name: str, content: bytes, header: SafetensorsHeader | None, *, weights: bool) -> FileDigest:
    """The digest of a file whose content is at hand, as `digest_files` gives it; `header` is that of safetensors."""
    scales_only = header is not None and _scales_only(header, len(content))
    if weights and not scales_only:
        return _head_and_size(name, content[: header.header_bytes if header else _HEAD_BYTES], len(content))
    return FileDigest(name=name, sha256=hashlib.sha256(content).hexdigest(), kind="full")


def _scales_only(header: SafetensorsHeader, size: int) -> bool:
    """Whether a weight file holds KV scales alone, few enough to be read whole."""
    return bool(header.tensors) and all(scale_name(tensor) for tensor in header.tensors) and size <= _SCALES_FILE_BYTES


def _digest_text(directory: str, name: str) -> FileDigest:
    with _opened(os.path.join(directory, name)) as (descriptor, size):
        if size > _FULL_DIGEST_BYTES:
            return _head_and_size(name, _read_at(descriptor, _HEAD_BYTES, 0), size)
        return FileDigest(name=name, sha256=_sha256(descriptor), kind="full")


def _digest_weights(directory: str, name: str, header: SafetensorsHeader | None) -> FileDigest:
    path = os.path.join(directory, name)
    if os.path.islink(path):
        target = Path(os.path.realpath(path))
        if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
            return FileDigest(name=name, sha256=target.name, kind="hub_blob")
    with _opened(path) as (descriptor, size):
        if header is None:
            return _head_and_size(name, _read_at(descriptor, _HEAD_BYTES, 0), size)
        if _scales_only(header, size):
            return FileDigest(name=name, sha256=_sha256(descriptor), kind="full")
        return _head_and_size(name, _read_at(descriptor, header.header_bytes, 0), size)


def _sha256(descriptor: int) -> str:
    digest, offset = hashlib.sha256(), 0
    while part := os.pread(descriptor, _CHUNK, offset):
        digest.update(part)
        offset += len(part)
    return digest.hexdigest()


def _head_and_size(name: str, head: bytes, size: int) -> FileDigest:
    digest = hashlib.sha256(head + size.to_bytes(8, "little"))
    return FileDigest(name=name, sha256=digest.hexdigest(), kind="header_and_size")
