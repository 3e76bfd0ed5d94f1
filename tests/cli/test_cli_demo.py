"""`kvguard demo setup` where everything is there already, and where the CPU cannot run it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvguard.cli import demo
from kvguard.demo.environment import COMPLETE, ENGINE_VERSION
from kvguard.demo.model import MODEL_NAME
from kvguard.demo.variants import VARIANTS, safetensors_bytes
from kvguard.vocabulary import UsageError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a finished engine and a finished model, on a CPU that can run them."""
    engine = tmp_path / "kvguard/engines" / ENGINE_VERSION
    (engine / "bin").mkdir(parents=True)
    for name in ("bin/python", "bin/vllm", COMPLETE):
        (engine / name).write_text("")
    model = tmp_path / "kvguard/models" / MODEL_NAME
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    (model / "model.safetensors").write_bytes(safetensors_bytes({"model.norm.weight": 1.0}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "cpu_supports_fp8_kv", lambda: (True, "it does"))
    return tmp_path / "kvguard"


def test_says_where_everything_is(cache):
    done = CliRunner().invoke(demo.app, ["setup"], catch_exceptions=False)
    assert done.exit_code == 0
    printed = dict(line.rsplit(maxsplit=1) for line in done.output.splitlines())
    assert printed[f"vLLM {ENGINE_VERSION}"] == str(cache / "engines" / ENGINE_VERSION / "bin/vllm")
    assert printed["model"] == str(cache / "models" / MODEL_NAME)
    assert printed.keys() >= VARIANTS.keys()
    assert all(Path(printed[kind], "config.json").is_file() for kind in VARIANTS)


def test_a_cpu_that_cannot_run_it(cache, monkeypatch):
    monkeypatch.setattr(demo, "cpu_supports_fp8_kv", lambda: (False, "this one is too old"))
    with pytest.raises(UsageError, match="no engine is set up: this one is too old"):
        CliRunner().invoke(demo.app, ["setup"], catch_exceptions=False)
    done = CliRunner().invoke(demo.app, ["setup", "--if-supported"], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, "kvguard: no engine is set up: this one is too old\n")
