"""What the engine's log says, in every form it has had."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.evidence.log import MAX_LINE, LogReader, read_log
from kvguard.vocabulary import Claim, Stage

SAMPLES = Path(__file__).parent / "samples"
HEAD = "(EngineCore pid=7) INFO 11-29 13:15:48 [x.py:1] "
SIZE_LINE = HEAD + "CPU KV cache size: 93,184 tokens, Maximum concurrency for 2,048 tokens per request: 45.50x"
STORE = "data type to store kv cache. It reduces the GPU memory footprint and boosts the performance. Meanwhile, it may"


def sample(name: str) -> bytes:
    return (SAMPLES / f"{name}.log").read_bytes()


def claims(text: str | bytes, version: str | None = None) -> tuple[Claim, ...]:
    return read_log(text.encode() if isinstance(text, str) else text).claims(version)


def observed(text: str | bytes, field: str, version: str | None = None) -> list[Any]:
    found = claims(text, version)
    return [claim.value for claim in found if claim.field == field and claim.stage is Stage.OBSERVED]


@pytest.mark.parametrize(
    ("name", "dtypes", "tokens"),
    [
        ("plain", [None], 46592),
        ("scheme-with-scales", [None], 93184),
        ("plain-fp8", ["fp8_e4m3", "fp8_e4m3"], 93184),
        ("modelopt", ["fp8_e4m3", "fp8_e4m3"], 93184),
    ],
)
def test_real_logs_of_0_32(name: str, dtypes: list[str | None], tokens: int) -> None:
    text = sample(name)
    assert observed(text, "kv_cache_dtype") == dtypes
    assert observed(text, "kv_tokens") == [tokens]
    assert observed(text, "kv_memory_bytes") == [1024**3]
    assert set(observed(text, "engine_version")) == {"0.32.0"}
    assert observed(text, "tensor_parallel_size") == [1]
    assert observed(text, "pipeline_parallel_size") == [1]
    assert observed(text, "model_dtype") == ["bfloat16"]


def test_auto_is_no_information() -> None:
    (claim,) = [c for c in claims(sample("scheme-with-scales")) if c.field == "kv_cache_dtype"]
    assert claim.value is None
    assert claim.note.startswith("auto: no information")
    assert claim.where == "engine log line 6 (file, EngineCore)"


def test_the_arguments_are_what_was_asked_for() -> None:
    asked = [c for c in claims(sample("plain-fp8")) if c.stage is Stage.REQUESTED]
    assert [(c.field, c.value) for c in asked] == [("kv_cache_dtype", "fp8_e4m3")]
    assert not [c for c in claims(sample("modelopt")) if c.stage is Stage.REQUESTED]


def test_both_scale_warnings_of_one_load_are_kept() -> None:
    assert observed(sample("modelopt"), "scales_warning") == ["q scale absent", "unit scales"]


@pytest.mark.parametrize(
    ("line", "version", "dtype"),
    [
        (f"INFO 04-02 10:00:00 [config.py:1403] Using fp8 {STORE}", "0.8.5", "8-bit"),
        (f"(APIServer pid=1) INFO 01-10 09:00:00 [cache.py:207] Using fp8 {STORE}", "0.14.1", "8-bit"),
        (f"(APIServer pid=1) INFO 01-10 09:00:00 [cache.py:361] Using fp8 {STORE}", "0.32.0+cpu", "fp8_e4m3"),
        (f"(APIServer pid=1) INFO 01-10 09:00:00 [cache.py:361] Using fp8 {STORE}", None, "8-bit"),
        (f"(APIServer pid=1) INFO 01-10 09:00:00 [cache.py:361] Using fp8_e5m2 {STORE}", "0.32.0", "fp8_e5m2"),
        (f"(APIServer pid=1) INFO 01-10 09:00:00 [cache.py:361] Using nvfp4 {STORE}", "0.99.0", "nvfp4"),
        (HEAD + "Using custom fp8 kv-cache format for DeepSeekV3.2", "0.11.1", "fp8_ds_mla"),
        (HEAD + "Using DeepSeek's fp8_ds_mla KV cache format. To use standard fp8", "0.18.0", "fp8_ds_mla"),
        (HEAD + "Using nvfp4_ds_mla KV cache format for FLASHMLA_SPARSE backend.", "0.30.0", "nvfp4_ds_mla"),
        (HEAD + "CPU backend doesn't support fp8_e4m3 KV cache type, cast to fp8_e5m2.", "0.9.0", "fp8_e5m2"),
        (HEAD + "CPU backend doesn't support KV cache quantization fallback to auto.", "0.12.0", None),
        (
            HEAD + "FlashInfer resolved query dtypes: prefill=torch.bfloat16, decode=torch.bfloat16, "
            "decode_backend=native, kv_cache_dtype=torch.float8_e4m3fn, arch=sm86",
            "0.25.0",
            "fp8_e4m3",
        ),
    ],
)
def test_dtype_lines(line: str, version: str | None, dtype: str | None) -> None:
    assert observed(line, "kv_cache_dtype", version) == [dtype]


def test_a_draft_model_has_a_dtype_line_of_its_own() -> None:
    text = f"(EngineCore pid=7) INFO 11-29 13:15:48 [cache.py:361] Using fp8_e5m2 {STORE}"
    assert observed(text, "kv_cache_dtype", "0.32.0") == []
    assert observed(text, "draft_kv_cache_dtype", "0.32.0") == ["fp8_e5m2"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("INFO 11-14 10:00:00 gpu_executor.py:122] # GPU blocks: 1952, # CPU blocks: 2048", 31232),
        ("INFO 04-02 10:00:00 [kv_cache_utils.py:634] GPU KV cache size: 230,528 tokens", 230528),
        ("(EngineCore pid=9) INFO 07-09 10:00:00 [kv_cache_utils.py:2146] GPU KV cache size: 415,872 tokens", 415872),
        (SIZE_LINE, 93184),
        ("INFO [kv_cache_utils.py:864] GPU KV cache size: 230,528 tokens", 230528),
        ("GPU + host KV cache size: 1,024 tokens, Maximum concurrency for 2,048 tokens per request: 1.0x", 1024),
    ],
)
def test_capacity_in_its_forms(text: str, tokens: int) -> None:
    assert observed(text, "kv_tokens") == [tokens]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (HEAD + "Available KV cache memory: 10.00 GiB", 10 * 1024**3),
        (HEAD + "Available KV cache memory: 10.55 GiB", int(10.55 * 1024**3)),
        (HEAD + "Explicitly set (1.0/8.59) GiB for KV cache on node 0.", 1024**3),
        (
            HEAD + "Applying persisted startup plan (fingerprint ab): kv_cache_memory_bytes=123456 (0.00 GiB), recorded",
            123456,
        ),
    ],
)
def test_memory_lines(text: str, size: int) -> None:
    assert observed(text, "kv_memory_bytes") == [size]


@pytest.mark.parametrize(
    ("text", "version", "backend"),
    [
        (
            HEAD + "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
            "0.32.0",
            "FLASH_ATTN",
        ),
        (HEAD + "Using AttentionBackendEnum.TRITON_ATTN backend.", "0.13.0", "TRITON_ATTN"),
        (HEAD + "Using Flash Attention backend on V1 engine.", "0.10.2", "FLASH_ATTN"),
        (HEAD + "Using XFormers backend.", "0.9.2", "XFORMERS"),
        (HEAD + "Using Torch SDPA backend.", "0.9.2", "TORCH_SDPA"),
    ],
)
def test_backend_lines(text: str, version: str, backend: str) -> None:
    assert observed(text, "attention_backend", version) == [backend]


def test_layer_lines_name_the_layer() -> None:
    text = HEAD + "Layer model.layers.0.self_attn.attn: kv_cache_dtype=auto, sliding_window=None"
    assert observed(text, "layer_kv_cache_dtype") == [{"layer": "model.layers.0.self_attn.attn", "kv_cache_dtype": "auto"}]


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "INFO 11-29 13:15:48 [cache.py:1] ",
        "(Worker_TP0 pid=12) INFO 11-29 13:15:48 [cache.py:1] ",
        "\x1b[1;36m(EngineCore_DP0 pid=12)\x1b[0;0m INFO 11-29 13:15:48 [cache.py:1] ",
        "(VllmWorker rank=1 pid=12) WARNING 11-29 13:15:48 [model_executor/.../cache.py:1] ",
        "prod-a | \x1b[32mINFO\x1b[0m 11-29 13:15:48.123 [cache.py:1] ",
    ],
)
def test_prefixes_and_colours(prefix: str) -> None:
    assert observed(prefix + "GPU KV cache size: 1,024 tokens", "kv_tokens") == [1024]


def test_json_records() -> None:
    record = {"levelname": "INFO", "processName": "EngineCore", "message": "CPU KV cache size: 64 tokens, Maximum"}
    (claim,) = claims(json.dumps(record))
    assert (claim.field, claim.value, claim.where) == ("kv_tokens", 64, "engine log line 1 (file, EngineCore)")
    assert claims('{"message": {"a": 1}}') == ()
    assert claims("{" * 5000 + " KV cache size: " + "}" * 5000) == ()


def test_quoted_requests_are_not_the_engine_speaking() -> None:
    text = "(APIServer pid=1) INFO 11-29 13:15:48 [logger.py:60] GPU KV cache size: 1 tokens"
    assert claims(text) == ()
    assert claims(HEAD + "Received request: prompt: 'GPU KV cache size: 1 tokens'") == ()


def test_a_name_inside_quotes_is_not_the_setting() -> None:
    text = HEAD + "Initializing a V1 LLM engine (v0.32.0) with config: model='a, kv_cache_dtype=fp8', kv_cache_dtype=auto,"
    assert observed(text, "kv_cache_dtype") == [None]


def test_a_line_from_another_version_is_marked() -> None:
    (claim,) = claims(HEAD + "Using custom fp8 kv-cache format for DeepSeekV3.2", "0.32.0")
    assert claim.note == "not a line that 0.32.0 is known to print"


def test_carriage_returns_end_lines_but_do_not_count() -> None:
    text = "Loading: 0%\rLoading: 50%\r" + SIZE_LINE + "\r\n" + HEAD + "Using Torch SDPA backend\n"
    assert [c.where for c in claims(text)] == [
        "engine log line 1 (file, EngineCore)",
        "engine log line 2 (file, EngineCore)",
    ]


def test_half_a_line_says_nothing_yet() -> None:
    reader = LogReader()
    reader.feed("stdout", b"GPU KV cache size: 93")
    assert reader.claims() == ()
    reader.feed("stdout", b",184 tokens\n")
    assert [claim.value for claim in reader.claims()] == [93184]


def test_a_line_without_end_is_cut() -> None:
    reader = LogReader()
    for _ in range(40):
        reader.feed("stdout", b"x" * 10_000)
    reader.feed("stdout", b" GPU KV cache size: 1 tokens\nGPU KV cache size: 2 tokens\n")
    assert [claim.value for claim in reader.claims()] == [2]
    assert len(reader._streams["stdout"].pending) <= MAX_LINE


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (
            "usage: vllm serve\nvllm serve: error: unrecognized arguments: --calculate-kv-scales\n",
            ("unrecognized arguments: --calculate-kv-scales",),
        ),
        (
            "(EngineCore pid=2) ERROR 11-29 10:00:00 [core.py:1] EngineCore failed to start.\n"
            "(EngineCore pid=2) ERROR 11-29 10:00:00 [core.py:1] Traceback (most recent call last):\n"
            '(EngineCore pid=2) ERROR 11-29 10:00:00 [core.py:1]   File "/x/core.py", line 5, in run\n'
            "(EngineCore pid=2) ERROR 11-29 10:00:00 [core.py:1]     raise ValueError\n"
            "(EngineCore pid=2) ERROR 11-29 10:00:00 [core.py:1] ValueError: fp8_e5m2 kv-cache is not supported\n"
            "(EngineCore pid=2) ValueError: fp8_e5m2 kv-cache is not supported\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
            ("EngineCore failed to start.", "ValueError: fp8_e5m2 kv-cache is not supported"),
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig\n",
            ("pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig",),
        ),
        ("INFO 11-29 10:00:00 [a.py:1] RuntimeError handling enabled: yes\nall good\n", ()),
    ],
)
def test_last_errors(text: str, errors: tuple[str, ...]) -> None:
    assert read_log(text.encode()).last_errors() == errors


def test_only_the_last_errors_are_kept() -> None:
    text = "".join(f"ValueError: number {number}\n" for number in range(5000))
    assert read_log(text.encode()).last_errors() == tuple(f"ValueError: number {n}" for n in range(4995, 5000))


def test_two_threads_may_feed() -> None:
    reader = LogReader()

    def run(stream: str) -> None:
        for _ in range(200):
            reader.feed(stream, SIZE_LINE.encode() + b"\n")

    threads = [threading.Thread(target=run, args=(name,)) for name in ("stdout", "stderr")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [claim.value for claim in reader.claims()] == [93184]


LINES = st.sampled_from(
    [
        SIZE_LINE,
        HEAD + "Available KV cache memory: 10.00 GiB",
        f"INFO 01-10 09:00:00 [cache.py:361] Using fp8_e4m3 {STORE}",
        HEAD + "Initializing a V1 LLM engine (v0.32.0) with config: model='/m', dtype=torch.bfloat16, kv_cache_dtype=auto,",
        "vllm serve: error: unrecognized arguments: --x",
        "ValueError: é",
        '{"message": "GPU KV cache size: 5 tokens"}',
    ]
)
ENDS = st.sampled_from(["\n", "\r", "\r\n", ""])


@given(
    st.lists(st.tuples(LINES | st.text(max_size=40), ENDS).map(lambda t: (t[0] + t[1]).encode()) | st.binary(max_size=60)),
    st.lists(st.integers(0, 4000), max_size=12),
)
def test_splits_do_not_matter(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    whole = read_log(data, "stdout")
    pieces = LogReader()
    last = 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        pieces.feed("stdout", data[last:cut])
        last = cut
    pieces.close("stdout")
    assert pieces.claims() == whole.claims()
    assert pieces.last_errors() == whole.last_errors()


@given(st.binary(max_size=300), st.sampled_from(["0.8.5", "0.32.0", "0.99", "not a version", None]))
def test_any_bytes_are_read(data: bytes, version: str | None) -> None:
    reader = read_log(b"(EngineCore pid=1) ERROR 11-29 10:00:00 [a.py:1] KV cache" + data)
    for claim in reader.claims(version):
        claim.model_dump_json()


def test_the_cause_of_death_is_the_process_that_died_and_not_what_followed() -> None:
    text = (
        "(EngineCore pid=2) ERROR 11-29 16:00:00 [multiproc_executor.py:260] Worker proc VllmWorker-0 died unexpectedly.\n"
        "(APIServer pid=1) ERROR 11-29 16:00:01 [serving.py:9] Error in completion stream generator.\n"
    )
    log = read_log(text.encode())
    assert "VllmWorker-0 died unexpectedly" in log.cause_of_death()
    assert "stream generator" in log.last_errors()[-1]
    assert read_log(b"(APIServer pid=1) INFO 11-29 16:00:00 [x.py:1] fine\n").cause_of_death() == ""
