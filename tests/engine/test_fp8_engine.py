"""A plain checkpoint under an fp8 policy: made fp8, proven, served; then its engine core is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import httpx
import openai
import pytest

from guarded import Guarded, Reader, stream
from kvguard.vocabulary import ExitCode

POLICY = """
kv_cache:
  dtype: fp8_e4m3
  scales: unit
  min_confidence: proven
"""


@pytest.fixture(scope="module")
def served(guarded: Callable[..., Guarded]) -> Guarded:
    return guarded("plain", policy=POLICY).wait_ready()


def test_the_plan_states_the_dtype_and_the_tensors_prove_it(served: Guarded) -> None:
    assert "change   --kv-cache-dtype fp8_e4m3" in served.err
    effective = served.effective()
    assert (effective.dtype, effective.confidence, effective.scales) == ("fp8_e4m3", "proven", "unit_default")
    assert effective.attention_backends == ("CPU_ATTN",)
    layers = served.record()["predicate"]["layers"]
    assert len(layers) == 30
    assert {(layer["kv_cache_dtype"], layer["tensor_dtype"]) for layer in layers} == {("fp8_e4m3", "torch.uint8")}
    assert served.record()["predicate"]["verdict"] == "serve"


def test_the_capacity_is_that_of_8_bit(served: Guarded) -> None:
    metrics = served.management("/metrics").text
    assert "kvguard_kv_cache_capacity_tokens 93184.0" in metrics
    assert "kvguard_kv_cache_bytes_per_token 11520.0" in metrics
    capacity = [c for c in served.management("/evidence").json()["claims"] if c["source"] == "capacity"]
    assert [claim["value"] for claim in capacity] == ["8-bit"]


def test_every_answer_says_what_it_was_made_with(served: Guarded) -> None:
    answer = served.chat()
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-kvguard-kv-cache-dtype"] == "fp8_e4m3"
    assert answer.headers["x-kvguard-kv-scales"] == "unit_default"
    assert answer.headers["x-kvguard-confidence"] == "proven"
    assert answer.headers["x-kvguard-record"] == served.record()["predicate"]["content_digest"]


def test_the_openai_client_streams_through(served: Guarded) -> None:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [served.model]
        chunks = list(
            client.chat.completions.create(
                model=served.model,
                messages=[{"role": "user", "content": "Count from one to five."}],
                max_tokens=24,
                temperature=0,
                stream=True,
            )
        )
    assert len(chunks) > 10
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_kvguard_adds_less_than_three_seconds(served: Guarded) -> None:
    """Three seconds on a machine as quick as the one the bound was set on; a slower or busier one slows the engine too."""
    timings = served.record()["predicate"]["undigested"]["timings"]
    assert timings["added_s"] <= max(3.0, 0.1 * timings["engine_start_s"]), timings


def test_the_reader_inside_is_not_reachable_from_outside(served: Guarded) -> None:
    for path in ("/_kvguard/inside/evidence", "/v1/../_kvguard/inside/evidence", "/%5fkvguard/inside/evidence"):
        with httpx.Client(trust_env=False) as client:
            request = client.build_request("GET", served.base_url + path)
            assert client.send(request).status_code == 404


def test_secrets_and_prompts_are_in_no_output(served: Guarded) -> None:
    canary = "zanzibar-marmalade-7731"
    assert served.chat(f"Repeat: {canary}").status_code == 200
    written = [served.out, served.err, json.dumps(served.record()), served.management("/metrics").text]
    written.append(served.management("/evidence").text)
    assert not any(canary in text for text in written)


def _generated(served: Guarded) -> float:
    tokens = served.gauge("vllm:generation_tokens_total")
    assert tokens is not None
    return tokens


def _made_for_nobody(served: Guarded) -> tuple[float, float]:
    """Tokens that the engine makes for a client after it hung up, and tokens that it makes in a second."""
    with stream(served, {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        begun = time.monotonic()
        for _ in range(100):
            next(lines)
        in_a_second = 100 / (time.monotonic() - begun)
        before = _generated(served)
    deadline = time.monotonic() + 300
    while served.gauge("vllm:num_requests_running") != 0.0:
        assert time.monotonic() < deadline, "the engine still computes for a client that has gone"
    return _generated(served) - before, in_a_second


def test_a_client_that_hangs_up_frees_the_engine_within_a_second(served: Guarded) -> None:
    """Counted in the engine's own tokens, in one of five attempts: a shared machine pauses now and then."""
    attempts = (_made_for_nobody(served) for _ in range(5))
    assert any(made < max(in_a_second, 20) for made, in_a_second in attempts)


def test_the_engine_core_killed_while_streaming(served: Guarded) -> None:
    """vLLM's own last bytes pass unchanged; kvguard exits 5 and leaves nothing."""
    reader = Reader(served)
    assert reader.began.wait(120)
    os.kill(served.engine_process("EngineCore"), signal.SIGKILL)
    reader.join(120)
    assert served.wait_exit(60) == ExitCode.ENGINE_DIED
    assert reader.error is None
    assert reader.events()[-1] == "[DONE]"
    assert "error" in json.loads(reader.events()[-2])
    assert "the engine " in served.termination_log.read_text()
    served.assert_nothing_left()
