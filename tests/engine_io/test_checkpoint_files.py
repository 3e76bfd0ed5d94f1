import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, f32, refusal, safetensors, scales, write
from kvguard.checkpoint.declared import declare
from kvguard.engine.checkpoint_files import digest_files, read_checkpoint, resolve_model
from kvguard.vocabulary import ScaleState, UsageError


def index(**weight_map):
    return json.dumps({"weight_map": weight_map})


def test_a_checkpoint_is_read(tmp_path):
    config = {**SMOLLM2, **COMPRESSED_TENSORS}
    write(tmp_path, config, {"w": f32(1.0), **scales(range(30))}, hf_quant_config__json="{}")
    found = read_checkpoint(str(tmp_path))
    assert found.directory == str(tmp_path)
    assert json.loads(found.config_json) == config
    assert found.hf_quant_config_json == b"{}"
    assert found.index_json is None
    assert [header.file for header in found.safetensors] == ["model.safetensors"]
    assert len(found.scale_values) == 60
    assert "w" not in found.scale_values
    assert not found.has_chat_template
    assert declare(found).scales.state is ScaleState.CHECKPOINT


@pytest.mark.parametrize(
    ("name", "content", "has"),
    [
        ("chat_template.jinja", "{{ x }}", True),
        ("tokenizer_config.json", '{"chat_template": "{{ x }}"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", "broken", False),
        ("tokenizer_config.json", "[]", False),
    ],
)
def test_chat_templates(tmp_path, name, content, has):
    write(tmp_path, SMOLLM2)
    (tmp_path / name).write_text(content)
    assert read_checkpoint(str(tmp_path)).has_chat_template is has


def test_only_files_the_index_names_count(tmp_path):
    write(tmp_path, SMOLLM2, {"w": f32(1.0)})
    (tmp_path / "a.safetensors").write_bytes(safetensors(scales([0])))
    (tmp_path / "leftover.safetensors").write_bytes(b"broken, and never opened")
    (tmp_path / "model.safetensors.index.json").write_text(index(w="model.safetensors", s="a.safetensors"))
    found = read_checkpoint(str(tmp_path))
    assert [header.file for header in found.safetensors] == ["a.safetensors", "model.safetensors"]
    assert len(found.scale_values) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "weight_map: expected an object"),
        ("[]", "weight_map: expected an object"),
        (index(w=3), "weight_map: 'w': expected a file name, found 3"),
        (index(w="gone.safetensors"), "'gone.safetensors'"),
        (index(w="../outside.safetensors"), "not in the directory"),
        (index(w="/etc/passwd"), "not in the directory"),
    ],
)
def test_a_broken_index_is_named(tmp_path, content, message):
    directory = write(tmp_path / "m", SMOLLM2)
    (tmp_path / "outside.safetensors").write_bytes(safetensors({}))
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UsageError, match=message) as error:
        read_checkpoint(str(directory))
    assert str(error.value).startswith("model.safetensors.index.json")


def test_a_missing_directory_or_config_is_named(tmp_path):
    with pytest.raises(UsageError, match="not a readable model directory: No such file"):
        read_checkpoint(str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_checkpoint(str(tmp_path))
    with pytest.raises(UsageError, match="not a readable model directory"):
        read_checkpoint("a\0b")


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "x.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling", "loop", "socket"])
def test_irregular_files_are_refused_without_blocking(tmp_path, name, kind):
    if name != "config.json":
        write(tmp_path, SMOLLM2)
    path = tmp_path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        import socket

        here = os.getcwd()
        os.chdir(tmp_path)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(name)
        finally:
            os.chdir(here)
    else:
        path.symlink_to(tmp_path / "gone" if kind == "dangling" else path)
    with pytest.raises(UsageError, match=name):
        read_checkpoint(str(tmp_path))


def test_permission_denied_is_named(tmp_path, monkeypatch):
    write(tmp_path, SMOLLM2)
    real = os.open

    def denied(path, *rest):
        if str(path).endswith("config.json"):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(UsageError, match=r"config\.json: cannot be read: Permission denied"):
        read_checkpoint(str(tmp_path))


def test_oversized_files_are_refused_by_size_alone(tmp_path):
    write(tmp_path, SMOLLM2)
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=r"config\.json: 1099511627776 bytes"):
        read_checkpoint(str(tmp_path))


def test_a_truncated_weight_file_is_named(tmp_path):
    write(tmp_path, SMOLLM2)
    content = safetensors({"w": f32(1.0, 2.0)})
    (tmp_path / "x.safetensors").write_bytes(content[:-4])
    with pytest.raises(UsageError, match=r"x\.safetensors: tensor 'w'.*truncated"):
        read_checkpoint(str(tmp_path))


def sparse_weights(path, tensors, gib):
    """A safetensors file with `tensors` weights and a hole for their data."""
    each = (gib << 30) // tensors
    header = {
        f"model.layers.{i // 10}.w{i % 10}": {
            "dtype": "U8",
            "shape": [each],
            "data_offsets": [i * each, (i + 1) * each],
        }
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + each * tensors)


def test_weights_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    for shard in range(200):
        sparse_weights(tmp_path / f"model-{shard:05}.safetensors", tensors=50, gib=4)
    before = time.process_time()
    found = read_checkpoint(str(tmp_path))
    digest_files(str(tmp_path), found)
    assert time.process_time() - before < 60, "800 GB of weights"
    assert len(found.safetensors) == 200


