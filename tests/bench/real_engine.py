"""A real engine asked directly and through kvguard, in alternating blocks: throughput at 8 streams, and time to the first byte.

`python tests/bench/real_engine.py`. The engine listens on its Unix socket as kvguard started it; half of the blocks go there
and half through kvguard, in the order direct, through, through, direct. Eight streams are asked again and again; a block's
throughput is its tokens by its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import musts
from load import Seen, block

from guarded import Guarded
from kvguard.demo.environment import ENGINE_VERSION, ensure_engine
from kvguard.demo.model import ensure_model
from kvguard.demo.variants import ensure_variants
from kvguard.engine.find import cache_directory

STREAMS = 8
TOKENS = 48


def wire(model: str) -> bytes:
    """One streamed completion of exactly TOKENS tokens."""
    body = {"model": model, "prompt": "Write about a river.", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def measure(direct: Path, through: int, data: bytes, rounds: int, count: int) -> dict[str, Any]:
    """Blocks in the order direct, through, through, direct; each of `count` streams, eight at a time."""
    rates: dict[str, list[float]] = {"direct": [], "through": []}
    firsts: dict[str, list[float]] = {"direct": [], "through": []}
    places: dict[str, Path | int] = {"direct": direct, "through": through}
    for place in places.values():
        await block(place, data, STREAMS, STREAMS)
    for number in range(rounds):
        for name in ("direct", "through", "through", "direct"):
            began = time.perf_counter()
            seen: Seen = await block(places[name], data, count, STREAMS)
            rates[name].append(count * TOKENS / (time.perf_counter() - began))
            firsts[name] += seen.first_byte
            if seen.bad:
                raise SystemExit(f"{name}: {seen.bad} of {count} streams failed: {seen.examples}")
        print(f"round {number + 1} of {rounds}", flush=True)
    pairs = [sum(rates["through"][at : at + 2]) / sum(rates["direct"][at : at + 2]) for at in range(0, len(rates["direct"]), 2)]
    p50 = {name: 1000 * statistics.median(values) for name, values in firsts.items()}
    return {
        "throughput": {
            "through / direct": sum(rates["through"]) / sum(rates["direct"]),
            "by round": sorted(round(pair, 3) for pair in pairs),
            "tokens a second": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        },
        "first byte p50 ms": {name: round(value, 2) for name, value in p50.items()},
        "first byte p50 through / direct": round(p50["through"] / p50["direct"], 3),
        "added ms": round(p50["through"] - p50["direct"], 2),
        "first byte p50 allowed ms": round(1.03 * p50["direct"] + 1.0, 2),
        "streams": count * rounds * 4,
        "engine": ENGINE_VERSION,
    }


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--streams", type=int, default=16, help="streams a block")
    options.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "kvguard-bench-real-engine.json")
    given = options.parse_args()
    cache = cache_directory(os.environ)
    vllm = ensure_engine(ENGINE_VERSION, cache)
    model = ensure_variants(ensure_model(vllm.with_name("python"), cache))["plain"]
    served = Guarded(Path(tempfile.mkdtemp(prefix="kvguard-bench-")), model, vllm=str(vllm))
    try:
        served.wait_ready()
        [direct] = served.run_base.rglob("engine.sock")
        result = uvloop.run(measure(direct, served.port, wire(served.model), given.rounds, given.streams))
    finally:
        served.close()
    result["musts"] = [asdict(must) for must in musts.of_real_engine(result)]
    print(json.dumps(result, indent=2))
    given.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
