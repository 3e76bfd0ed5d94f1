"""Checkpoints on a hub: headers and scales only, at one commit, and one line for whatever goes wrong."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, f32, safetensors, scales
from fake_hub import COMMIT, SIGNATURE, Hub, Repository, running_hub
from kvguard.checkpoint.declared import declare
from kvguard.engine.checkpoint_files import read_checkpoint
from kvguard.engine.hub import locate
from kvguard.engine.hub_repository import FIRST_BYTES
from kvguard.vocabulary import ScaleState, UsageError

CONFIG = json.dumps({**SMOLLM2, **COMPRESSED_TENSORS}).encode()
WEIGHT = 2 << 20


def shard(layers: range) -> bytes:
    """Two megabytes of weights between scales, as writers sort them: by name."""
    return safetensors({"a.weight": ("U8", [WEIGHT], bytes(WEIGHT)), **scales(layers), "z.weight": ("U8", [9], bytes(9))})


def sharded(shards: int = 3) -> dict[str, bytes]:
    each = 30 // shards
    files = {f"model-{n:05}-of-{shards:05}.safetensors": shard(range(n * each, (n + 1) * each)) for n in range(shards)}
    weight_map = {f"model.layers.{n * each}.self_attn.k_scale": name for n, name in enumerate(files)}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    template = json.dumps({"chat_template": "{{ messages }}"}).encode()
    return {"config.json": CONFIG, "model.safetensors.index.json": index, "tokenizer_config.json": template, **files}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[Hub]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with running_hub({"org/model": Repository(sharded())}) as running:
        yield running


def env(hub: Hub, tmp_path, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache"), **more}


def failure(name: str, environment: dict[str, str], revision: str | None = None) -> str:
    with pytest.raises(UsageError) as error:
        locate(name, environment, revision)
    text = str(error.value)
    assert "\n" not in text
    assert SIGNATURE not in text
    assert "secret" not in text
    return text


def test_what_is_read_is_what_a_copy_says_and_no_weights(hub, tmp_path):
    found = locate("org/model", env(hub, tmp_path))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in sharded().items():
        (copy / name).write_bytes(content)
    local = read_checkpoint(str(copy))
    assert found.files.model_copy(update={"directory": str(copy)}) == local
    assert declare(found.files).scales.state is ScaleState.CHECKPOINT
    published = found.published
    assert published is not None
    assert (published.commit, published.revision, published.endpoint) == (COMMIT, "main", hub.endpoint)
    assert found.files.directory == f"org/model@{COMMIT}"
    headers = sum(header.header_bytes for header in local.safetensors)
    assert hub.sent == published.bytes_read
    assert hub.sent < headers + 3 * (FIRST_BYTES + 4096) + len(CONFIG) + 4096
    assert hub.sent < WEIGHT / 4, "three files of two megabytes each"
    ranges = [path for _, path, _ in hub.store]
    assert len(ranges) == 3 * 2, "of each file the header, and its scales together"


def test_everything_after_the_first_question_is_asked_at_the_commit(hub, tmp_path):
    locate("org/model", env(hub, tmp_path))
    assert hub.asked[0][1].startswith("/api/models/org/model")
    assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in hub.asked[1:])
    heads = [path for method, path, _ in hub.asked if method == "HEAD"]
    assert len(heads) == len(sharded())


def test_a_long_header_takes_a_second_request(hub, tmp_path):
    many = {f"model.layers.0.part.{number:06}.weight": ("U8", [1], b"\0") for number in range(2000)}
    content = safetensors({**many, **scales(range(30))})
    hub.repositories["org/long"] = Repository({"config.json": CONFIG, "model.safetensors": content})
    header = int.from_bytes(content[:8], "little")
    assert header > FIRST_BYTES
    found = locate("org/long", env(hub, tmp_path))
    assert len(found.files.scale_values) == 60
    assert len(hub.store) == 3


def test_the_cache_is_before_the_hub(hub, tmp_path):
    snapshot = tmp_path / "cache/models--org--model/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(CONFIG)
    refs = tmp_path / "cache/models--org--model/refs"
    (refs / "pr").mkdir(parents=True)
    for name in ("main", "pr/1"):
        (refs / name).write_text(COMMIT)
    for revision in (None, "main", "pr/1", COMMIT):
        found = locate("org/model", env(hub, tmp_path), revision)
        assert (found.files.directory, found.published) == (str(snapshot), None)
    assert not hub.asked
    assert "no revision 'other'" in failure("org/model", env(hub, tmp_path), "other")
    assert hub.asked


def test_a_named_revision(hub, tmp_path):
    hub.repositories["org/model"] = Repository(sharded(), revisions=("main", "v1.0"))
    assert locate("org/model", env(hub, tmp_path), "v1.0").published.revision == "v1.0"
    assert locate("org/model", env(hub, tmp_path), COMMIT).published.commit == COMMIT
    assert "name a branch, tag or commit" in failure("org/model", env(hub, tmp_path), "v2")


def test_offline_asks_nobody(hub, tmp_path):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        assert f"because {name} is set" in failure("org/model", env(hub, tmp_path, **{name: "1"}))
    assert not hub.asked
    assert locate("org/model", env(hub, tmp_path, HF_HUB_OFFLINE="0", TRANSFORMERS_OFFLINE="1")).published


def test_the_library_may_forbid_it_too(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set" in failure("org/model", env(hub, tmp_path))


def test_nobody_there(hub, tmp_path):
    text = failure("org/other", env(hub, tmp_path))
    assert "org/other on http://127.0.0.1" in text
    assert "not found there, nor in the local cache, nor a directory here; if it is private, give HF_TOKEN" in text
    for name in ("other", "org/other/more", "org/..", "", "a\0b"):
        assert "is needed" in failure(name, env(hub, tmp_path))


def test_the_token_opens_a_private_repository_and_stays_with_the_hub(hub, tmp_path, monkeypatch):
    hub.repositories["org/private"] = Repository(sharded(), token="secret")
    assert "not found" in failure("org/private", env(hub, tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = locate("org/private", env(hub, tmp_path))
    assert "secret" not in found.model_dump_json()
    assert {who for _, _, who in hub.asked[1:]} == {"Bearer secret"}
    assert {who for _, _, who in hub.store} == {""}, "the store's address is signed, and gets no token"


def test_a_gated_repository(hub, tmp_path):
    hub.repositories["org/gated"] = Repository(sharded(), token="secret", gated=True)
    assert "gated, ask for access on the hub, and give your token there (HF_TOKEN)" in failure("org/gated", env(hub, tmp_path))


def test_a_token_that_does_not_do(hub, tmp_path, monkeypatch):
    hub.repositories["org/private"] = Repository(sharded(), token="secret")
    hub.repositories["org/gated"] = Repository(sharded(), token="secret", gated=True)
    monkeypatch.setenv("HF_TOKEN", "another")
    assert "HTTP 401 with this token: it is not accepted, or may not read" in failure("org/private", env(hub, tmp_path))
    assert "gated, and not open to this token: ask for access on the hub" in failure("org/gated", env(hub, tmp_path))


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"", "HTTP 401"),
        (403, b"", "HTTP 403: not allowed, with this token or without one"),
        (404, b"<html>", "HTTP 404: no hub answers so; is HF_ENDPOINT the address of one?"),
        (429, b"", "HTTP 429: too many requests, try later"),
        (200, b"<html>Sign in</html>", "the answer is not a hub's"),
        (200, b"[]", "the answer is not a hub's"),
    ],
)
def test_what_is_not_a_hub_or_says_no(hub, tmp_path, status, body, said):
    hub.says = (status, body)
    text = failure("org/model", env(hub, tmp_path))
    assert said in text
    assert hub.endpoint in text


def test_a_name_that_no_hub_has(hub, tmp_path):
    assert "not a name that a hub has" in failure("org--more/model", env(hub, tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model-00000-of-00003.safetensors"])
def test_an_answer_that_ends_early(hub, tmp_path, name):
    hub.repositories["org/model"] = Repository(sharded(), short=frozenset({name}))
    text = failure("org/model", env(hub, tmp_path))
    assert f"org/model@{COMMIT[:12]} {name} on {hub.endpoint}" in text


def test_a_file_that_is_shorter_than_its_header_says(hub, tmp_path):
    content = shard(range(30))
    hub.repositories["org/cut"] = Repository({"config.json": CONFIG, "model.safetensors": content[:-WEIGHT]})
    assert "truncated?" in failure("org/cut", env(hub, tmp_path))
    hub.repositories["org/cut"] = Repository({"config.json": CONFIG, "model.safetensors": struct.pack("<Q", 1 << 40)})
    assert "safetensors allows" in failure("org/cut", env(hub, tmp_path))


def test_no_model_there(hub, tmp_path):
    hub.repositories["org/data"] = Repository({"README.md": b"data"})
    assert "no config.json" in failure("org/data", env(hub, tmp_path))


def test_a_hub_that_sends_everything_is_not_listened_to(hub, tmp_path):
    """Ranges are ignored: the header is read and the rest is not, and what lies further in cannot be had."""
    hub.ignore_ranges = True
    plain = safetensors({"a.weight": ("U8", [WEIGHT], bytes(WEIGHT))})
    hub.repositories["org/plain"] = Repository({"config.json": CONFIG, "model.safetensors": plain})
    found = locate("org/plain", env(hub, tmp_path))
    assert found.published.bytes_read < WEIGHT / 4
    assert "HTTP 200 for bytes" in failure("org/model", env(hub, tmp_path))


@pytest.mark.parametrize("commit", ["", "main", "../../../etc", "0" * 39, "0" * 40 + "/.."])
def test_a_hub_that_names_no_commit(hub, tmp_path, commit):
    hub.repositories["org/model"] = Repository(sharded(), commit=commit)
    assert "the hub names no commit for revision 'main'" in failure("org/model", env(hub, tmp_path))


def test_no_hub_at_all(hub, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = failure("org/model", {"HF_ENDPOINT": f"http://user:secret@127.0.0.1:{port}", "HF_HUB_CACHE": str(tmp_path)})
    assert f"org/model on http://127.0.0.1:{port}: no answer (" in text
    assert "no directory here has that name, nor has the local cache" in text


def test_scales_beside_each_other_are_one_request(hub, tmp_path):
    scale = {f"model.layers.{n}.self_attn.{side}_scale": f32(0.5) for n in range(30) for side in "kv"}
    together = safetensors({"w": ("U8", [WEIGHT], bytes(WEIGHT)), **scale})
    apart = safetensors({k: v for n, s in scale.items() for k, v in ((n, s), (n + ".pad", ("U8", [4096], bytes(4096))))})
    hub.repositories["org/together"] = Repository({"config.json": CONFIG, "model.safetensors": together})
    hub.repositories["org/apart"] = Repository({"config.json": CONFIG, "model.safetensors": apart})
    assert set(locate("org/together", env(hub, tmp_path)).files.scale_values.values()) == {(0.5,)}
    assert len(hub.store) == 2
    hub.store.clear()
    assert len(locate("org/apart", env(hub, tmp_path)).files.scale_values) == 60
    assert 40 < len(hub.store) <= 61