def test_other_weight_formats_are_named(tmp_path):
    write(tmp_path, SMOLLM2, pytorch_model__bin="x", training_args__bin="x")
    found = read_checkpoint(str(tmp_path))
    assert found.other_weights == ("pytorch_model.bin",)
    assert any("pytorch_model.bin" in finding for finding in declare(found).findings)


def test_digests(tmp_path):
    write(tmp_path, SMOLLM2, {"w": f32(1.0)}, tokenizer__json="{}", notes__txt="x")
    (tmp_path / "kv.safetensors").write_bytes(safetensors(scales([0])))
    digests = {d.name: d for d in digest_files(str(tmp_path), read_checkpoint(str(tmp_path)))}
    assert {name: digest.kind for name, digest in digests.items()} == {
        "config.json": "full",
        "kv.safetensors": "full",
        "model.safetensors": "header_and_size",
        "tokenizer.json": "full",
    }
    for name in ("config.json", "kv.safetensors"):
        assert digests[name].sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def digest_of(directory, name):
    return next(d.sha256 for d in digest_files(str(directory), read_checkpoint(str(directory))) if d.name == name)


def test_a_weight_digest_follows_header_and_size(tmp_path):
    write(tmp_path, SMOLLM2, {"w": f32(1.0)})
    first = digest_of(tmp_path, "model.safetensors")
    write(tmp_path, SMOLLM2, {"w": f32(9.0)})
    assert digest_of(tmp_path, "model.safetensors") == first
    write(tmp_path, SMOLLM2, {"w2": f32(1.0)})
    assert digest_of(tmp_path, "model.safetensors") != first


def test_a_scale_value_changes_its_files_digest(tmp_path):
    write(tmp_path, SMOLLM2, scales([0], k=0.05))
    first = digest_of(tmp_path, "model.safetensors")
    write(tmp_path, SMOLLM2, scales([0], k=0.06))
    assert digest_of(tmp_path, "model.safetensors") != first


def hub(tmp_path, revision="abc123"):
    """A hub cache with one model whose weights link into blobs."""
    base = tmp_path / "hub" / "models--ORG--NAME"
    snapshot = base / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(revision + "\n")
    blob = base / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(safetensors({"w": f32(1.0)}))
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / blob.name)
    (snapshot / "config.json").write_text(json.dumps(SMOLLM2))
    return {"HF_HOME": str(tmp_path)}, snapshot


def test_a_hub_blob_names_its_own_digest(tmp_path):
    env, snapshot = hub(tmp_path)
    directory = resolve_model("ORG/NAME", env)
    assert directory == str(snapshot)
    digests = {d.name: d for d in digest_files(directory, read_checkpoint(directory))}
    assert (digests["model.safetensors"].kind, digests["model.safetensors"].sha256) == ("hub_blob", "ab" * 32)
    assert digests["config.json"].kind == "full"


def test_resolving_names(tmp_path, monkeypatch):
    env, snapshot = hub(tmp_path)
    monkeypatch.chdir(snapshot)  # whatever lies beside the tests is no model
    assert resolve_model(str(snapshot), env) == str(snapshot)
    assert resolve_model("ORG/NAME", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == str(snapshot)
    assert resolve_model("ORG/NAME", {"HOME": str(tmp_path / "home"), **env}) == str(snapshot)
    for name in ("ORG/OTHER", "", "a\0b", "../x", "ORG/NAME/more", "line\nbreak", "ORG/..", str(tmp_path / "gone")):
        with pytest.raises(UsageError, match="local model directory is needed") as error:
            resolve_model(name, env)
        assert "\n" not in str(error.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not a directory"):
        resolve_model(str(tmp_path / "file"), env)


@pytest.mark.parametrize("revision", ["../../../..", "", ".", "gone", "a/b"])
def test_a_hub_reference_cannot_lead_elsewhere(tmp_path, revision):
    env, _ = hub(tmp_path)
    (tmp_path / "hub" / "models--ORG--NAME" / "refs" / "main").write_text(revision)
    with pytest.raises(UsageError, match="local model directory is needed"):
        resolve_model("ORG/NAME", env)


CONTENT = st.sampled_from(
    [
        json.dumps(SMOLLM2).encode(),
        b"{}",
        b"[]",
        b"",
        b'{"weight_map": {"a": "model.safetensors"}}',
        b'{"weight_map": {"a": "\\u0000"}}',
        safetensors(scales([0])),
        safetensors(scales([0]))[:-3],
        b"\x10" + b"\0" * 7 + b"{}",
    ]
) | st.binary(max_size=60)
NAMES = st.sampled_from(
    [
        "config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "model.safetensors",
        "b.safetensors",
        "tokenizer_config.json",
        "chat_template.jinja",
        "pytorch_model.bin",
    ]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, CONTENT | st.sampled_from(["directory", "fifo", "loop"]), max_size=6))
def test_no_directory_escapes_as_another_error(tmp_path_factory, content):
    directory = tmp_path_factory.mktemp("hostile")
    for name, data in content.items():
        path = directory / name
        if data == "directory":
            path.mkdir()
        elif data == "fifo":
            os.mkfifo(path)
        elif data == "loop":
            path.symlink_to(path)
        else:
            path.write_bytes(data)

    def use():
        found = read_checkpoint(str(directory))
        declare(found)
        digest_files(str(directory), found)

    assert "\n" not in refusal(use)
