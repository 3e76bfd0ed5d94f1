import json

import pytest
import typer
from typer.testing import CliRunner

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, f32, scales, write
from kvguard.cli import inspect as module
from kvguard.cli.inspect import inspect
from kvguard.cli.sizes import parse_size
from kvguard.engine.find import Engine
from kvguard.vocabulary import UsageError

app = typer.Typer()


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch, tmp_path_factory):
    """No tools that would name an accelerator, and no engine."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("bin")))
    monkeypatch.setattr(module, "installed_engine", lambda: None)


app.command(context_settings={"allow_extra_args": True})(inspect)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def report(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_smollm2(tmp_path):
    found = report(write(tmp_path, SMOLLM2), "--engine-version", "0.32.0")
    sizes = {size["dtype"]: (size["bytes_per_token"], size["tokens"]) for size in found["sizes"]}
    assert sizes["bfloat16"] == (23_040, 46_603)
    assert sizes["fp8_e4m3"] == (11_520, 93_206)
    assert found["prediction"]["dtype"] == "bfloat16"
    assert found["findings"] == []


def test_tokens_beside_windows_are_those_of_sequences_of_that_length(tmp_path):
    """Half of the layers see 1,024 tokens: a long sequence costs less for each token than a short one."""
    kinds = {"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 15}
    directory = write(tmp_path, {**SMOLLM2, **kinds})

    def tokens(*options):
        found = report(directory, "--engine-version", "0.32.0", *options)
        return next(size["tokens"] for size in found["sizes"] if size["dtype"] == "bfloat16")

    whole, beyond, memory = 23_040, 11_520, 1 << 30
    assert tokens("--context", "1024") == memory // whole
    assert tokens("--context", "8192") == memory * 8192 // (1024 * whole + 7168 * beyond)
    shown = run(directory, "--engine-version", "0.32.0").stdout
    assert "tokens in 1,073,741,824 bytes, in sequences of 8,192" in shown
    plain = run(write(tmp_path / "plain", SMOLLM2), "--engine-version", "0.32.0").stdout
    assert "in sequences of" not in plain


def test_a_scheme_without_scales(tmp_path):
    directory = write(tmp_path, {**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(15)))
    found = report(directory, "--engine-version", "0.32.0", "--memory", "2 GiB")
    assert found["kv_scheme"]["where"] == "config.json: quantization_config.kv_cache_scheme"
    assert found["scales"]["tensors"] == 30
    assert found["scales"]["missing"][0] == "model.layers.15 (k, v)"
    assert (found["prediction"]["dtype"], found["prediction"]["scales"]) == ("fp8_e4m3", "partial")
    assert found["memory_bytes"] == 2 << 30
    assert len(found["findings"]) == 1


def test_the_human_report_says_the_same(tmp_path):
    directory = write(tmp_path, {**SMOLLM2, **COMPRESSED_TENSORS, "kv_cache_dtype": "fp8"}, scales(range(30)))
    result = run(directory, "--engine-version", "0.20.2", "--kv-cache-dtype", "bfloat16")
    assert result.exit_code == 0
    for text in (
        "config.json: quantization_config.kv_cache_scheme",
        "60 tensors (model.safetensors",
        "30 layers, 3 KV heads, 64 head size",
        "23,040",
        "46,603",
        "bfloat16 is not what runs",
        "predicted KV cache:   fp8_e4m3",
        "finding:              config.json: kv_cache_dtype='fp8' is ignored by vLLM",
    ):
        assert text in result.stdout


def test_only_dtypes_of_that_version_are_listed(tmp_path):
    directory = write(tmp_path, SMOLLM2)
    old = [size["dtype"] for size in report(directory, "--engine-version", "0.12.0")["sizes"]]
    assert old == ["bfloat16", "fp8_e4m3", "fp8_e5m2", "fp8_inc"]
    assert "nvfp4" in [size["dtype"] for size in report(directory, "--engine-version", "0.99.0")["sizes"]]


def test_without_an_engine_the_version_is_unknown(tmp_path, monkeypatch):
    directory = write(tmp_path, SMOLLM2)
    assert report(directory)["prediction"] is None
    assert "give --engine-version" in run(directory).stdout
    engine = Engine(
        executable="/e/vllm",
        python="/e/python",
        version="0.32.0",
        package="vllm",
        full_version="0.32.0+cpu",
        python_version="3.11.2",
    )
    monkeypatch.setattr(module, "installed_engine", lambda: engine)
    found = report(directory)
    assert (found["engine_version"], found["device"]["name"]) == ("0.32.0", "cpu")
    assert "device:               cpu (vllm 0.32.0+cpu is a CPU build)" in run(directory).stdout
    assert report(directory, "--device", "none")["device"] is None


def test_the_device_found_here_is_predicted_for(tmp_path, monkeypatch):
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA B200, 10.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    directory = write(tmp_path / "model", SMOLLM2)
    shown = run(directory, "--engine-version", "0.32.0").stdout
    assert "device:               b200 (nvidia-smi)" in shown
    assert "vLLM 0.32.0 on b200:" in shown
    named = report(directory, "--engine-version", "0.32.0", "--device", "t4")
    assert (named["device"]["name"], named["device_where"]) == ("t4", "--device")


def test_no_device_found_is_unknown_and_says_why(tmp_path):
    directory = write(tmp_path, SMOLLM2)
    found = report(directory, "--engine-version", "0.32.0")
    assert found["device"] is None
    assert "no nvidia-smi" in found["device_where"]
    assert "device:               unknown (no nvidia-smi" in run(directory, "--engine-version", "0.32.0").stdout


def test_one_gpu_of_several(tmp_path):
    directory = write(tmp_path, SMOLLM2)
    options = ("--engine-version", "0.32.0", "--tensor-parallel-size", "6", "--data-parallel-size", "2")
    found = report(directory, *options)
    assert found["ranks"] == {"tensor": 6, "pipeline": 1, "data": 2, "gpus": 12}
    wide = next(size for size in found["sizes"] if size["dtype"] == "bfloat16")
    # Three KV heads on six ranks: each rank stores one, so each head is stored twice.
    assert (wide["bytes_per_token"], wide["bytes_per_token_per_gpu"]) == (23_040, 7_680)
    assert wide["tokens"] == 2 * ((1 << 30) // 7_680)
    assert wide["sequence_bytes_per_gpu"] == 8192 * 7_680
    assert wide["batch"] == 2 * ((1 << 30) // (8192 * 7_680))
    shown = run(directory, *options).stdout
    assert "on one GPU" in shown
    assert "tokens in 1,073,741,824 bytes a GPU" in shown
    assert "on one GPU" not in run(directory, "--engine-version", "0.32.0").stdout


def test_ranks_that_are_not_modelled_are_unknown(tmp_path):
    directory = write(tmp_path, SMOLLM2)
    options = ("--engine-version", "0.32.0", "--tensor-parallel-size", "2")
    wide = next(size for size in report(directory, *options)["sizes"] if size["dtype"] == "bfloat16")
    assert (wide["bytes_per_token_per_gpu"], wide["tokens"], wide["batch"]) == (None, None, None)
    assert "unknown" in run(directory, *options).stdout


def test_windows_need_room_for_what_is_computed(tmp_path):
    directory = write(tmp_path, {**SMOLLM2, "sliding_window": 1024})
    options = ("--engine-version", "0.32.0", "--context", "8192")
    plain, more = (report(directory, *options, "--batched-tokens", str(count))["sizes"][0] for count in (0, 2048))
    assert plain["sequence_bytes"] == 1024 * plain["bytes_per_token"]
    assert more["sequence_bytes"] == (1024 + 2048) * more["bytes_per_token"]


def test_bad_input_is_a_usage_error(tmp_path):
    write(tmp_path, "{")
    for arguments in ((tmp_path / "gone",), (tmp_path,), (tmp_path, "--memory", "lots")):
        result = run(*arguments, "--engine-version", "0.32.0")
        assert isinstance(result.exception, UsageError)
        assert result.exception.exit_code == 2


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 1 << 30), ("512 MiB", 512 << 20), ("10GB", 10**10), ("1.5gib", 3 << 29), ("4096", 4096)]
)
def test_sizes(text, size):
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "0", "GiB", "-1GiB", "1 ib", "1e9", "1GiB x", "0.0001b", "9" * 30])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="--memory"):
        parse_size(text, "--memory")


def test_the_device_decides_and_is_named(tmp_path):
    directory = write(tmp_path, {**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(30)))
    found = report(directory, "--engine-version", "0.32.0", "--device", "t4")
    assert found["device"] == {"name": "t4", "platform": "cuda", "capability": "7.5", "architecture": ""}
    assert found["prediction"]["fails"]
    shown = run(directory, "--engine-version", "0.32.0", "--device", "h100").stdout
    assert "vLLM 0.32.0 on h100:" in shown
    assert "its log will say:     auto, as will its metrics" in shown
    assert isinstance(run(directory, "--device", "abacus").exception, UsageError)


def test_overrides_and_producers_are_shown(tmp_path):
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.44.0"}}
    scheme = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
    directory = write(tmp_path, {**SMOLLM2, "quantization_config": {**block, **scheme}})
    found = report(directory, "--engine-version", "0.32.0")
    assert (found["producer"], found["prediction"]["dtype"]) == ("modelopt 0.44.0", "fp8_e4m3")
    assert any("intends" in finding for finding in found["findings"])
    assert "quantization:         modelopt, by modelopt 0.44.0" in run(directory, "--engine-version", "0.32.0").stdout
    bare = json.dumps({"quantization_config": block})
    assert report(directory, "--engine-version", "0.32.0", "--hf-overrides", bare)["prediction"]["dtype"] == "bfloat16"
    assert isinstance(run(directory, "--hf-overrides", "[").exception, UsageError)


def test_cautions_are_shown(tmp_path):
    directory = write(tmp_path, {**SMOLLM2, "architectures": ["Qwen2ForCausalLM"]})
    options = ("--engine-version", "0.32.0", "--kv-cache-dtype", "fp8")
    assert [caution["id"] for caution in report(directory, *options)["cautions"]] == ["fragile_at_unit_scale"]
    assert "caution:              this architecture is reported" in run(directory, *options).stdout
    assert report(directory, "--engine-version", "0.32.0")["cautions"] == []


def test_scales_for_each_head_are_said_so(tmp_path):
    heads = {f"model.layers.{n}.self_attn.{side}_scale": f32(0.1, 0.2, 0.3) for n in range(30) for side in "kv"}
    directory = write(tmp_path, {**SMOLLM2, **COMPRESSED_TENSORS}, heads)
    assert report(directory, "--engine-version", "0.32.0")["scales"]["per_head"]
    assert "one scale for each head" in run(directory, "--engine-version", "0.32.0").stdout


def test_which_8_bit_cache_to_try(tmp_path):
    directory = write(tmp_path, SMOLLM2)
    options = ("--engine-version", "0.32.0", "--device", "a100")
    assert report(directory, *options)["first_choice"]["dtype"] == "int8_per_token_head"
    assert "8-bit cache to try:   int8_per_token_head: fp8_e4m3:" in run(directory, *options).stdout
    assert "8-bit cache" not in run(directory, "--engine-version", "0.32.0").stdout
