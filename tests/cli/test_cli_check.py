"""`kvguard check` and `kvguard inspect --across`: what they print, and how they exit."""

from __future__ import annotations

import json

import pytest
from static_commands import run

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, scales, write
from kvguard.cli import check as module
from kvguard.vocabulary import ExitCode, UsageError


@pytest.fixture
def trap(tmp_path):
    return write(tmp_path / "m", {**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(30)))


@pytest.fixture
def required(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("kv_cache: {dtype: fp8_e4m3, scales: checkpoint}\n")
    return path


def test_allowed(trap, required):
    result = run("check", "--policy", required, "--engine-version", "0.32.0", "--device", "b200", "--", "vllm", "serve", trap)
    assert result.exit_code == ExitCode.CLEAN
    for text in ("KV cache fp8_e4m3, scales checkpoint", "stated as --kv-cache-dtype fp8_e4m3", "kv_scales pass", "allowed"):
        assert text in result.stdout


def test_refused_in_both_forms(trap, required):
    words = ("check", "--policy", required, "--engine-version", "0.32")
    command = ("--", "vllm", "serve", trap, "--kv-cache-dtype", "bfloat16")
    shown = run(*words, *command)
    assert shown.exit_code == ExitCode.POLICY_VIOLATION
    assert "kv_cache_dtype fail" in shown.stdout
    assert "refused" in shown.stdout
    document = run(*words, "--json", *command)
    assert document.exit_code == ExitCode.POLICY_VIOLATION
    report = json.loads(document.stdout)
    assert report["violates"]
    assert report["engine_version"] == "0.32.0"
    assert {one["name"]: one["result"] for one in report["checks"]}["kv_cache_dtype"] == "fail"


def test_warnings_are_shown(trap):
    result = run("check", "--engine-version", "0.26.0", "--", "vllm", "serve", trap, "--calculate-kv-scales")
    assert "warning: --calculate-kv-scales is deprecated" in result.stdout


def test_the_device_is_the_one_that_is_found_here_as_in_inspect(trap, required, tmp_path, monkeypatch):
    words = ("check", "--policy", required, "--engine-version", "0.32.0", "--json")
    command = ("--", "vllm", "serve", trap)
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    alone = json.loads(run(*words, *command).stdout)
    assert alone["device"] is None
    assert "no nvidia-smi" in alone["device_where"]
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-1, Tesla T4, 7.5'\n")
    (tools / "nvidia-smi").chmod(0o755)
    result = run(*words, *command)
    found = json.loads(result.stdout)
    assert (found["device"], found["device_where"]) == ("t4", "nvidia-smi")
    assert result.exit_code == ExitCode.POLICY_VIOLATION
    assert {one["name"]: one["result"] for one in found["checks"]}["start"] == "fail"
    assert "vLLM 0.32.0 on t4 (nvidia-smi): KV cache" in run(*words[:-1], *command).stdout
    none = json.loads(run(*words, "--device", "none", *command).stdout)
    assert (none["device"], none["device_where"]) == (None, "--device none")


@pytest.mark.parametrize(
    ("architecture", "version", "flags", "expected"),
    [
        ("Qwen3_5ForConditionalGeneration", "0.32.0", (), "unknown: "),
        ("LlamaForCausalLM", "0.26.0", ("--calculate-kv-scales",), "runtime_once is expected"),
    ],
)
def test_scales_that_only_the_engine_shows_are_unverified_and_said(tmp_path, required, architecture, version, flags, expected):
    config = {**SMOLLM2, "architectures": [architecture], "quantization_config": {"quant_method": "fp8"}}
    model = write(tmp_path / "model", config, scales(range(30)))
    command = ("vllm", "serve", model, "--kv-cache-dtype", "fp8", *flags)
    result = run("check", "--policy", required, "--engine-version", version, "--device", "none", "--json", "--", *command)
    report = json.loads(result.stdout)
    [one] = [one for one in report["checks"] if one["name"] == "kv_scales"]
    assert (one["result"], one["required"]) == ("unverified", "checkpoint scales")
    assert expected in one["found"]


def test_a_typed_version_is_named_as_typed(trap, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("engine: {version: '<0.30'}\n")
    words = ("check", "--policy", policy, "--engine-version", "0.32", "--json", "--", "vllm", "serve", trap)
    [one] = [one for one in json.loads(run(*words).stdout)["checks"] if one["name"] == "engine_version"]
    assert (one["result"], one["where"], one["found"]) == ("fail", "--engine-version", "vLLM 0.32.0")


def test_bad_commands_are_usage_errors(trap, monkeypatch):
    monkeypatch.setattr(module, "installed_engine", lambda: None)
    for arguments in (
        ("check", "--engine-version", "0.32.0", "--", "vllm", "serve", trap, "--kv-cache-dtype", "fp9"),
        ("check", "--engine-version", "0.32.0", "--", "vllm", "serve", trap / "gone"),
        ("check", "--engine-version", "0.32.0", "--config", "x"),
        ("check", "--engine-version", "0.32.0"),
        ("check", "--", "vllm", "serve", trap),
        ("check", "--engine-version", "0.32.0", "--", "vllm", "serve", trap, "--config", trap / "none.yaml"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, UsageError) or result.exit_code == ExitCode.USAGE, arguments


def test_across(trap):
    command = ("--", "vllm", "serve", trap, "--kv-cache-dtype", "bfloat16")
    result = run("inspect", trap, "--across", "0.16,0.22,0.32", *command)
    assert result.exit_code == 0
    assert "fp8_e4m3 (not as typed)" in result.stdout
    assert "0.16.0 → 0.22.1: KV cache fp8_e4m3 → bfloat16" in result.stdout
    report = json.loads(run("inspect", trap, "--across", "0.16,0.32", "--json", *command).stdout)
    assert [version["dtype"] for version in report["versions"]] == ["fp8_e4m3", "bfloat16"]
    assert report["changes"]


def test_across_without_a_command_serves_the_model_alone(trap):
    result = run("inspect", trap, "--across", "0.14.1, 0.16.0")
    assert "0.14.1 → 0.16.0: KV cache bfloat16 → fp8_e4m3" in result.stdout
    assert "nothing changes" in run("inspect", trap, "--across", "0.30,0.31").stdout
    one = run("inspect", trap, "--engine-version", "0.16.0", "--", "vllm", "serve", trap)
    assert "fp8_e4m3" in one.stdout


def test_across_takes_its_settings_from_the_command(trap):
    for arguments in (
        ("--across", "0.16", "--kv-cache-dtype", "fp8"),
        ("--across", " , "),
        ("--", "vllm", "serve", trap),
    ):
        assert isinstance(run("inspect", trap, *arguments).exception, UsageError), arguments


def test_what_a_sequence_takes(trap):
    report = json.loads(
        run("inspect", trap, "--engine-version", "0.32.0", "--memory", "10GiB", "--context", "4096", "--json").stdout
    )
    wide = next(size for size in report["sizes"] if size["dtype"] == "bfloat16")
    assert wide["sequence_bytes"] == 23_040 * 4096
    assert wide["batch"] == (10 << 30) // (23_040 * 4096)
    shown = run("inspect", trap, "--engine-version", "0.32.0", "--memory", "10GiB", "--context", "4096").stdout
    assert "GB for 4,096 tokens" in shown
    assert "0.094" in shown
