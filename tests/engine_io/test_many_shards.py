"""A checkpoint of hundreds of files: each opened once, and of its weights only headers and scales are read."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest

from checkpoint_fakes import SMOLLM2
from kvguard.checkpoint.declared import declare
from kvguard.engine.checkpoint_files import read_checkpoint
from kvguard.vocabulary import ScaleState

SHARDS, LAYERS, TENSORS, WEIGHT = 320, 60, 40, 1 << 20


def shard(number: int) -> tuple[bytes, int, bytes]:
    """Header with its length, bytes of weights before the scales, and the scales."""
    header, at = {}, 0
    for index in range(TENSORS):
        name = f"model.layers.{number % LAYERS}.mlp.experts.{number * TENSORS + index}.down_proj.weight"
        header[name] = {"dtype": "F8_E4M3", "shape": [WEIGHT], "data_offsets": [at, at + WEIGHT]}
        at += WEIGHT
    weights, content = at, b""
    for side in "kv" if number < LAYERS else "":
        name = f"model.layers.{number}.self_attn.{side}_proj.{side}_scale"
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]}
        content += b"\0\0\0\x3d"  # 0.03125
        at += 4
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text, weights, content


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """320 sparse files of 40 MiB, and how many bytes of headers and of scales they hold."""
    directory, headers, scales, weight_map = tmp_path_factory.mktemp("large"), 0, 0, {}
    (directory / "config.json").write_text(json.dumps({**SMOLLM2, "num_hidden_layers": LAYERS}))
    for number in range(SHARDS):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        header, weights, content = shard(number)
        with open(directory / name, "wb") as file:
            file.write(header)
            file.seek(weights, os.SEEK_CUR)
            file.write(content)
            file.truncate(len(header) + weights + len(content))
        headers, scales = headers + len(header), scales + len(content)
        weight_map[f"t{number}"] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory, headers, scales


def test_each_file_is_opened_once_and_nothing_but_headers_and_scales_is_read(large, monkeypatch):
    directory, headers, scales = large
    opened: Counter[str] = Counter()
    read = Counter({"bytes": 0, "calls": 0})
    real_open, real_pread = os.open, os.pread
    names: dict[int, str] = {}

    def counting_open(path, *rest, **more):
        descriptor = real_open(path, *rest, **more)
        if str(path).startswith(str(directory)):
            opened[os.path.basename(path)] += 1
            names[descriptor] = os.path.basename(path)
        return descriptor

    def counting_pread(descriptor, length, offset):
        data = real_pread(descriptor, length, offset)
        if names.get(descriptor, "").endswith(".safetensors"):
            read["bytes"] += len(data)
            read["calls"] += 1
        return data

    monkeypatch.setattr(os, "open", counting_open)
    monkeypatch.setattr(os, "pread", counting_pread)
    files = read_checkpoint(str(directory))
    monkeypatch.undo()
    assert len(files.safetensors) == SHARDS
    assert set(opened.values()) == {1}
    assert sum(name.endswith(".safetensors") for name in opened) == SHARDS
    assert read["bytes"] == headers + scales
    assert read["bytes"] < sum(os.stat(path).st_size for path in directory.iterdir()) / 1000
    assert read["calls"] <= 2 * SHARDS + 2 * LAYERS
    found = declare(files).scales
    assert (found.state, found.tensors, found.missing_layers) == (ScaleState.CHECKPOINT, 2 * LAYERS, ())
    assert found.k[0] == (0.03125,)
