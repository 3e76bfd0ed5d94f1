"""Versions, devices, names and commands that `check`, `inspect` and `attach` cannot answer for: said so, in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from static_commands import run

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, scales, write
from kvguard.checkpoint.declared import declare
from kvguard.engine.checkpoint_files import read_checkpoint
from kvguard.engine.client import check_engine
from kvguard.engine.hub_repository import HubRepository
from kvguard.engine.log_file import LogFile
from kvguard.evidence.prediction import predict
from kvguard.facts.cli_flags import table_for
from kvguard.vocabulary import ExitCode, UsageError

KVGUARD = str(Path(sys.executable).parent / "kvguard")


@pytest.fixture
def plain(tmp_path):
    return write(tmp_path / "m", SMOLLM2, {})


@pytest.fixture
def sixteen(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("kv_cache: {dtype: 16bit}\n")
    return path


def checked(policy, version, *command, device=()):
    result = run("check", "--json", "--policy", policy, "--engine-version", version, *device, "--", "vllm", "serve", *command)
    assert result.stdout, result.exception
    report = json.loads(result.stdout)
    return result.exit_code, report, {one["name"]: one["result"] for one in report["checks"]}


def test_an_unexamined_version_is_unverified(plain, sixteen):
    code, report, results = checked(sixteen, "0.33.0", plain)
    assert code == ExitCode.CLEAN
    assert report["kv_cache_dtype"] == "unknown"
    assert (results["kv_cache_dtype"], results["kv_scales"], results["start"]) == ("unverified",) * 3


def test_a_version_before_the_first_guarded_one_is_refused(plain):
    result = run("check", "--engine-version", "0.10.0", "--", "vllm", "serve", plain)
    assert isinstance(result.exception, UsageError)
    assert "0.11.1" in str(result.exception)


@pytest.mark.parametrize("spelled", ["v0.32.0", " 0.32.0", "0.32.0+cpu"])
def test_spellings_of_a_version(spelled):
    assert table_for(spelled).exact
    assert table_for(spelled) == table_for("0.32.0")


def test_a_device_without_bfloat16(plain, sixteen):
    _, report, results = checked(sixteen, "0.32.0", plain, device=("--device", "t4"))
    assert report["kv_cache_dtype"] == "float16"
    assert results["kv_cache_dtype"] == "pass"
    code, _, results = checked(sixteen, "0.32.0", plain, "--dtype", "bfloat16", device=("--device", "t4"))
    assert (code, results["start"]) == (ExitCode.POLICY_VIOLATION, "fail")


def test_a_config_without_a_dtype(tmp_path):
    bare = {**SMOLLM2, "torch_dtype": None}
    half = {"model.norm.weight": ("F16", [1], b"\0\0")}
    stored = declare(read_checkpoint(str(write(tmp_path / "stored", bare, half))))
    assert predict("0.32.0", None, stored).dtype == "float16"
    assert predict("0.16.0", None, stored).dtype == "unknown"
    vision = declare(
        read_checkpoint(str(write(tmp_path / "vision", {**bare, "vision_config": {"torch_dtype": "bfloat16"}}, half)))
    )
    assert predict("0.32.0", None, vision).dtype == "bfloat16"


@pytest.mark.parametrize("flag", [("--tensor-parallel-size", "abc"), ("--tensor-parallel-size", "0"), ("--port", "99999999")])
def test_numbers_that_the_parser_refuses(plain, flag):
    result = run("check", "--engine-version", "0.32.0", "--", "vllm", "serve", plain, *flag)
    assert isinstance(result.exception, UsageError)
    assert flag[0] in str(result.exception)


def test_a_preview_is_of_one_model_and_of_serve(plain, tmp_path):
    other = write(tmp_path / "other", SMOLLM2, {})
    for arguments in (
        ("--across", "0.32", "--", "vllm", "serve", other),
        ("--across", "0.32", "--", "vllm", "bench", plain),
        ("--across", "0.32", "--engine-version", "0.32.0"),
    ):
        assert isinstance(run("inspect", plain, "--device", "none", *arguments).exception, UsageError), arguments


def test_names_in_a_checkpoint_do_not_reach_the_terminal(tmp_path):
    forged = write(tmp_path / "m", {**SMOLLM2, "architectures": ["\x1b[31mLlama\nForged: line"]}, {})
    result = run("inspect", forged, "--device", "none", "--engine-version", "0.32.0")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert not any(line.startswith("Forged") for line in result.stdout.splitlines())


def test_the_scheme_that_is_stripped_is_said(tmp_path, sixteen):
    trap = write(tmp_path / "m", {**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(30)))
    result = run("check", "--policy", sixteen, "--engine-version", "0.16.0", "--", "vllm", "serve", trap)
    assert "KV scheme is stripped" in result.stdout
    assert "starts with this cache; found bfloat16" in result.stdout


def test_what_is_no_engine(tmp_path):
    (tmp_path / "file").touch()
    for target in ("", "banana", "ftp://host/", str(tmp_path), str(tmp_path / "file"), str(tmp_path / "file" / "s")):
        with pytest.raises(UsageError):
            check_engine(target)
    check_engine(str(tmp_path / "to-come.sock"))
    check_engine("http://127.0.0.1:8000")


def test_a_log_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="not a regular file"):
        LogFile(tmp_path / "fifo")


@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "banana", "http://"])
def test_an_endpoint_that_is_no_address(address):
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        HubRepository("a/b", "main", address)


def test_a_full_device_is_one_line():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([KVGUARD, "engines"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == ExitCode.USAGE
    assert len(done.stderr.splitlines()) == 1
