"""Overlays of a checkpoint: the same weights with other KV scales, or without the KV directive, as documents.

Pure: from a checkpoint's JSON files and headers to the files that differ and the names of those that are only linked.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from kvguard.checkpoint.json_config import parse_object
from kvguard.checkpoint.models import CheckpointFiles, Declared, SafetensorsHeader
from kvguard.checkpoint.quantization import CONFIG, OVERRIDES, SIDECAR
from kvguard.engine.checkpoint_files import INDEX, MAX_INDEX_BYTES
from kvguard.engine.sealed import PREFIX
from kvguard.facts.calibration import attach_form, keeps_model_dtype, scale_names
from kvguard.facts.kv_resolution import COMPRESSED_TENSORS
from kvguard.facts.scale_names import dropped_by_model, host_copy_stays_one, owns_kv_scales, scale_name
from kvguard.facts.versions import KNOWN, examined
from kvguard.reference.scales import Scales, fits_bfloat16
from kvguard.vocabulary import Frozen, PolicyRefusal, UsageError

SCALES_FILE = "kv_scales.safetensors"

_SCHEME = {"dynamic": False, "num_bits": 8, "strategy": "tensor", "symmetric": True, "type": "float"}
_MODELOPT_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
_DENSE_BLOCK = {
    "config_groups": {},
    "format": "dense",
    "ignore": [],
    "kv_cache_scheme": _SCHEME,
    "quant_method": COMPRESSED_TENSORS,
    "quantization_status": "compressed",
}
_DIRECTIVES = ("kv_cache_scheme", "kv_cache_quant_algo")
_BLOCKS = ("quantization_config", "compression_config")


class Overlay(Frozen):
    """`files` differ from the checkpoint's and are written; `links` are names of the checkpoint's that are linked.

    `notes` say what was done, one sentence each.
    """

    files: dict[str, bytes]
    links: tuple[str, ...]
    notes: tuple[str, ...]


def strip(files: CheckpointFiles, names: Iterable[str]) -> Overlay:
    """The checkpoint without its KV directive, in config.json and in hf_quant_config.json, and without files of KV scales.

    `names` are the entries of its directory. UsageError when there is nothing to strip.
    """
    written: dict[str, bytes] = {}
    notes: list[str] = []
    for name, data in _documents(files).items():
        document = parse_object(data, name)
        gone = sorted(_remove_directives(document, name))
        if gone:
            written[name] = _json_bytes(document)
            notes.append(f"removed {', '.join(gone)}")
    pure = _scale_files(files)
    if pure:
        notes.append(f"left out {', '.join(pure)}: KV scale tensors only")
        if files.index_json is not None:
            written[INDEX] = _json_bytes(_index(files, without=pure, added=()))
    if not written and not pure:
        raise UsageError(f"{files.directory}: neither {CONFIG} nor {SIDECAR} holds a KV directive; it runs as it is")
    return Overlay(files=written, links=_links(names, written, pure), notes=tuple(notes))


def why_dropped(version: str, files: CheckpointFiles, declared: Declared) -> str:
    """Why this version's loader would drop, or not find, KV scales attached to this checkpoint; "" when it loads them."""
    method, mla = declared.quant_method, declared.geometry.mla
    what = f"quantization method {method}" if method else "a dense checkpoint"
    if files.params_json is not None or files.config_json is None:
        return "its weights are in Mistral's own format (consolidated*.safetensors), beside which added files are not read"
    if not files.safetensors:
        return "its weights are not safetensors, so that an added safetensors file would be loaded in their place"
    if declared.quantization is not None and declared.quantization.file == OVERRIDES:
        return "--hf-overrides replaces its quantization_config, which would hide what the overlay declares"
    if not examined(version):
        return f"vLLM {version or '(no version)'} was not examined (the facts cover {KNOWN}); whether it loads them is unknown"
    form = attach_form(version, method)
    owner = method or COMPRESSED_TENSORS
    if form is None or not owns_kv_scales(version, owner, mla=mla, algorithm_declared=True):
        reason = "loads no KV scales for MLA layers" if mla and form is not None else "loads no KV scales"
        return f"vLLM {version}: {what} {reason}, so they would be dropped and the cache would run at scale 1.0"
    host = host_copy_stays_one(version, owner)
    if host is not None:
        return f"vLLM {version}: {what}: {host.reason} ({host.source})"
    lost = dropped_by_model(version, declared.architecture)
    if lost is not None:
        return f"vLLM {version}: {lost.reason} ({lost.source})"
    if scale_names(version, declared.architecture) is None:
        return (
            f"vLLM {version}: under which names {declared.architecture or 'a model without architectures'} loads KV scales "
            "was not read, so they might be dropped"
        )
    mixed = [header.file for header in files.safetensors if _has_scales(header) and not _only_scales(header)]
    if mixed:
        return f"{mixed[0]} holds KV scales of its own beside weights; which of the two would be loaded last is not known"
    return ""


