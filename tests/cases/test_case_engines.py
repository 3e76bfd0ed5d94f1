"""Cases about what is typed, and about what log, metrics and answers of an engine say."""

from __future__ import annotations

import pytest

from case_fakes import after, before, checkpoint, on, said, seen
from checkpoint_fakes import scales
from kvguard.engine.canary import Canary, canary_check, examine
from kvguard.engine.resolve import check_typed
from kvguard.evidence.cache_size import kv_tokens, measure
from kvguard.evidence.log import read_log
from kvguard.evidence.metrics import claims, gauges, parse_metrics
from kvguard.evidence.scales import classify_scales
from kvguard.evidence.tensors import parse_replies
from kvguard.facts.cautions import cautions
from kvguard.facts.changing_requests import changing_request
from kvguard.facts.failures import known_failure
from kvguard.facts.kv_dtypes import calculate_kv_scales_status
from kvguard.facts.metric_names import series_names
from kvguard.vocabulary import CheckResult, Confidence, Effective, ExitCode, ScaleState, UsageError
from launches import command

FP8 = "kv_cache: {dtype: fp8_e4m3}"


def figures(page: str):
    return gauges(parse_metrics(page), Effective(), None)


# --- what is typed ---


def test_26_a_flag_that_went_long_ago():
    for version in ("0.20.2", "0.32.0", "0.33.0"):
        with pytest.raises(UsageError, match=r"--quantization-param-path.*removed before 0\.8\.5; instead, vLLM reads"):
            command("--kv-cache-dtype", "fp8", "--quantization-param-path", "s.json", version=version)


def test_39_the_flag_that_calculates_scales():
    argv = ("--kv-cache-dtype", "fp8", "--calculate-kv-scales")
    (warning,) = [text for text in command(*argv, version="0.26.0").warnings if "deprecated" in text]
    assert "first batch" in warning
    assert not [text for text in command(*argv, version="0.18.1").warnings if "deprecated" in text]
    assert calculate_kv_scales_status("0.26.0") == "deprecated"
    with pytest.raises(UsageError, match=r"removed in 0\.28\.0") as refused:
        command(*argv, version="0.28.0")
    assert refused.value.exit_code == ExitCode.USAGE


def test_44_e5m2_is_not_e4m3():
    vision = checkpoint(architectures=["Qwen2_5_VLForConditionalGeneration"])
    found = on("0.19.1", vision, "fp8_e5m2")
    assert found.dtype == "fp8_e5m2"
    assert before(FP8, vision, "--kv-cache-dtype", "fp8_e5m2", version="0.19.1")["kv_cache_dtype"].result is CheckResult.FAIL
    (caution,) = cautions("0.19.1", "fp8_e5m2", found.scales.value, architecture=vision.architecture, mla=False)
    assert caution.id == "e5m2_vision"


def test_45_int8_is_no_value_and_per_token_heads_are():
    with pytest.raises(UsageError, match="does not know the KV cache dtype 'int8'"):
        check_typed(command("--kv-cache-dtype", "int8"), "0.32.0")
    with pytest.raises(UsageError, match=r"0\.20\.0\.\.0\.32\.0 does"):
        check_typed(command("--kv-cache-dtype", "int8_per_token_head", version="0.18.1"), "0.18.1")
    found = on("0.20.2", checkpoint(), "int8_per_token_head")
    assert (found.dtype, found.scales) == ("int8_per_token_head", ScaleState.RUNTIME_DYNAMIC)
    line = (
        "(APIServer pid=7) INFO 07-08 09:10:11 [cache.py:9] Using int8_per_token_head data type to store kv cache. It reduces "
    )
    line += "the GPU memory footprint and boosts the performance. Dynamic per-token-head scales will be computed at runtime.\n"
    assert [claim.value for claim in said(line, version="0.32.0")["kv_cache_dtype"]] == ["int8_per_token_head"]


def test_54_underscores_in_a_flag():
    typed = command("--kv-cache-dtype", "fp8", "--kv_cache_dtype_skip_layers", "sliding_window")
    assert typed.values("--kv-cache-dtype-skip-layers") == ("sliding_window",)


# --- why it did not start ---


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            '(Worker_TP1 pid=7) ERROR 09-10 11:12:13 [multiproc_executor.py:9] ValueError("type fp8e4nv not supported in this '
            "architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')\")",
            "gpu_lacks_e4m3",
        ),
        (
            "(Worker_TP0 pid=7) ERROR 08-09 10:11:12 [multiproc_executor.py:9] AssertionError: DeepseekV4 fp8_ds_mla "
            "layout only supports fp8 kv-cache, got auto",
            "packed_mla_needs_fp8",
        ),
        (
            "(EngineCore pid=7) ERROR 08-09 10:11:12 [core.py:9] RuntimeError: "
            "FlashAttention only support fp16 and bf16 data type",
            "flash_attention_dtype",
        ),
    ],
)
def test_08_50_57_known_causes_of_a_failed_start(line, cause):
    end = "(APIServer pid=7) ERROR 08-09 10:11:12 [core.py:9] RuntimeError: Engine core initialization failed. "
    end += "See root cause above.\n"
    log = read_log((line + "\n" + end).encode())
    shown = log.cause_of_death() or log.last_errors()[-1]
    assert cause in shown
    assert "instead: " in shown
    assert known_failure(shown).id == cause
    assert ExitCode.ENGINE_FAILED_TO_START != ExitCode.POLICY_VIOLATION


