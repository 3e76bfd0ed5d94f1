"""`kvguard serve ORG/NAME` where nothing is downloaded yet: read on the hub, pinned to the commit that was read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, safetensors, scales
from fake_engine import install
from fake_hub import COMMIT, Hub, Repository, running_hub
from guarded import Guarded
from kvguard.engine.checkpoint_files import digest_files, read_checkpoint
from kvguard.engine.hub import locate
from kvguard.engine.run_directory import RunDirectory
from kvguard.guard.prepare import plan_for, prepare
from kvguard.vocabulary import ExitCode, UsageError
from launches import policy
from overlay_fakes import CONFIG, weights

WEIGHT = 1 << 20
FILES = {
    "config.json": json.dumps({**SMOLLM2, **COMPRESSED_TENSORS}).encode(),
    "generation_config.json": b"{}",
    "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
    "README.md": b"a model",
    "model.safetensors": safetensors({"w": ("U8", [WEIGHT], bytes(WEIGHT)), **scales(range(30))}),
}
DENSE = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": safetensors(weights())}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "engine/site"))
    with running_hub({"org/model": Repository(FILES), "org/dense": Repository(DENSE)}) as running:
        yield running


def environment(hub: Hub, directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return {
        **kept,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(directory / "hub"),
        "XDG_CACHE_HOME": str(directory / "cache"),
    }


def download(directory: Path, files: dict[str, bytes]) -> Path:
    """The local cache as huggingface-hub leaves it: large files are links to blobs named by their sha256."""
    home = directory / "hub/models--org--model"
    snapshot, blobs = home / "snapshots" / COMMIT, home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, content in files.items():
        blob = blobs / (hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else name.replace(".", "0"))
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_digests_are_those_of_a_downloaded_copy(hub: Hub, tmp_path: Path) -> None:
    env = environment(hub, tmp_path)
    found = locate("org/model", env, digests=True)
    assert found.published is not None
    snapshot = str(download(tmp_path, FILES))
    assert found.digests == digest_files(snapshot, read_checkpoint(snapshot))
    assert {digest.name: digest.kind for digest in found.digests} == {
        "config.json": "full",
        "generation_config.json": "full",
        "model.safetensors": "hub_blob",
        "tokenizer_config.json": "full",
    }
    assert found.published.bytes_read < WEIGHT / 4


def test_the_plan_pins_the_commit_that_was_read(hub: Hub, tmp_path: Path) -> None:
    vllm, env = install(tmp_path / "engine"), environment(hub, tmp_path)
    argv = (str(vllm), "serve", "org/model", "--revision", "main")
    prepared = prepare(argv, policy("kv_cache: {dtype: fp8_e4m3, scales: checkpoint}"), env, hub=True)
    assert prepared.published is not None
    assert prepared.declared.directory == str(tmp_path / "hub/models--org--model/snapshots" / COMMIT)
    with tempfile.TemporaryDirectory() as short, RunDirectory({"KVGUARD_RUN_DIR": short}) as run_directory:
        plan = plan_for(prepared, run_directory, env, colour=False)
    assert plan.argv.count("--revision") == 1
    assert plan.argv[plan.argv.index("--revision") + 1] == COMMIT
    assert any(change.what == f"--revision {COMMIT}" and "main may move" in change.why for change in plan.changes)
    pinned = prepare((str(vllm), "serve", "org/model", "--revision", COMMIT), None, env, hub=True)
    with tempfile.TemporaryDirectory() as short, RunDirectory({"KVGUARD_RUN_DIR": short}) as run_directory:
        kept = plan_for(pinned, run_directory, env, colour=False)
    assert kept.argv[kept.argv.index("--revision") + 1] == COMMIT
    assert not any("--revision" in change.what for change in kept.changes)


def test_a_downloaded_copy_is_read_here_and_the_command_stays(hub: Hub, tmp_path: Path) -> None:
    vllm, env = install(tmp_path / "engine"), environment(hub, tmp_path)
    snapshot = download(tmp_path, FILES)
    prepared = prepare((str(vllm), "serve", "org/model", "--revision", COMMIT), None, env, hub=True)
    assert (prepared.published, prepared.declared.directory) == (None, str(snapshot))
    assert not hub.asked


def test_what_needs_the_files_themselves_says_so(hub: Hub, tmp_path: Path) -> None:
    """An overlay is made of links to the files; calibrating and comparing start from files as well."""
    vllm, env = install(tmp_path / "engine"), environment(hub, tmp_path)
    runtime = policy("kv_cache: {dtype: fp8_e4m3, scales: runtime}")
    argv = (str(vllm), "serve", "org/dense")
    with pytest.raises(UsageError, match=f"hf download org/dense --revision {COMMIT}"):
        prepare(argv, runtime, env, hub=True)
    with pytest.raises(UsageError, match="nothing is downloaded"):
        prepare(argv, None, env)


def test_it_serves_and_the_record_names_the_commit(hub: Hub, tmp_path: Path) -> None:
    vllm = install(tmp_path / "engine")
    (tmp_path / "notes").mkdir()
    env = {
        **environment(hub, tmp_path),
        "HF_HUB_OFFLINE": "0",
        "FAKE_VLLM_FAULTS": "",
        "FAKE_VLLM_NOTES": str(tmp_path / "notes"),
    }
    run = Guarded(
        tmp_path,
        Path("org/model"),
        vllm=str(vllm),
        policy="kv_cache: {dtype: fp8_e4m3}\n",
        options=("--settle", "0"),
        env=env,
    )
    try:
        run.wait_ready()
        predicate = run.record()["predicate"]
        assert predicate["undigested"]["hub"]["commit"] == COMMIT
        assert any(COMMIT in change["what"] for change in predicate["plan"]["changes"])
        subjects = {subject["name"]: subject["digest"]["sha256"] for subject in run.record()["subject"]}
        assert len(subjects["model.safetensors"].removeprefix("sha256:")) == 64
        assert f"--revision {COMMIT}" in run.err
        assert run.stop() == ExitCode.CLEAN
    finally:
        run.close()
