"""`kvguard inspect` and `kvguard check` on a model that is on a hub, as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, safetensors, scales
from fake_hub import COMMIT, Hub, Repository, running_hub
from kvguard.vocabulary import ExitCode

CONFIG = json.dumps({**SMOLLM2, **COMPRESSED_TENSORS}).encode()
WEIGHT = 4 << 20


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    weights = safetensors({"w": ("U8", [WEIGHT], bytes(WEIGHT)), **scales(range(30))})
    model = Repository({"config.json": CONFIG, "model.safetensors": weights}, revisions=("main", "v1"))
    with running_hub({"org/model": model, "org/gated": Repository(model.files, gated=True, token="t0ps3cret")}) as running:
        yield running


def run(hub: Hub, home, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "HUGGING"))}
    environment = {**kept, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), **env}
    words = [sys.executable, "-m", "kvguard.cli.main", *arguments]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_inspect_reads_headers_at_a_commit(hub, tmp_path):
    before = hub.sent
    result = run(hub, tmp_path, "inspect", "org/model", "--engine-version", "0.32.0", "--revision", "v1", "--json")
    assert result.returncode == ExitCode.CLEAN, result.stderr
    report = json.loads(result.stdout)
    assert (report["hub"]["commit"], report["hub"]["revision"]) == (COMMIT, "v1")
    assert report["hub"]["bytes_read"] == hub.sent - before < WEIGHT / 4
    assert (report["prediction"]["dtype"], report["scales"]["state"]) == ("fp8_e4m3", "checkpoint")
    shown = run(hub, tmp_path, "inspect", "org/model", "--engine-version", "0.32.0")
    assert f"org/model@{COMMIT}" in shown.stdout


def test_across_versions(hub, tmp_path):
    result = run(hub, tmp_path, "inspect", "org/model", "--across", "0.14.1,0.32", "--json")
    report = json.loads(result.stdout)
    assert [version["dtype"] for version in report["versions"]] == ["bfloat16", "fp8_e4m3"]
    assert report["hub"]["commit"] == COMMIT


def test_check_takes_the_revision_of_the_command(hub, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("kv_cache: {dtype: fp8_e4m3, scales: checkpoint}\n")
    words = ("check", "--policy", str(policy), "--engine-version", "0.32.0", "--json", "--", "vllm", "serve", "org/model")
    allowed = run(hub, tmp_path, *words, "--revision", "v1")
    assert allowed.returncode == ExitCode.CLEAN, allowed.stderr
    assert json.loads(allowed.stdout)["hub"]["revision"] == "v1"
    refused = run(hub, tmp_path, *words, "--kv-cache-dtype", "bfloat16")
    assert refused.returncode == ExitCode.POLICY_VIOLATION
    gone = run(hub, tmp_path, *words, "--revision", "v3")
    assert (gone.returncode, len(gone.stderr.splitlines())) == (ExitCode.USAGE, 1)
    assert "no revision 'v3'" in gone.stderr


@pytest.mark.parametrize(
    ("name", "env", "said"),
    [
        ("org/none", {}, "not found there"),
        ("org/gated", {"HF_TOKEN": "t0ps3cre"}, "gated"),
        ("org/model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("org/model", {"HF_ENDPOINT": "http://127.0.0.1:1"}, "no answer"),
    ],
)
def test_each_failure_is_one_line(hub, tmp_path, name, env, said):
    result = run(hub, tmp_path, "inspect", name, "--engine-version", "0.32.0", **env)
    assert (result.returncode, len(result.stderr.splitlines()), result.stdout) == (ExitCode.USAGE, 1, "")
    assert said in result.stderr
    assert "t0ps3cre" not in result.stderr
