"""What shadow probes with the default budget cost clients, as ratios on one engine in one run.

`make bench`. One engine with `--shadow in-engine` and its default settings, but every request drawn, so that the budget alone
limits probes. Blocks of requests that probes may take alternate with blocks of requests that forbid them by header, in the
order on, off, off, on; whatever else the machine does meets both alike. Between blocks the queue runs empty, so that no
probe falls into a block without. The intervals resample whole blocks. A benchmark, not a test: look at the interval, and at
`off` split against itself.

Two loads, on either side of a cliff: a prefill of one client lengthens a gap of every other, by as much as a pass does. With
short answers prefills touch many gaps in a hundred, with long ones few in a thousand. Where they touch just one in a
hundred, the 99th percentile jumps for any reason, and no ratio of it means anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
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
SUBJECTS = ("a river", "a clock", "the Moon", "bread", "chess", "a bridge", "rain", "a violin")
MAX_AGE_S = 5  # of a request that waits for its probe; 60 by default, which would reach into the next block
ORDER = (True, False, False, True)
FORBID = {"x-kvguard-shadow": "off"}
OVERTIME_S = 1.0  # by which a stream may outlast its block
SHARES = {"p50": 0.5, "p99": 0.99}
TAIL = {"p98": 0.98, "p99": 0.99, "p99.5": 0.995}

Block = dict[str, list[float]]


@dataclass(frozen=True)
class Load:
    """What each stream does over and over: an answer of so many tokens, and seconds of thought."""

    tokens: int
    pause: float


LOADS = {"short answers": Load(16, 0.3), "long answers": Load(512, 0.7)}


async def _stream(
    client: httpx.AsyncClient, model: str, number: int, tokens: int, until: float, probed: bool, block: Block
) -> None:
    """One chat, read as it comes until the block is over: seconds to the first chunk, and between chunks."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Write about {SUBJECTS[number % len(SUBJECTS)]}, part {number}."}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    last = begun = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body, headers={} if probed else FORBID) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            block["ttft" if last == begun else "itl"].append(now - last)
            last = now
            if now > until + OVERTIME_S:
                return


async def _block(served: Guarded, load: Load, seconds: float, probed: bool) -> Block:
    block: Block = {"ttft": [], "itl": []}
    until = time.perf_counter() + seconds
    count = iter(range(10**6))

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while time.perf_counter() < until:
            await _stream(client, served.model, next(count), load.tokens, until, probed, block)
            await asyncio.sleep(load.pause)  # so that the engine is idle now and then, as most replicas are

    async with httpx.AsyncClient(base_url=served.base_url, trust_env=False, timeout=120) as client:
        await asyncio.gather(*(keep_asking(client) for _ in range(STREAMS)))
    return block


def _report(served: Guarded) -> dict[str, Any]:
    report: dict[str, Any] = served.management("/shadow").json()
    return report


def _run_empty(served: Guarded) -> None:
    """Wait until every request that was drawn is probed or too old."""
    while any(row["offered"] > row["done"] + sum(row["dropped"].values()) for row in _report(served)["coverage"]):
        time.sleep(0.2)


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _ratio(over: list[Block], under: list[Block], what: str, share: float) -> float:
    first, second = ([value for block in blocks for value in block[what]] for blocks in (over, under))
    return _quantile(first, share) / _quantile(second, share)


def _ratios(over: list[Block], under: list[Block]) -> dict[str, dict[str, float]]:
    """Ratio of each quantile of all values together, and its 90 % interval by resampling blocks."""
    dice = random.Random(0)
    found = {}
    for what in ("ttft", "itl"):
        for name, share in SHARES.items():
            drawn = sorted(
                _ratio(dice.choices(over, k=len(over)), dice.choices(under, k=len(under)), what, share) for _ in range(500)
            )
            ratio = _ratio(over, under, what, share)
            found[f"{what} {name}"] = {
                key: round(value, 3) for key, value in (("ratio", ratio), ("low", drawn[25]), ("high", drawn[474]))
            }
    return found


def _found(on: list[Block], off: list[Block]) -> dict[str, Any]:
    return {
        "on / off": _ratios(on, off),
        "off / off": _ratios(off[::2], off[1::2]),
        "requests": {"on": sum(len(block["ttft"]) for block in on), "off": sum(len(block["ttft"]) for block in off)},
        "gaps_ms": {"on": _gaps(on), "off": _gaps(off)},
    }


def _gaps(blocks: list[Block]) -> dict[str, float]:
    values = [value for block in blocks for value in block["itl"]]
    return {name: round(1000 * _quantile(values, share), 1) for name, share in {**TAIL, "longest": 1.0}.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3, help="rounds of four blocks for each load")
    options.add_argument("--seconds", type=float, default=20.0, help="length of a block")
    options.add_argument("--load", choices=LOADS, action="append", help="this load alone; may be repeated")
    options.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "kvguard-bench-shadow.json")
    given = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engine is stopped as well
    cache = cache_directory(os.environ)
    vllm = ensure_engine(ENGINE_VERSION, cache)
    model = ensure_variants(ensure_model(vllm.with_name("python"), cache))["plain"]
    directory = Path(tempfile.mkdtemp(prefix="kvguard-bench-"))
    served = Guarded(
        directory,
        model,
        "--kv-cache-dtype",
        "fp8_e4m3",
        vllm=str(vllm),
        options=("--shadow", "in-engine", "--shadow-set", "rate=1", "--shadow-set", f"max-age-s={MAX_AGE_S}"),
    )
    loads = {name: LOADS[name] for name in given.load or LOADS}
    blocks: dict[str, dict[bool, list[Block]]] = {name: {True: [], False: []} for name in loads}
    try:
        served.wait_ready()
        while _report(served)["state"] == "checking":
            time.sleep(0.5)
        asyncio.run(_block(served, LOADS["short answers"], given.seconds, False))  # warm
        for number in range(given.rounds):
            for name, load in loads.items():
                for probed in ORDER:
                    _run_empty(served)
                    blocks[name][probed].append(asyncio.run(_block(served, load, given.seconds, probed)))
            print(f"round {number + 1} of {given.rounds}: {_report(served)['probes']} probes", flush=True)
        _run_empty(served)
        report = _report(served)
    finally:
        served.close()
    dropped: dict[str, int] = {}
    for row in report["coverage"]:
        for cause, count in row["dropped"].items():
            dropped[cause] = dropped.get(cause, 0) + count
    result = {
        **{name: _found(found[True], found[False]) for name, found in blocks.items()},
        "probes": report["probes"],
        "pass_seconds": round(report["pass_seconds"], 2),
        "longest_pass_ms": round(1000 * report["longest_pass_seconds"]),
        "stalls_over_budget": report["stalls_over_budget"],
        "seconds": given.seconds * len(ORDER) * given.rounds * len(loads),
        "dropped": dropped,
    }
    print(json.dumps(result, indent=2))
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
