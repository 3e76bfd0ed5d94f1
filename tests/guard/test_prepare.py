"""What is understood, decided and refused before anything is started."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, refusal, scales, write
from fake_engine import install
from kvguard.engine.run_directory import RunDirectory
from kvguard.guard.prepare import Prepared, plan_for, prepare, raise_file_limit, stdout_is_terminal
from kvguard.policy.models import Policy
from kvguard.verdict.checks import violations
from kvguard.vocabulary import UsageError
from launches import policy

BF16 = policy("kv_cache: {dtype: bfloat16}")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake engine's `vllm`, found by its own interpreter."""
    script = install(tmp_path / "engine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "engine/site"))
    return script


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", {**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(30)))


@pytest.fixture
def prepared(vllm: Path, model: Path) -> Callable[..., Prepared]:
    def one(*flags: str, required: Policy | None = None, **env: str) -> Prepared:
        return prepare((str(vllm), "serve", str(model), *flags), required, {**os.environ, **env})

    return one


def test_a_start_that_has_been_thought_through(prepared: Callable[..., Prepared], vllm: Path, model: Path) -> None:
    found = prepared("--speculative-config", '{"model": "d"}', required=BF16)
    assert (found.engine.version, found.engine.executable) == ("0.32.0", str(vllm))
    assert found.executable == (str(vllm), "serve")
    assert (found.declared.directory, found.resolution.stated) == (str(model), "bfloat16")
    assert violations(found.checks) == ()
    assert found.degraded[0].startswith("speculative: ")
    assert {digest.name for digest in found.digests} >= {"config.json"}
    assert {claim.field for claim in found.requested} == {"kv_cache_dtype", "speculative_config"}


def test_a_conflict_with_the_policy_does_not_raise(prepared: Callable[..., Prepared]) -> None:
    assert [check.name for check in violations(prepared("--kv-cache-dtype", "fp8", required=BF16).checks)] == ["kv_cache_dtype"]


def test_overrides_of_the_checkpoint_count(prepared: Callable[..., Prepared]) -> None:
    found = prepared("--hf-overrides", '{"quantization_config": {"quant_method": "compressed-tensors"}}')
    assert found.resolution.target == "bfloat16"
    assert prepared("--hf-overrides.rope_theta", "5").resolution.target == "fp8_e4m3"


def test_a_cpu_build_is_known_by_its_version(prepared: Callable[..., Prepared], tmp_path: Path) -> None:
    info = tmp_path / "engine/site/vllm-0.32.0.dist-info/METADATA"
    info.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    found = prepared("--kv-cache-dtype", "int8_per_token_head")
    assert found.engine.version == "0.32.0"
    assert "CPU attention backend" in found.resolution.prediction.reason


def test_the_module_form_runs_with_its_own_interpreter(vllm: Path, model: Path) -> None:
    python = vllm.with_name("python3")
    module = "vllm.entrypoints.openai.api_server"
    found = prepare((str(python), "-u", "-m", module, "--model", str(model)), None, os.environ)
    assert found.executable == (str(python), "-u", "-m", module)
    assert found.command.model == str(model)


def test_the_plan_in_a_run_directory(prepared: Callable[..., Prepared]) -> None:
    with RunDirectory({"KVGUARD_RUN_DIR": f"/tmp/kvgp-{os.getpid()}"}) as run:
        plan = plan_for(prepared(), run, {}, colour=False)
        assert plan.env["KVGUARD_INSIDE_SECRET_FILE"] == str(run.path / "secret")
        port = int(plan.argv[plan.argv.index("--port") + 1])
        assert 0 < port < 65536
        assert run.secret not in repr(plan)


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (("--headless",), {}, "launch mode headless: not guarded, because a headless rank serves no HTTP"),
        (("--nnodes", "2"), {}, "launch mode several_nodes"),
        ((), {"VLLM_USE_RUST_FRONTEND": "1"}, "launch mode rust_front_end: not guarded, .*; unset VLLM_USE_RUST_FRONTEND"),
        (("--kv-cache-dtype", "fp7"), {}, "does not know the KV cache dtype 'fp7'"),
        (("--calculate-kv-scales",), {}, "removed in 0.28.0; instead"),
        (("--hf-overrides", "{"), {}, "--hf-overrides needs a JSON object"),
        (("--hf-overrides", "7"), {}, "--hf-overrides needs a JSON object, found int"),
        (("--config", "/none.yaml"), {}, "/none.yaml: no such file"),
        (("--config", "/dev/zero.yaml"), {}, "/dev/zero.yaml"),
        (("--model", "other", "--kv-cache", "x"), {}, "ambiguous"),
    ],
)
def test_what_vllm_or_kvguard_would_not_run(
    prepared: Callable[..., Prepared], flags: tuple[str, ...], env: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        prepared(*flags, **env)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no engine command"),
        (("bash", "-c", "true"), "required is `vllm serve"),
        (("/none/vllm", "serve", "m"), "no executable file there"),
        (("VLLM", "bench", "m"), "`vllm bench`: kvguard guards `vllm serve`"),
        (("VLLM",), "kvguard guards `vllm serve`"),
        (("VLLM", "serve"), "no model"),
        (("VLLM", "serve", "/none/such/model"), "/none/such/model"),
        (("VLLM", "snapshot", "m"), "launch mode snapshot"),
    ],
)
def test_commands_that_are_not_started(vllm: Path, words: tuple[str, ...], says: str) -> None:
    argv = tuple(str(vllm) if word == "VLLM" else word for word in words)
    with pytest.raises(UsageError, match=says):
        prepare(argv, None, {**os.environ, "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("config", ["[]", "{", '{"quantization_config": []}', '{"quantization_config": 3}', "\x00"])
def test_a_config_that_is_none(prepared: Callable[..., Prepared], model: Path, config: str) -> None:
    (model / "config.json").write_text(config)
    found = refusal(prepared)
    assert "config.json" in found
    assert "\n" not in found


def test_the_file_limit_is_lifted() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, soft), hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_our_output_is_no_terminal_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stdout_is_terminal()

    def closed(_: int) -> bool:
        raise OSError

    monkeypatch.setattr(os, "isatty", closed)
    assert not stdout_is_terminal()
