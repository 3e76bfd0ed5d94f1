"""The reference pass reproduces windows, soft caps, sinks, grouped heads and tensor parallel ranks on a real engine."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agreement import secret_of
from guarded import Guarded
from kvguard.engine.client import EngineClient
from kvguard.reference.inside import run_passes
from kvguard.reference.models import EXACT, Choice, Decode
from kvguard.shadow.candidate import Candidate
from kvguard.shadow.prompts import SELF_CHECK
from kvguard.shadow.replay import probe_body, read_decode
from kvguard.shadow.scoring import score
from long_results import keep

pytestmark = pytest.mark.long

NEAREST = Choice(label="fp8_e4m3 nearest", format="fp8_e4m3")


@pytest.fixture
def tiny(
    request: pytest.FixtureRequest, engine_bin: Path, engine_python: Path, model: Path, tmp_path: Path
) -> Iterator[Guarded]:
    kind, flags, env = request.param
    out = tmp_path / kind
    maker = Path(__file__).with_name("make_tiny.py")
    subprocess.run([str(engine_python), str(maker), kind, str(model), str(out)], check=True, capture_output=True, timeout=300)
    served = Guarded(tmp_path, out, "--kv-cache-dtype", "bfloat16", *flags, vllm=str(engine_bin), env=env)
    try:
        yield served.wait_ready()
        assert served.stop() == 0
    finally:
        served.close()


async def _residuals(served: Guarded) -> dict[str, float]:
    """Mean |Δ logprob| by token of greedy completions, longer than every window, against two passes."""
    socket, secret = secret_of(served)
    sums, tokens = dict.fromkeys((EXACT.label, NEAREST.label), 0.0), 0
    async with EngineClient(socket) as client:
        for prompt in SELF_CHECK[:6]:
            body = {"prompt": f"{prompt} " * 6, "max_tokens": 32}
            candidate = Candidate(kind="completion", body=body, turns=1, adapter="", prompt_chars=600, size=600)
            path, question = probe_body(candidate, served_model=served.model, max_tokens=32, greedy=True, salt="a")
            decode = read_decode("completion", (await client.post(path, question)).body)
            assert isinstance(decode, Decode), decode
            assert len(decode.prompt_ids) > 40
            result = await run_passes(client, secret, decode, [EXACT, NEAREST])
            assert not result.problem
            for one in result.passes:
                sums[one.label] += score(decode, one).sum_abs_delta
            tokens += len(decode.ids)
    return {label: value / tokens for label, value in sums.items()}


@pytest.mark.parametrize(
    "tiny",
    [
        pytest.param(("mistral", (), {}), id="sliding window"),
        pytest.param(("gemma2", (), {}), id="soft caps"),
        pytest.param(("gptoss", (), {}), id="sinks"),
        pytest.param(("mistral", ("--tensor-parallel-size", "2"), {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}), id="tensor parallel"),
    ],
    indirect=True,
)
def test_the_pass_is_exact(tiny: Guarded, request: pytest.FixtureRequest) -> None:
    found = asyncio.run(_residuals(tiny))
    keep("16-bit decode of tiny models against passes", request.node.callspec.id, **found)
    assert found[EXACT.label] < 0.03
    assert found[EXACT.label] < 0.2 * found[NEAREST.label]