def test_08_the_same_is_foreseen_where_the_device_is_named():
    found = on("0.32.0", checkpoint(), "fp8", "rtx3090")
    assert found.dtype == "unknown"
    assert "fp8e4nv" in found.reason
    assert "FLASHINFER" in found.reason


def test_46_storage_and_computing_are_two_things():
    line = (
        "(Worker_TP0 pid=7) INFO 07-08 09:10:11 [flashinfer.py:9] FlashInfer resolved query dtypes: prefill=torch.bfloat16, "
        "decode=torch.bfloat16, decode_backend=flashinfer-native, kv_cache_dtype=torch.float8_e4m3fn, arch=sm86\n"
    )
    found = said(line, version="0.26.0")
    assert [claim.value for claim in found["kv_cache_dtype"]] == ["fp8_e4m3"]
    assert [claim.value for claim in found["query_dtype"]] == ["bfloat16"]


def test_49_an_fp8_cache_changes_the_attention_backend():
    old = said(
        "INFO 09-10 11:12:13 [cuda.py:9] Cannot use FlashAttention backend for FP8 KV cache.\n"
        "INFO 09-10 11:12:13 [cuda.py:9] Using XFormers backend.\n"
    )
    assert [claim.value for claim in old["attention_backend"]] == ["XFORMERS"]
    (changed,) = old["attention_backend_changed"]
    assert "not the dtype's alone" in changed.note
    chosen = (
        "(Worker pid=7) INFO 05-06 07:08:09 [cuda.py:9] Using {} attention backend out of potential backends: ['A', 'B'].\n"
    )
    backends = [said(chosen.format(name))["attention_backend"][0].value for name in ("FLASHINFER", "FLASH_ATTN")]
    assert backends == ["FLASHINFER", "FLASH_ATTN"]


# --- what answers show ---


def test_41_one_token_repeated_is_a_failure_at_once():
    tokens = ["token_id:0"] * 32
    problem = examine(tokens, [-0.1] * 32)
    assert "one token repeated 32 times" in problem
    check = canary_check((Canary(name="completion", problem=problem),), dummy_weights=False)
    assert check.result is CheckResult.FAIL
    assert "check scales" in check.action


def test_50_a_failing_first_request_is_not_excused_by_health():
    check = canary_check((Canary(name="completion", problem="HTTP 500"),), dummy_weights=False)
    assert check.result is CheckResult.FAIL


def test_56_several_turns_are_judged_by_themselves():
    good, garbled = Canary(name="completion"), Canary(name="chat", problem="one token repeated 12 times (!)")
    check = canary_check((good, garbled), dummy_weights=False)
    assert check.result is CheckResult.FAIL
    assert check.found == "chat: one token repeated 12 times (!)"
    found = cautions("0.18.1", "fp8_e4m3", "unit_default", architecture="Glm4MoeLiteForCausalLM", mla=True)
    assert [caution.id for caution in found] == ["mla_fp8_turns"]


# --- capacity ---


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("INFO 11-12 13:14:15 gpu_executor.py:9] # GPU blocks: 1500, # CPU blocks: 2048", 24_000),
        ("INFO 04-05 06:07:08 [kv_cache_utils.py:9] GPU KV cache size: 120,320 tokens", 120_320),
        ("(EngineCore pid=7) INFO 07-08 09:10:11 [kv_cache_utils.py:9] GPU KV cache size: 215,040 tokens", 215_040),
        (
            "(EngineCore pid=7) INFO 11-12 13:14:15 [kv_cache_utils.py:9] CPU KV cache size: 93,184 tokens, Maximum "
            "concurrency for 1,024 tokens per request: 91.00x",
            93_184,
        ),
    ],
)
def test_62_four_ways_to_say_how_many_tokens(line, tokens):
    (claim,) = said(line + "\n")["kv_tokens"]
    assert claim.value == tokens


def test_63_bytes_per_token_from_a_log():
    log = (
        "INFO [gpu_worker.py:9] Available KV cache memory: 10.55 GiB\n"
        "INFO [kv_cache_utils.py:9] GPU KV cache size: 230,528 tokens\n"
    )
    ours = read_log(log.encode()).claims("0.11.2")
    reading = measure(tensors=None, metrics_claims=(), log_claims=ours, geometry=None, ranks=1)
    assert reading.bytes_per_token == pytest.approx(49_141, abs=5)
    assert reading.width is None
    # How many ranks there are is not guessed: half of a 16-bit cache looks like a whole 8-bit one.
    assert measure(tensors=None, metrics_claims=(), log_claims=ours, geometry=None).bytes_per_token is None


