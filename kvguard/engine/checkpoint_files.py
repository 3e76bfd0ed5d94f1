"""Reading a model directory: JSON files, safetensors headers, the KV scale tensors' bytes, and digests of them all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kvguard.checkpoint.json_config import MAX_CONFIG_BYTES, kind, one_line, strict_json
from kvguard.checkpoint.mistral import PARAMS
from kvguard.checkpoint.models import CheckpointFiles, SafetensorsHeader
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

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


class FileDigest(Frozen):
    """A file's digest. `full`: sha256 of its bytes. `header_and_size`: sha256 of its first bytes and its size (for
    safetensors the whole header). `hub_blob`: the sha256 by which the hub's cache names the file, not recomputed.
    """

    name: str
    sha256: str
    kind: Literal["full", "header_and_size", "hub_blob"]


def resolve_model(name: str, env: Mapping[str, str]) -> str:
    """The local directory a model name means: itself when it is one, else its snapshot in the local hub cache.

    The cache is `$HF_HUB_CACHE`, `$HF_HOME/hub` or `~/.cache/huggingface/hub`; the snapshot is what refs/main names.
    UsageError when there is neither: nothing is downloaded.
    """
    if "\0" in name or not name:
        raise UsageError(f"model {one_line(name)!r}: a local model directory is needed")
    if os.path.isdir(name):
        return name
    if os.path.lexists(name):
        raise UsageError(f"{one_line(name)}: not a directory; a local model directory is needed")
    if _HUB_NAME.fullmatch(name) and ".." not in name:
        cache = _hub_cache(env) / f"models--{name.replace('/', '--')}"
        try:
            revision = _read_small(str(cache / "refs" / "main"), 4096).decode("ascii", "replace").strip()
        except UsageError:
            revision = ""
        snapshot = cache / "snapshots" / revision
        if re.fullmatch(r"\w[\w.-]*", revision) and ".." not in revision and snapshot.is_dir():
            return str(snapshot)
    raise UsageError(
        f"model {one_line(name)!r}: no such directory, and not in the local hub cache {_hub_cache(env)}; "
        "a local model directory is needed (nothing is downloaded)"
    )


def _hub_cache(env: Mapping[str, str]) -> Path:
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
    names = _listing(directory)
    consolidated = [name for name in names if name.startswith("consolidated") and name.endswith(".safetensors")]
    native = bool(consolidated) and PARAMS in names
    if "config.json" not in names and not native:
        raise UsageError(f"{one_line(directory)}: no config.json; a Hugging Face model directory is needed")

    def small(name: str, limit: int) -> bytes | None:
        return _read_small(os.path.join(directory, name), limit) if name in names else None

    config = small("config.json", MAX_CONFIG_BYTES)
    index_name = f"consolidated.{INDEX.removeprefix('model.')}" if consolidated else INDEX
    index = small(index_name, MAX_INDEX_BYTES)
    shards = consolidated or [name for name in names if name.endswith(".safetensors")]
    if index is not None:
        shards = _named_by_index(index, frozenset(names), index_name)
    headers = []
    values: dict[str, tuple[float, ...]] = {}
    for name in shards:
        header, found = _read_safetensors(directory, name)
        headers.append(header)
        values.update(found)
    return CheckpointFiles(
        directory=directory,
        config_json=config,
        params_json=small(PARAMS, MAX_CONFIG_BYTES) if native else None,
        hf_quant_config_json=small("hf_quant_config.json", MAX_CONFIG_BYTES),
        index_json=index,
        has_chat_template=_has_chat_template(directory, names),
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


def _read_safetensors(directory: str, name: str) -> tuple[SafetensorsHeader, dict[str, tuple[float, ...]]]:
    with _opened(os.path.join(directory, name)) as (descriptor, size):
        first = _read_at(descriptor, 8, 0)
        length = header_length(first, name, size)
        header = parse_header(first + _read_at(descriptor, length, 8), name, size)
        values = {}
        for tensor, info in header.tensors.items():
            if info.end - info.start <= MAX_SCALE_BYTES and scale_name(tensor) is not None:
                data = _read_at(descriptor, info.end - info.start, header.header_bytes + info.start)
                decoded = decode_floats(info, data)
                if decoded is not None:
                    values[tensor] = decoded
        return header, values


def _has_chat_template(directory: str, names: list[str]) -> bool:
    if "chat_template.jinja" in names or "chat_template.json" in names:
        return True
    if "tokenizer_config.json" not in names:
        return False
    try:
        data = _read_small(os.path.join(directory, "tokenizer_config.json"), MAX_TOKENIZER_CONFIG_BYTES)
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
    texts = [name for name in _listing(directory) if name.endswith((".json", ".jinja", ".model"))]
    digests = [_digest_text(directory, name) for name in texts]
    digests += [_digest_weights(directory, name, headers.get(name)) for name in (*headers, *files.other_weights)]
    return tuple(sorted(digests, key=lambda digest: digest.name))


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
        only_scales = header.tensors and all(scale_name(tensor) for tensor in header.tensors)
        if only_scales and size <= _SCALES_FILE_BYTES:
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
