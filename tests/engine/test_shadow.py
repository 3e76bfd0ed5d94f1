"""Shadow probes on real engines: what explains the decode, what a format costs, and that nobody notices."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agreement import inside_and_outside, secret_of
from guarded import KVGUARD, Guarded, probing
from kvguard.engine.client import EngineClient
from kvguard.reference.external import Asked, Primary, ask_reference
from kvguard.reference.inside import run_passes
from kvguard.reference.models import EXACT, Choice, Decode
from kvguard.reference.their_record import read_their_record

OPTIONS = probing("greedy=true")
NATS = "abs_delta"
# Somebody's own worker extension, reached by vLLM's development endpoints: it sees the cache's bytes.
EXTENSION = ("--worker-extension-cls", "cache_bytes.CacheBytes")
FAKE = Choice(label="e4m3", format="fp8_e4m3")
SEES_BYTES = {"PYTHONPATH": str(Path(__file__).with_name("worker_extension")), "VLLM_SERVER_DEV_MODE": "1"}


def _checked(served: Guarded) -> dict[str, Any]:
    """The report once the self-check is over."""
    deadline = time.monotonic() + 300
    while (report := served.management("/shadow").json())["state"] == "checking":
        assert time.monotonic() < deadline, report
        time.sleep(0.5)
    assert isinstance(report, dict)
    return report


@pytest.fixture(scope="module")
def sixteen_bit(guarded: Callable[..., Guarded]) -> Guarded:
    return guarded("plain", "--kv-cache-dtype", "bfloat16", *EXTENSION, options=OPTIONS, env=SEES_BYTES).wait_ready()


@pytest.fixture(scope="module")
def fp8(guarded: Callable[..., Guarded], sixteen_bit: Guarded) -> Guarded:
    return guarded("plain", "--kv-cache-dtype", "fp8_e4m3", *EXTENSION, options=OPTIONS, env=SEES_BYTES).wait_ready()


def test_the_pass_reproduces_a_sixteen_bit_engine_to_within_noise(sixteen_bit: Guarded) -> None:
    report = _checked(sixteen_bit)
    fidelity = report["fidelity"]
    assert fidelity["explained_by"] == "16bit", fidelity
    assert fidelity["residuals"]["16bit"] < 0.06
    assert report["state"] == "probing"


def test_kernel_fidelity_names_truncation_on_this_engine(fp8: Guarded) -> None:
    report = _checked(fp8)
    fidelity = report["fidelity"]
    assert fidelity["explained_by"] == "fp8_e4m3 truncate", fidelity
    residuals = fidelity["residuals"]
    assert residuals["fp8_e4m3 truncate"] < 0.7 * residuals["16bit"]
    assert residuals["fp8_e4m3 nearest"] > residuals["16bit"]
    assert report["control"]["power"] >= 0.8
    assert 'kvguard_shadow_fidelity_info{explained_by="fp8_e4m3 truncate"} 1.0' in fp8.management("/metrics").text


def _settled(served: Guarded) -> None:
    """Wait until no probe of earlier requests is under way: a fuller batch rounds differently."""
    deadline = time.monotonic() + 300
    while True:
        rows = served.management("/shadow").json()["coverage"]
        over = all(row["offered"] == row["done"] + sum(row["dropped"].values()) for row in rows)
        if over and served.gauge("vllm:num_requests_running") == 0.0:
            return
        assert time.monotonic() < deadline, rows
        time.sleep(0.5)


def _whatif(served: Guarded, *arguments: str) -> dict[str, Any]:
    command = [KVGUARD, *arguments[:1], f"http://127.0.0.1:{served.management_port}", *arguments[1:], "--greedy", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["estimates"]
    return found


def test_what_if_on_a_sixteen_bit_engine_orders_the_formats_and_predicts_the_fp8_engine(
    sixteen_bit: Guarded, fp8: Guarded
) -> None:
    _checked(sixteen_bit)
    _checked(fp8)
    foreseen = _whatif(sixteen_bit, "whatif", "--formats", "fp8_e4m3,fp8_e5m2", "--rounding", "truncate")
    e4m3, e5m2 = (foreseen[f"{name} truncate, scales engine"][NATS] for name in ("fp8_e4m3", "fp8_e5m2"))
    floor = foreseen["cost"][NATS]
    assert floor["high"] < e4m3["low"]
    assert e4m3["high"] < e5m2["low"]
    measured = _whatif(fp8, "probe")["cost"][NATS]
    assert measured["low"] <= e4m3["high"]
    assert e4m3["low"] <= measured["high"]
    assert floor["high"] < measured["low"]


def test_in_engine_and_external_references_agree(sixteen_bit: Guarded, fp8: Guarded) -> None:
    report = _checked(sixteen_bit)
    _checked(fp8)
    inside, outside = inside_and_outside(fp8, sixteen_bit, "0.32.0")
    assert abs(inside - outside) < report["fidelity"]["residuals"]["16bit"], (inside, outside)


def test_an_engine_that_is_not_sixteen_bit_is_no_reference(fp8: Guarded) -> None:
    assert "must be proven 16-bit" in _ask(fp8, Primary("0.32.0"), fp8).problem


def _ask(reference: Guarded, primary: Primary, recorded: Guarded) -> Asked:
    async def ask() -> Asked:
        async with EngineClient(reference.base_url) as client:
            return await ask_reference(client, primary, partial(read_their_record, str(recorded.records)))

    return asyncio.run(ask())


def test_two_engines_that_differ_in_their_cache_are_equal_by_their_records(sixteen_bit: Guarded, fp8: Guarded) -> None:
    asked = _ask(sixteen_bit, Primary("0.32.0", record=fp8.record()), sixteen_bit)
    assert asked.problem == ""
    assert asked.standing.equality.endswith("nothing but the KV cache, sizes and addresses differs")
    by_port = asyncio.run(read_their_record(f"http://127.0.0.1:{sixteen_bit.management_port}"))
    assert by_port[0] == sixteen_bit.record()
    another = _ask(sixteen_bit, Primary("0.32.0", record=fp8.record()), fp8)
    assert "its answers name the record sha256:" in another.problem


async def _completion(client: EngineClient, served: Guarded, question: dict[str, Any]) -> Any:
    answer = await client.post("/v1/completions", {"model": served.model, **question})
    return answer.body["choices"][0]["text"], answer.body["choices"][0]["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("name", ["sixteen_bit", "fp8"])
def test_passes_change_no_byte_of_the_cache(name: str, request: pytest.FixtureRequest) -> None:
    """Every byte, in use or not; the prefix cache, which a later request finds; and what that is answered."""
    served = request.getfixturevalue(name)
    _checked(served)
    _settled(served)
    question = {"prompt": "The history of the lighthouse. " * 60, "max_tokens": 32, "temperature": 0, "logprobs": 5}

    def hits() -> float:
        return served.gauge("vllm:prefix_cache_hits_total") or 0.0

    async def ask() -> None:
        socket, secret = secret_of(served)
        async with EngineClient(socket) as client:

            async def digests() -> Any:
                return (await client.post("/collective_rpc", {"method": "cache_digests"})).body["results"]

            await _completion(client, served, question)
            begun = hits()
            answer = await _completion(client, served, question)
            from_cache = hits() - begun
            assert from_cache > 0
            before = await digests()
            result = await run_passes(client, secret, _probe_decode(), [EXACT, FAKE])
            assert not result.problem
            assert await digests() == before
            assert await _completion(client, served, question) == answer
            assert hits() - begun == 2 * from_cache
            assert await digests() != before, "a request's own tokens are written there"

    asyncio.run(ask())


def _probe_decode() -> Decode:
    ids = tuple(range(100, 160))
    return Decode(
        prompt_ids=tuple(range(200, 300)),
        ids=ids,
        logprobs=(-1.0,) * len(ids),
        top=tuple(((token, -1.0),) for token in ids),
    )


def test_live_traffic_is_probed_and_its_words_are_nowhere(fp8: Guarded, tmp_path: Path) -> None:
    _checked(fp8)
    before = fp8.management("/shadow").json()["probes"]
    canary = "quixotic-bandicoot-58213"
    for number in range(3):
        assert fp8.chat(f"Write one sentence about {canary} number {number}.", max_tokens=24).status_code == 200
    opted_out = {"x-kvguard-shadow": "off"}
    assert fp8.chat("Nothing to see.", headers=opted_out).status_code == 200
    deadline = time.monotonic() + 300
    while (report := fp8.management("/shadow").json())["probes"] < before + 3:
        assert time.monotonic() < deadline, report
        time.sleep(0.3)
    assert report["skipped"]["opted_out"] == 1
    assert report["estimates"]["cost"]["requests"] >= 3
    assert report["state"] != "regression"
    written = [fp8.out, fp8.err, json.dumps(fp8.record()), fp8.management("/metrics").text, json.dumps(report)]
    assert not any(canary in text for text in written)
