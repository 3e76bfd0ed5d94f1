"""Starting, asking and scoring engines with calibrated scales."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guarded import KVGUARD, SMALL, Guarded, engine_environment
from kvguard.engine.client import EngineClient
from kvguard.evidence.replies import TensorReading
from kvguard.reference.calibrate import measure
from kvguard.reference.external import run_teacher_forced
from kvguard.reference.inside import PassResult, run_passes
from kvguard.reference.models import EXACT, Choice, Decode
from kvguard.reference.prompts import default_prompts
from kvguard.reference.ranges import Ranges
from kvguard.shadow.candidate import Candidate
from kvguard.shadow.prompts import SELF_CHECK
from kvguard.shadow.replay import probe_body, read_decode
from kvguard.shadow.scoring import score

RUNTIME = "kv_cache: {dtype: fp8_e4m3, scales: runtime, min_confidence: proven}\n"
RUINED_SCALE = 0.002
"""So small that most keys and many values saturate."""

NOISE = 0.03
"""Mean |Δ logprob| that two equal runs may differ by on this engine."""


def environment(cache: Path) -> dict[str, str]:
    """A cache of its own, so that no calibration of somebody else's is found."""
    return {"XDG_CACHE_HOME": str(cache / "cache"), "XDG_STATE_HOME": str(cache / "state")}


def calibrate(model: Path, vllm: Path, cache: Path, *options: str, flags: Sequence[str] = SMALL) -> dict[str, Any]:
    """`kvguard calibrate --json`, its report."""
    command = [KVGUARD, "calibrate", str(model), "--engine", str(vllm), "--json", *options, "--", *flags]
    run_base = Path(f"/tmp/kvgt-{secrets.token_hex(4)}")
    env = engine_environment(**environment(cache), KVGUARD_RUN_DIR=str(run_base))
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=500)
    finally:
        shutil.rmtree(run_base, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@contextmanager
def several(cache: Path) -> Iterator[Any]:
    """Starts guarded engines that share a cache; all are ended."""
    started: list[Guarded] = []

    def start(model: Path, vllm: Path, *flags: str, policy: str = RUNTIME, options: Sequence[str] = ()) -> Guarded:
        directory = cache / f"run-{len(started)}"
        directory.mkdir()
        one = Guarded(directory, model, *flags, vllm=str(vllm), policy=policy, options=options, env=environment(cache))
        started.append(one)
        return one

    try:
        yield start
    finally:
        for one in started:
            one.close()


def inside(served: Guarded) -> tuple[str, str]:
    """The engine's socket, and the secret of its inside."""
    (directory,) = [entry for entry in served.run_base.iterdir() if (entry / "secret").exists()]
    return str(directory / "engine.sock"), (directory / "secret").read_text()


def read_scales(served: Guarded) -> TensorReading:
    """The scales in the workers now."""

    async def ask() -> TensorReading:
        socket, secret = inside(served)
        async with EngineClient(socket) as client:
            answer = await client.evidence(secret, "now")
            assert answer.reading is not None, answer.problem
            return answer.reading

    return asyncio.run(ask())


def ranges_of(served: Guarded) -> Ranges:
    """What the calibration prompts span, measured by passes in this engine."""

    async def ask() -> Ranges:
        socket, secret = inside(served)
        async with EngineClient(socket) as client:
            found = await measure(
                client,
                secret,
                served.model,
                default_prompts(),
                chat_template=True,
                max_model_len=2048,
                progress=lambda done, total: None,
            )
            return found.ranges

    return asyncio.run(ask())


async def decodes(client: EngineClient, model: str, max_tokens: int = 96) -> list[Decode]:
    """Greedy answers to twelve chats, with the engine's own log probabilities."""
    found = []
    for prompt in SELF_CHECK:
        body = {"messages": [{"role": "user", "content": prompt}]}
        candidate = Candidate(kind="chat", body=body, turns=1, adapter="", prompt_chars=len(prompt), size=len(prompt))
        path, question = probe_body(candidate, served_model=model, max_tokens=max_tokens, greedy=True, salt="calibration")
        read = read_decode("chat", (await client.post(path, question)).body)
        assert isinstance(read, Decode), read
        found.append(read)
    return found


def costs(served: Guarded, *choices: Choice) -> list[float]:
    """Mean |Δ logprob| a token of this engine's decode against passes in it; without choices, the 16-bit pass."""

    async def ask() -> list[float]:
        socket, secret = inside(served)
        async with EngineClient(socket) as client:
            answers = await decodes(client, served.model)
            passes = [await run_passes(client, secret, decode, choices or (EXACT,)) for decode in answers]
        return _means(answers, passes)

    return asyncio.run(ask())


def cost_against(served: Guarded, reference: Guarded) -> float:
    """Mean |Δ logprob| a token of this engine's decode against a 16-bit engine beside it, teacher forced."""

    async def ask() -> float:
        async with EngineClient(inside(served)[0]) as client, EngineClient(reference.base_url) as other:
            answers = await decodes(client, served.model)
            passes = [await run_teacher_forced(other, reference.model, decode, [EXACT]) for decode in answers]
        return _means(answers, passes)[0]

    return asyncio.run(ask())


def _means(answers: Sequence[Decode], results: Sequence[PassResult]) -> list[float]:
    assert not any(result.problem for result in results), [result.problem for result in results]
    tokens = sum(len(decode.ids) for decode in answers)
    number = len(results[0].passes)
    pairs = list(zip(answers, results, strict=True))
    return [sum(score(decode, result.passes[n]).sum_abs_delta for decode, result in pairs) / tokens for n in range(number)]
