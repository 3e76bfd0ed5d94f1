"""What the hop through kvguard costs, as ratios against other proxies measured side by side in one run.

`make bench`, or `python tests/bench/data_plane.py [--quick]`. All proxies run at once, in front of one fake engine that
answers at once or streams 64 chunks 2 ms apart; blocks of requests go to one after the other, there and back, round after
round, so that whatever else the machine does meets all alike. Costs are CPU time of the proxy's process, not wall time.
kvguard has metrics, headers, gate and sampling on. Prints the table and the ratios, and writes them as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent))

import musts
import peers
from load import Connection, Seen, block, connect, request

CLIENTS = 8
KINDS = {"json": CLIENTS, "stream": CLIENTS, "burst": CLIENTS, "lone": 1}
"""Kinds of requests, and how many clients ask at once.

`burst` is a stream whose chunks come without a pause, `lone` a paced stream at a time: the slowest proxy keeps pace with that,
so that all carry the same streams at much the same rate, and each wakes up for each chunk. With eight, the slowest is at its
limit, and finds its next chunk there already.
"""
TITLES = {"json": "1 KB JSON", "stream": "stream of 64 chunks", "burst": "without a pause", "lone": "paced, one client"}
NAMES = ("kvguard", "kvguard, access log", "kvguard, spans", "bare", "raw bytes", "nginx", "vllm-router", "LiteLLM")
_WARM = {"json": 200, "stream": 32, "burst": 32, "lone": 4}
_START_S = 120.0

Figures = dict[str, Any]


class Running:
    """A proxy that answers."""

    def __init__(self, proxy: peers.Proxy, process: subprocess.Popen[bytes]) -> None:
        self.proxy = proxy
        self.name = proxy.name
        self.pid = process.pid
        self.port = proxy.port

    def cpu(self) -> float:
        """Seconds of CPU its process has used, to the nanosecond (Linux's clock of another process)."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def rss(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096

    def request(self, kind: str, *, idle: bool = False) -> bytes:
        """The request that this one is asked."""
        user = "idle" if idle else "burst" if kind == "burst" else ""
        return request(stream=kind != "json", user=user, key=self.proxy.key)


@contextlib.contextmanager
def fake_engine(directory: Path, gap_ms: float) -> Iterator[peers.Engine]:
    """The far side, in a process of its own."""
    engine = peers.Engine(directory / "engine.sock", peers.free_port(), directory)
    command = [sys.executable, str(Path(__file__).parent / "upstream.py"), str(engine.uds), str(engine.port), str(gap_ms)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for(engine.port, process)
        yield engine
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except urllib.error.HTTPError:  # it wants a key: it is there
            return
        except OSError:
            pass
        time.sleep(0.2)
    raise OSError(
        f"it did not answer within {_START_S:g} s" if process.poll() is None else f"it ended with {process.returncode}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_all(engine: peers.Engine, stack: ExitStack, wanted: Sequence[str]) -> tuple[list[Running], dict[str, str]]:
    """Every proxy that can be had, and why the others are missing."""
    makers = {
        "kvguard": peers.kvguard,
        "kvguard, access log": lambda one: peers.kvguard(one, "--access-log", name="kvguard, access log"),
        "kvguard, spans": lambda one: peers.kvguard(one, "--spans", f"http://127.0.0.1:{one.port}", name="kvguard, spans"),
        "bare": peers.bare,
        "raw bytes": peers.raw,
        "nginx": peers.nginx,
        "vllm-router": peers.vllm_router,
        "LiteLLM": peers.litellm,
    }
    running: list[Running] = []
    skipped: dict[str, str] = {}
    for name in wanted:
        try:
            proxy = makers[name](engine)
            process = peers.start(proxy, engine.directory)
            stack.callback(_end, process)
            _wait_for(proxy.port, process)
            running.append(Running(proxy, process))
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            skipped[name] = said[-1] if said else type(error).__name__
    return running, skipped


async def cpu_costs(running: Sequence[Running], rounds: int, requests: dict[str, int]) -> dict[str, Figures]:
    """CPU milliseconds a request in each round, and reads a response, by proxy and kind."""
    found: dict[str, Figures] = {one.name: {kind: {"cpu_ms": [], "reads": []} for kind in KINDS} for one in running}
    for one in running:
        for kind in KINDS:
            await _block(one, kind, 24 if one.proxy.slow and kind != "lone" else _WARM[kind])
    for number in range(rounds):
        for kind, clients in KINDS.items():
            for one in running if number % 2 == 0 else reversed(running):
                count = max(clients, requests[kind] // (12 if one.proxy.slow and kind != "lone" else 1))
                before = one.cpu()
                seen = await _block(one, kind, count)
                found[one.name][kind]["cpu_ms"].append(1000 * (one.cpu() - before) / count)
                found[one.name][kind]["reads"].append(seen.reads / count)
        print(f"round {number + 1} of {rounds}", flush=True)
    return found


async def _block(one: Running, kind: str, count: int) -> Seen:
    seen = await block(one.port, one.request(kind), count, KINDS[kind])
    if seen.bad:
        raise SystemExit(f"{one.name}: {seen.bad} of {count} {kind} requests failed: {seen.examples}")
    return seen


async def first_bytes(engine: peers.Engine, running: Sequence[Running], rounds: int, count: int) -> dict[str, Figures]:
    """Milliseconds to the first byte with one client, directly and through each proxy, block after block."""
    seen: dict[str, list[float]] = {}
    targets = [("direct", engine.port, request()), *((one.name, one.port, one.request("json")) for one in running)]
    for number in range(rounds):
        for name, port, data in targets if number % 2 == 0 else reversed(targets):
            got = await block(port, data, count, 1)
            seen.setdefault(name, []).extend(1000 * value for value in got.first_byte)
    direct = statistics.median(seen["direct"])
    return {
        name: {
            "p50_ms": statistics.median(values),
            "p99_ms": statistics.quantiles(values, n=100)[98],
            "added_p50_ms": statistics.median(values) - direct,
        }
        for name, values in seen.items()
    }


async def idle_streams(engine: peers.Engine, one: Running, count: int) -> Figures:
    """KB of memory that a stream takes which says nothing, and whether all of it is let go."""
    before = one.rss()
    connections: list[Connection] = []
    for _ in range(count // 50):
        batch = await asyncio.gather(*(connect(one.port) for _ in range(50)))
        await asyncio.gather(*(connection.begin(one.request("stream", idle=True)) for connection in batch))
        connections += batch
    held, running = one.rss(), stats(engine)["running"]
    for connection in connections:
        connection.transport.close()
    left = await _until_idle(engine)
    return {"kb_a_stream": (held - before) / count / 1024, "running_while_held": running, "running_after": left}


async def soak(engine: peers.Engine, one: Running, requests: int, hang_ups: int) -> Figures:
    """Memory over many requests and clients that leave in every phase; then whether it serves as before."""
    steps, sizes = 20, [one.rss()]
    begun = stats(engine)["requests"]
    for _ in range(steps):
        await _block(one, "json", requests // steps)
        await _hang_up(one, hang_ups // steps)
        sizes.append(one.rss())
    running = await _until_idle(engine)
    connections = stats(engine)["connections"]
    after = await _block(one, "json", 400)
    after_streams = await _block(one, "stream", 32)
    return {
        "requests": requests,
        "hang_ups": hang_ups,
        "reached_the_engine": stats(engine)["requests"] - begun,
        "rss_mb": [round(size / 2**20, 2) for size in sizes],
        "growth_second_half": sizes[-1] / sizes[steps // 2] - 1,
        "engine_running_after": running,
        "engine_connections_after": connections,
        "failed_afterwards": after.bad + after_streams.bad,
        "in_flight_after": in_flight(one),
    }


async def _hang_up(one: Running, count: int) -> None:
    """Clients that leave: inside their request, right behind it, and inside the answer."""
    data, head = one.request("stream", idle=True), one.request("json")[:-20]

    async def leave(number: int) -> None:
        connection = await connect(one.port)
        if number % 3 == 0:
            connection.transport.write(head)
            await asyncio.sleep(0)
        elif number % 3 == 1:
            connection.transport.write(data)
            await asyncio.sleep(0)
        else:
            await connection.begin(data)
        connection.transport.abort()

    for start in range(0, count, 50):
        await asyncio.gather(*(leave(number) for number in range(start, min(start + 50, count))))


async def _until_idle(engine: peers.Engine) -> int:
    end = time.monotonic() + 60
    while (running := int(stats(engine)["running"])) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return running


def stats(engine: peers.Engine) -> dict[str, int]:
    """What the engine says of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/stats", timeout=30) as answer:
        found: dict[str, int] = json.load(answer)
        return found


def in_flight(one: Running) -> float:
    """kvguard's own gauge."""
    with urllib.request.urlopen(f"http://127.0.0.1:{one.proxy.management_port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("kvguard_proxy_in_flight_requests "))


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and the least and the most."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(costs: dict[str, Figures]) -> dict[str, dict[str, dict[str, float]]]:
    """kvguard's cost by each other's, round by round."""
    ours = costs["kvguard"]
    return {
        kind: {
            f"kvguard / {name}": spread([a / b for a, b in zip(ours[kind]["cpu_ms"], theirs[kind]["cpu_ms"], strict=True)])
            for name, theirs in costs.items()
            if name != "kvguard"
        }
        for kind in KINDS
    }


def show(result: Figures) -> None:
    """The tables, for people."""
    print(f"\n{'CPU ms a request':22}" + "".join(f"{TITLES[kind]:>28}" for kind in KINDS) + "   reads a stream, lone")
    for name, kinds in result["cpu"].items():
        cells = [f"{kinds[kind]['median']:.3f} ({kinds[kind]['low']:.3f} to {kinds[kind]['high']:.3f})" for kind in KINDS]
        reads = f"   {kinds['stream']['reads']:.1f}, {kinds['lone']['reads']:.1f}"
        print(f"{name:22}" + "".join(f"{cell:>28}" for cell in cells) + reads)
    print(f"\n{'ratio':32}" + "".join(f"{TITLES[kind]:>28}" for kind in KINDS))
    for name in result["ratios"]["json"]:
        cells = []
        for kind in KINDS:
            one = result["ratios"][kind][name]
            cells.append(f"{one['median']:.3g} ({one['low']:.3g} to {one['high']:.3g})")
        print(f"{name:32}" + "".join(f"{cell:>28}" for cell in cells))
    print(f"\n{'first byte, one client':22}{'p50 ms':>10}{'p99 ms':>10}{'added p50 ms':>14}")
    for name, one in result["first_byte"].items():
        print(f"{name:22}{one['p50_ms']:>10.3f}{one['p99_ms']:>10.3f}{one['added_p50_ms']:>14.3f}")
    print("\n1,000 idle streams:" if result["idle"] else "")
    for name, one in result["idle"].items():
        print(f"{name:22}{one['kb_a_stream']:>10.1f} KB each; {one['running_after']} left running")
    print("\nsoak of kvguard:", json.dumps({key: value for key, value in result["soak"].items() if key != "rss_mb"}))
    for name, why in result["skipped"].items():
        print(f"skipped: {name}: {why}")


async def measure(engine: peers.Engine, running: Sequence[Running], quick: bool) -> Figures:
    """All of it, in order."""
    scale = 10 if quick else 1
    ours = next(one for one in running if one.name == "kvguard")
    requests = {"json": 2400 // scale, "stream": 128 // scale, "burst": 256 // scale, "lone": 4 if quick else 8}
    costs = await cpu_costs(running, 2 if quick else 6, requests)
    quick_ones = [one for one in running if not one.proxy.slow]
    print("first bytes", flush=True)
    latencies = await first_bytes(engine, quick_ones, 2 if quick else 10, 200 // scale)
    print("idle streams", flush=True)
    # The bare relay is left out: it keeps the streams of clients that left.
    idle = {one.name: await idle_streams(engine, one, 1000 // scale) for one in running if one.name in ("kvguard", "nginx")}
    print("soak", flush=True)
    return {
        "cpu": {
            name: {
                kind: {**spread(figures["cpu_ms"]), "reads": statistics.median(figures["reads"])}
                for kind, figures in kinds.items()
            }
            for name, kinds in costs.items()
        },
        "ratios": ratios(costs),
        "first_byte": latencies,
        "idle": idle,
        "soak": await soak(engine, ours, 30_000 // scale, 10_000 // scale),
    }


def main() -> None:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a tenth of everything, to see that it runs")
    options.add_argument("--gap", type=float, default=2.0, help="milliseconds between the chunks of a stream")
    options.add_argument("--without", action="append", default=[], help="a proxy to leave out, by name; repeatable")
    options.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "kvguard-bench-data-plane.json")
    given = options.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvb") as place,
        fake_engine(Path(place), given.gap) as engine,
        ExitStack() as stack,
    ):
        running, skipped = start_all(engine, stack, [name for name in NAMES if name not in given.without])
        result = uvloop.run(measure(engine, running, given.quick))
    about = {name: version(name) for name in ("uvicorn", "uvloop", "httptools", "aiohttp")}
    result |= {"skipped": skipped, "versions": {"python": platform.python_version(), **about}, "gap_ms": given.gap}
    result["when"] = datetime.now(UTC).isoformat(timespec="seconds")
    result["musts"] = [asdict(must) for must in musts.of_data_plane(result)]
    show(result)
    given.out.write_text(json.dumps(result, indent=2))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