def attach(version: str, files: CheckpointFiles, declared: Declared, names: Iterable[str], scales: Scales) -> Overlay:
    """The checkpoint with these KV scales, in the form that its quantization method loads.

    Raises PolicyRefusal where `why_dropped` has a reason, UsageError when the scales are for other layers.
    """
    if reason := why_dropped(version, files, declared):
        raise PolicyRefusal(f"{files.directory}: {reason}")
    modules = attention_modules(version, files, declared)
    expected = declared.geometry.layer_indices or tuple(sorted(modules))
    if set(scales.layers) != set(expected) or set(scales.k) != set(scales.v):
        raise UsageError(
            f"scales for {_listed(scales.layers)} were given; {files.directory} has attention layers {_listed(expected)}"
        )
    form = attach_form(version, declared.quant_method)
    assert form is not None  # noqa: S101 (why_dropped asked)
    written, note = _declare_scales(files, declared, form[0])
    pattern = scale_names(version, declared.architecture)
    assert pattern is not None  # noqa: S101
    tensors = {
        pattern.pattern.format(attention=modules[index], side=side): table[index]
        for index in sorted(expected)
        for side, table in (("k", scales.k), ("v", scales.v))
    }
    old = _scale_files(files)
    written[SCALES_FILE] = safetensors_bytes(tensors)
    written[INDEX] = _json_bytes(_index(files, without=old, added=tuple(tensors)))
    notes = [f"{SCALES_FILE}: {len(tensors)} scale tensors, {next(iter(tensors))} …", note]
    if keeps_model_dtype(declared.quant_method) and not all(map(fits_bfloat16, tensors.values())):
        notes.append(
            f"the {declared.quant_method} loader keeps scales in the model's dtype: in bfloat16 they are these to within 2^-8"
        )
    if old:
        notes.append(f"left out {', '.join(old)}: the checkpoint's own KV scales")
    return Overlay(files=written, links=_links(names, written, old), notes=tuple(notes))


def attention_modules(version: str, files: CheckpointFiles, declared: Declared) -> dict[int, str]:
    """The full name of each attention module by layer index, as the checkpoint's weights are named.

    PolicyRefusal when a layer has none, or its scales' name would not be read as one.
    """
    names = scale_names(version, declared.architecture)
    assert names is not None  # noqa: S101 (asked by why_dropped)
    weight = re.compile(rf"^((?:.*\.)?(\d+)\.{re.escape(names.attention)})\.(?:k_proj|qkv_proj)\.")
    modules: dict[int, str] = {}
    for header in files.safetensors:
        for tensor in header.tensors:
            match = weight.match(tensor)
            found = scale_name(f"{match[1]}.k_scale") if match else None
            if match and found is not None and found.layer == int(match[2]):
                modules[found.layer] = match[1]
    missing = [index for index in declared.geometry.layer_indices or () if index not in modules]
    if missing or not modules:
        layers = f"layers {_listed(tuple(missing))}" if missing else "any layer"
        raise PolicyRefusal(f"{files.directory}: no {names.attention}.k_proj or qkv_proj weight of {layers} in its safetensors")
    return modules


