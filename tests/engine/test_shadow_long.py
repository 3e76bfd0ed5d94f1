"""The full form: four real engines, forty requests each; what each format costs, request by request.

With KVGUARD_WRITE_SAMPLES=1 the per-request means are written where the false-alarm simulation reads them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agreement import inside_and_outside
from guarded import Guarded
from kvguard.demo.environment import ensure_engine
from kvguard.engine.client import EngineClient
from kvguard.reference.inside import run_passes
from kvguard.reference.models import EXACT, Choice, Decode
from kvguard.shadow.candidate import Candidate
from kvguard.shadow.models import COST, UNEXPLAINED, Observation, stratum
from kvguard.shadow.replay import probe_body, read_decode
from kvguard.shadow.scoring import score
from kvguard.shadow.sequential import collapse_of
from kvguard.shadow.statistics import Measure, sums_of
from long_results import keep

pytestmark = pytest.mark.long

REQUESTS = 40
SAMPLES = Path(__file__).parents[1] / "shadow/samples/request_means.json"
THINGS = (
    "a lighthouse",
    "the number seven",
    "a broken clock",
    "rain on a tin roof",
    "a chess game",
    "the Moon",
    "bread",
    "a bridge",
)
TASKS = (
    "Write two sentences about {}.",
    "Explain {} to a child.",
    "List three facts about {}.",
    "Tell a short story in which {} matters.",
    "What would a poet say about {}?",
)
PROMPTS = [task.format(thing) for thing in THINGS for task in TASKS][:REQUESTS]
TRUNCATED = {name: Choice(label="own", format=name, rounding="truncate") for name in ("fp8_e4m3", "fp8_e5m2")}


async def _observe(served: Guarded, own: Choice | None) -> list[Observation]:
    """Each prompt decoded as a client would get it (temperature 1, fixed seed) and scored inside the same engine."""
    (directory,) = served.run_base.iterdir()
    secret = (directory / "secret").read_text()
    found = []
    async with EngineClient(str(directory / "engine.sock")) as client:
        for number, prompt in enumerate(PROMPTS):
            body = {"messages": [{"role": "user", "content": prompt}], "temperature": 1.0, "seed": number}
            candidate = Candidate(kind="chat", body=body, turns=1, adapter="", prompt_chars=len(prompt), size=len(prompt))
            path, question = probe_body(candidate, served_model=served.model, max_tokens=48, greedy=False, salt=f"s{number}")
            decode = read_decode("chat", (await client.post(path, question)).body)
            assert isinstance(decode, Decode), decode
            result = await run_passes(client, secret, decode, [EXACT, *([own] if own else [])])
            assert not result.problem
            scores = {COST: score(decode, result.passes[0]), UNEXPLAINED: score(decode, result.passes[-1])}
            found.append(Observation(1.0, stratum(len(decode.prompt_ids), 1), scores))
    return found


def test_noise_below_e4m3_below_e5m2_below_ruined(guarded: Callable[..., Guarded]) -> None:
    engines = {
        "aa": ("plain", "bfloat16", None),
        "fp8_e4m3": ("plain", "fp8_e4m3", TRUNCATED["fp8_e4m3"]),
        "fp8_e5m2": ("plain", "fp8_e5m2", TRUNCATED["fp8_e5m2"]),
        "ruined": ("kv_scheme_ruined_scales", "fp8_e4m3", TRUNCATED["fp8_e4m3"]),
    }
    seen: dict[str, list[Observation]] = {}
    for name, (kind, dtype, own) in engines.items():
        served = guarded(kind, "--kv-cache-dtype", dtype).wait_ready()
        seen[name] = asyncio.run(_observe(served, own))
        assert served.stop() == 0
    costs = {name: sums_of(found, COST).estimate(Measure.ABS_DELTA) for name, found in seen.items()}
    for name, cost in costs.items():
        keep("cost by token, temperature 1", name, low=cost.low or 0.0, value=cost.value or 0.0, high=cost.high or 0.0)
    in_order = [costs[name] for name in engines]
    for lower, higher in itertools.pairwise(in_order):
        assert lower.high is not None
        assert higher.low is not None
        assert lower.high < higher.low
    ruined = seen["ruined"][:5]
    assert any(collapse_of(one) or (one.scores[COST].mean_abs_delta or 0) > 2.0 for one in ruined)
    if os.environ.get("KVGUARD_WRITE_SAMPLES"):
        _write(seen)


def _write(seen: dict[str, list[Observation]]) -> None:
    def means(name: str, comparison: str) -> list[float]:
        return [round(one.scores[comparison].mean_abs_delta or 0.0, 5) for one in seen[name]]

    document = {
        "source": f"measured {datetime.now(UTC):%Y-%m-%d} on SmolLM2-135M-Instruct, vLLM 0.32.0 CPU, eager, temperature 1, "
        f"{REQUESTS} chats of 48 tokens; unexplained against the truncating pass",
        "unit": "mean |delta logprob| of one request, nats by token; the n-th values of all lists belong to one prompt",
        "tokens": [one.scores[COST].tokens for one in seen["fp8_e4m3"]],
        "aa": means("aa", COST),
        "fp8_e4m3_unexplained": means("fp8_e4m3", UNEXPLAINED),
        "fp8_e4m3_cost": means("fp8_e4m3", COST),
        "fp8_e5m2_cost": means("fp8_e5m2", COST),
        "ruined_cost": means("ruined", COST),
    }
    SAMPLES.write_text(json.dumps(document, indent=2) + "\n")


def test_clients_do_not_feel_the_default_budget(guarded: Callable[..., Guarded]) -> None:
    """No stall exceeds the budget, nothing waits behind a pass, and what was not probed is counted by cause."""
    served = guarded("plain", "--kv-cache-dtype", "fp8_e4m3", options=("--shadow", "in-engine")).wait_ready()
    deadline = time.monotonic() + 240
    while served.management("/shadow").json()["state"] == "checking":
        assert time.monotonic() < deadline
        time.sleep(1)
    begun = time.monotonic()
    while time.monotonic() - begun < 60:
        assert served.chat("Name three colours.", max_tokens=24).status_code == 200
    report = served.management("/shadow").json()
    assert report["pass_seconds"] <= 0.02 * (time.monotonic() - begun) + 1.0
    assert sum(row["offered"] for row in report["coverage"]) > 0


@pytest.mark.parametrize(("version", "flags"), [("0.27.1", ()), ("0.32.0", ("--no-enforce-eager",))])
def test_the_pass_names_the_rounding_on_another_version_and_on_a_compiled_engine(
    version: str,
    flags: tuple[str, ...],
    engine_cache: Path,
    variant: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    options = ("--shadow", "in-engine", "--shadow-set", "greedy=true", "--shadow-set", "max-stall-ms=10000")
    vllm = str(ensure_engine(version, engine_cache))
    served = Guarded(tmp_path, variant("plain"), "--kv-cache-dtype", "fp8_e4m3", *flags, vllm=vllm, options=options)
    try:
        served.wait_ready()
        deadline = time.monotonic() + 240
        while (report := served.management("/shadow").json())["state"] == "checking":
            assert time.monotonic() < deadline
            time.sleep(1)
        residuals = {name.replace("fp8_e4m3 ", ""): value for name, value in report["fidelity"]["residuals"].items()}
        keep("kernel fidelity of fp8_e4m3, greedy", " ".join((version, *flags)), **residuals)
        assert report["fidelity"]["explained_by"] == "fp8_e4m3 truncate", report
        assert served.stop() == 0
    finally:
        served.close()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("version", ["0.27.1", "0.32.0"])
def test_in_engine_and_external_references_agree_on_every_engine(
    version: str, mode: str, engine_cache: Path, variant: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their estimates for one fp8_e4m3 engine differ by less than the noise floor, which the reference's own pass gives."""
    vllm = str(ensure_engine(version, engine_cache))
    flags = ("--no-enforce-eager",) if mode == "compiled" else ()
    started = []
    try:
        for dtype in ("bfloat16", "fp8_e4m3"):
            directory = tmp_path / dtype
            directory.mkdir()
            started.append(Guarded(directory, variant("plain"), "--kv-cache-dtype", dtype, *flags, vllm=vllm).wait_ready())
        sixteen_bit, fp8 = started
        floor, _ = inside_and_outside(sixteen_bit, sixteen_bit, version)
        inside, outside = inside_and_outside(fp8, sixteen_bit, version)
        keep("agreement", f"{version} {mode}", floor=floor, inside=inside, outside=outside)
        assert abs(inside - outside) < floor, (inside, outside, floor)
    finally:
        for one in started:
            one.close()
