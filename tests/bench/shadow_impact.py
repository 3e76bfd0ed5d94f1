"""What shadow probes with the default budget cost clients: one run, off and on in turn, ratios printed and written as JSON.

`make bench`. A benchmark, not a test: machines are shared and noisy, so look at the spread of the two `off` runs first.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from guarded import Guarded
from kvguard.demo.environment import ENGINE_VERSION, ensure_engine
from kvguard.demo.model import ensure_model
from kvguard.demo.variants import ensure_variants
from kvguard.engine.find import cache_directory

STREAMS = 3
SECONDS = 60.0
TOKENS = 48
SUBJECTS = ("a river", "a clock", "the Moon", "bread", "chess", "a bridge", "rain", "a violin")


async def _stream(client: httpx.AsyncClient, model: str, number: int, first: list[float], gaps: list[float]) -> None:
    """One chat, read as it comes: seconds to the first chunk, and between chunks."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Write about {SUBJECTS[number % len(SUBJECTS)]}, part {number}."}],
        "max_tokens": TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    last = begun = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            (first if last == begun else gaps).append(now - last)
            last = now


async def _load(served: Guarded, seconds: float) -> dict[str, Any]:
    first: list[float] = []
    gaps: list[float] = []
    until = time.perf_counter() + seconds
    count = iter(range(10**6))

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while time.perf_counter() < until:
            await _stream(client, served.model, next(count), first, gaps)
            await asyncio.sleep(0.7)  # a pause, so that the engine is idle now and then, as most replicas are

    async with httpx.AsyncClient(base_url=served.base_url, trust_env=False, timeout=120) as client:
        await asyncio.gather(*(keep_asking(client) for _ in range(STREAMS)))
    return {
        "requests": len(first),
        "ttft_p50_ms": 1000 * _quantile(first, 0.5),
        "ttft_p99_ms": 1000 * _quantile(first, 0.99),
        "itl_p50_ms": 1000 * _quantile(gaps, 0.5),
        "itl_p99_ms": 1000 * _quantile(gaps, 0.99),
        "itl_max_ms": 1000 * max(gaps),
    }


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _run(start: Callable[..., Guarded], *options: str) -> dict[str, Any]:
    served = start(*options)
    try:
        served.wait_ready()
        while options and served.management("/shadow").json()["state"] == "checking":
            time.sleep(0.5)
        asyncio.run(_load(served, SECONDS / 6))  # warm
        found = asyncio.run(_load(served, SECONDS))
        if options:
            report = served.management("/shadow").json()
            found["probes"] = report["probes"]
            found["pass_seconds"] = report["pass_seconds"]
            found["dropped"] = [row["dropped"] for row in report["coverage"]]
        return found
    finally:
        served.close()


def main() -> None:
    cache = cache_directory(os.environ)
    vllm = ensure_engine(ENGINE_VERSION, cache)
    model = ensure_variants(ensure_model(vllm.with_name("python"), cache))["plain"]

    def start(*options: str) -> Guarded:
        directory = Path(tempfile.mkdtemp(prefix="kvguard-bench-"))
        return Guarded(directory, model, "--kv-cache-dtype", "fp8_e4m3", vllm=str(vllm), options=options)

    runs = {"off": _run(start), "on": _run(start, "--shadow", "in-engine"), "off again": _run(start)}
    for name, found in runs.items():
        print(name, json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}))
    ratios = {
        key: runs["on"][key] / ((runs["off"][key] + runs["off again"][key]) / 2)
        for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    }
    noise = {key: runs["off again"][key] / runs["off"][key] for key in ratios}
    print("on / off         ", {key: round(value, 3) for key, value in ratios.items()})
    print("off again / off  ", {key: round(value, 3) for key, value in noise.items()})
    out = Path(tempfile.gettempdir()) / "kvguard-bench-shadow.json"
    out.write_text(json.dumps({"runs": runs, "ratios": ratios, "noise": noise}, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