def safetensors_bytes(values: Mapping[str, float]) -> bytes:
    """A safetensors file with one float32 tensor of shape [1] for each name (header length, JSON header, data)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for position, name in enumerate(values):
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [4 * position, 4 * position + 4]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(values)}f", *values.values())


def _declare_scales(files: CheckpointFiles, declared: Declared, form: str) -> tuple[dict[str, bytes], str]:
    """The JSON files that make the cache e4m3 with scales from the files, and what was said in them."""
    documents = {name: parse_object(data, name) for name, data in _documents(files).items()}
    if form == "tensors_only":
        return {}, f"{declared.quant_method} takes no KV directive: the cache dtype has to be typed, --kv-cache-dtype fp8_e4m3"
    if form == "compressed_tensors_block":
        documents[CONFIG]["quantization_config"] = _DENSE_BLOCK
        note = f"{CONFIG}: quantization_config with a compressed-tensors kv_cache_scheme"
        return {CONFIG: _json_bytes(documents[CONFIG])}, note
    block, where = _block(documents, declared)
    if form == "compressed_tensors_scheme":
        block["kv_cache_scheme"] = _SCHEME
        return {where: _json_bytes(documents[where])}, f"{where}: kv_cache_scheme, 8-bit float, one scale a tensor"
    nested = block.get("quantization")
    for place in (block, nested):
        if isinstance(place, dict):
            for key in _DIRECTIVES:
                place.pop(key, None)
    if isinstance(nested, dict):  # ModelOpt's older form, which knows the algorithm's name only
        nested["kv_cache_quant_algo"] = "FP8"
    else:
        block["kv_cache_scheme"] = _MODELOPT_SCHEME
    return {where: _json_bytes(documents[where])}, f"{where}: ModelOpt KV algorithm FP8"


def _block(documents: dict[str, dict[str, Any]], declared: Declared) -> tuple[dict[str, Any], str]:
    """The quantization block that vLLM takes, and its file."""
    quantization = declared.quantization
    assert quantization is not None  # noqa: S101 (these forms have a method)
    found = documents[quantization.file]
    for key in filter(None, quantization.block.split(".")):
        found = found[key]
    return found, quantization.file


def _documents(files: CheckpointFiles) -> dict[str, bytes]:
    found = {CONFIG: files.config_json, SIDECAR: files.hf_quant_config_json}
    return {name: data for name, data in found.items() if data is not None}


def _remove_directives(document: dict[str, Any], name: str) -> Iterable[str]:
    """Take KV directives out of every quantization block; yields where each was."""
    places: list[tuple[dict[str, Any], str]] = []
    if name == SIDECAR:
        places.append((document, name))
    for prefix, section in (("", document), ("text_config.", document.get("text_config"))):
        if isinstance(section, dict):
            blocks = ((key, section.get(key)) for key in _BLOCKS)
            places += [(block, f"{name}: {prefix}{key}") for key, block in blocks if isinstance(block, dict)]
    for block, where in places:
        for nested, inner in ((block, ""), (block.get("quantization"), "quantization."), (block.get("export"), "export.")):
            if isinstance(nested, dict):
                for key in (*_DIRECTIVES, "kv_cache_group"):
                    if nested.pop(key, None) is not None:
                        yield f"{where}{'.' if ':' in where else ': '}{inner}{key}"


def _has_scales(header: SafetensorsHeader) -> bool:
    return any(scale_name(tensor) is not None for tensor in header.tensors)


def _only_scales(header: SafetensorsHeader) -> bool:
    return bool(header.tensors) and all(scale_name(tensor) is not None for tensor in header.tensors)


def _scale_files(files: CheckpointFiles) -> tuple[str, ...]:
    """Files of the checkpoint that hold KV scales and nothing else."""
    return tuple(header.file for header in files.safetensors if _only_scales(header))


def _index(files: CheckpointFiles, *, without: tuple[str, ...], added: tuple[str, ...]) -> dict[str, Any]:
    """model.safetensors.index.json: the checkpoint's own, or one made from its headers, with the scale tensors."""
    kept = [header for header in files.safetensors if header.file not in without]
    if files.index_json is not None:
        index = parse_object(files.index_json, INDEX, limit=MAX_INDEX_BYTES)
        weight_map = {name: file for name, file in index["weight_map"].items() if file not in without}
    else:
        index = {}
        weight_map = {tensor: header.file for header in kept for tensor in header.tensors}
    size = sum(info.end - info.start for header in kept for info in header.tensors.values()) + 4 * len(added)
    metadata = index.get("metadata")
    return {
        **index,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": size},
        "weight_map": weight_map | dict.fromkeys(added, SCALES_FILE),
    }


def _links(names: Iterable[str], written: Mapping[str, bytes], without: tuple[str, ...]) -> tuple[str, ...]:
    """Entries of the checkpoint to link: all but hidden ones, kvguard's own, those written and those left out."""
    out = {*written, *without}
    return tuple(sorted(name for name in names if name not in out and not name.startswith((".", PREFIX))))


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _listed(layers: tuple[int, ...]) -> str:
    ordered = sorted(layers)
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}–{ordered[-1]}"
    return ", ".join(str(layer) for layer in ordered[:12]) + (" …" if len(ordered) > 12 else "") or "none"