def test_64_counting_graphs_is_a_note():
    line = (
        "(EngineCore pid=7) INFO 06-07 08:09:10 [gpu_worker.py:9] CUDA graph memory profiling is enabled (default since "
        "v0.21.0). The current --gpu-memory-utilization=0.6200 is equivalent to --gpu-memory-utilization=0.5413 without it.\n"
    )
    (claim,) = said(line, version="0.22.0")["kv_memory_profiling_counts_graphs"]
    assert "the cache is smaller" in claim.note
    assert seen(line, version="0.22.0").dtype == "unknown"


def test_69_a_stale_block_size_makes_no_tokens():
    log = "(Worker pid=7) INFO 05-06 07:08:09 [interface.py:9] Setting attention block size to 528 tokens to ensure that x\n"
    page = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="900"} 1.0\n'
    tokens, why = kv_tokens(claims(parse_metrics(page)), read_log(log.encode()).claims("0.20.2"))
    assert tokens is None
    assert "says 16" in why
    assert "says 528" in why
    both = log + "(EngineCore pid=7) INFO 05-06 07:08:09 [kv_cache_utils.py:9] GPU KV cache size: 475,200 tokens\n"
    assert kv_tokens(claims(parse_metrics(page)), read_log(both.encode()).claims("0.20.2"))[0] == 475_200


# --- metrics ---


def test_60_a_negative_share_is_no_share():
    found = figures('vllm:kv_cache_usage_perc{engine="3",model_name="m"} -0.25\nvllm:num_requests_running{engine="3"} 2.0\n')
    assert found.kv_pinned_ratio is None
    assert found.running == 2
    mixed = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} -0.25\n'
    assert figures(mixed).kv_pinned_ratio is None


@pytest.mark.parametrize(
    ("page", "share"),
    [
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.37\n', 0.37),
        ('vllm:gpu_cache_usage_perc{engine="0"} 0.37\nvllm:kv_cache_usage_perc{engine="0"} 0.37\n', 0.37),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.37\n', 0.37),
        ("# nothing\n", None),
    ],
)
def test_65_a_renamed_gauge_is_read_once_or_unknown(page, share):
    assert figures(page).kv_pinned_ratio == share


def test_65_names_by_version():
    assert series_names("kv_pinned_ratio", "0.8.5") == ("vllm:gpu_cache_usage_perc",)
    assert len(series_names("kv_pinned_ratio", "0.10.2")) == 2
    assert series_names("kv_pinned_ratio", "0.14.1") == ("vllm:kv_cache_usage_perc",)


def test_67_preemptions_are_read():
    assert figures('vllm:num_preemptions_total{engine="0"} 143.0\n').preemptions_total == 143
    assert figures('vllm:num_preemptions_total{engine="0"} 0.0\n').preemptions_total == 0
    assert figures("# nothing\n").preemptions_total is None


def test_96_only_foreign_series_leave_everything_unknown():
    page = "# only foreign series\nfoo_total 1\n"
    assert parse_metrics(page).engines is None
    assert claims(parse_metrics(page)) == ()
    found = seen(page=page, version="0.32.0")
    assert (found.dtype, found.confidence) == ("unknown", Confidence.UNKNOWN)
    checks = after(FP8, found)
    assert checks["kv_cache_dtype"].result is CheckResult.UNVERIFIED


# --- waking ---


def test_30_the_requests_that_put_to_sleep_and_wake_are_known_as_changes():
    """After one the evidence is read again, or waits until the engine is awake."""
    effects = {path: getattr(changing_request(path), "effect", None) for path in ("/sleep", "/api/wake_up", "/v1/completions")}
    assert effects == {"/sleep": "asleep", "/api/wake_up": "changed", "/v1/completions": None}


def test_30_after_waking_device_scales_of_one_are_invalid():
    """What 0.12.0..0.28.0 leave behind: 1.0 on the device, the loaded values on the host."""
    woken = {
        "name": "model.layers.0.self_attn.attn",
        "class": "Attention",
        "backend": "FLASHINFER",
        "kv_cache_dtype": "fp8",
        "tensor_dtype": "torch.uint8",
        "shape": [8, 2, 16, 2, 64],
        "k_scale": [1.0],
        "v_scale": [1.0],
        "q_scale": [1.0],
        "k_scale_float": 0.05,
        "v_scale_float": 0.02,
        "q_scale_float": 1.0,
        "sliding_window": None,
        "num_kv_heads": 2,
        "head_size": 64,
        "error": None,
    }
    rank = {
        "nonce": "n0nce",
        "rank": 0,
        "tp_rank": 0,
        "pp_rank": 0,
        "dp_rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "pid": 7,
        "engine_version": "0.20.2",
        "error": None,
        "model_dtype": "bfloat16",
        "cache_dtype_config": "fp8",
        "kv_bytes": 16384,
        "num_blocks": 8,
        "block_size": 16,
        "layers": [woken],
    }
    reading = parse_replies({"replies": [rank], "expected_ranks": 1}, "n0nce")
    state, detail = classify_scales(reading, checkpoint({"quant_method": "fp8"}, scales(range(4))), False)
    assert state is ScaleState.INVALID
    assert "1.0 on the device and 0.05 on the host" in detail
