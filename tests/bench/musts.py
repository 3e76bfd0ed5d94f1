"""What the hop through kvguard may cost, held against what was measured.

`python tests/bench/musts.py` prints the table of the last runs of `data_plane.py` and `real_engine.py`, as `make bench` does in
the end. A benchmark and not a test: whatever is missed is printed, and ends nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = ("kvguard-bench-data-plane.json", "kvguard-bench-real-engine.json")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Must:
    """One requirement. `reached` is None where it was not measured, as of a proxy that this machine cannot have."""

    what: str
    required: str
    found: str
    reached: bool | None


def of_data_plane(result: Figures) -> list[Must]:
    """From what `data_plane.py` writes. Ratios are medians of the rounds'."""
    first_byte = result["first_byte"]["kvguard"]["added_p50_ms"]
    idle, soak = result["idle"]["kvguard"], result["soak"]
    left = {name: soak[name] for name in ("failed_afterwards", "in_flight_after", "engine_running_after")}
    return [
        _at_most(result, "json", "bare", 1.3, "1 KB JSON"),
        _at_most(result, "stream", "vllm-router", 1.0, "64 chunks, paced"),
        _at_most(result, "stream", "nginx", 2.0, "64 chunks, paced"),
        _fewer(result, "json", 50, "1 KB JSON"),
        _fewer(result, "stream", 50, "64 chunks, paced, eight clients"),
        _fewer(result, "burst", 50, "64 chunks without a pause, eight clients"),
        Must("first byte, one client: added at the median", "< 1 ms", f"{first_byte:.3f} ms", first_byte < 1),
        Must("1,000 idle streams: memory of each", "< 60 KB", f"{idle['kb_a_stream']:.1f} KB", idle["kb_a_stream"] < 60),
        Must(
            f"soak of {soak['requests']} requests and {soak['hang_ups']} hang-ups: growth over the second half",
            "< 2 %",
            f"{soak['growth_second_half']:.2%}".replace("%", " %"),
            soak["growth_second_half"] < 0.02,
        ),
        Must("after it: failed requests, in flight, running in the engine", "0, 0, 0", _zeros(left), not any(left.values())),
    ]


def of_real_engine(result: Figures) -> list[Must]:
    """From what `real_engine.py` writes."""
    throughput, first = result["throughput"]["through / direct"], result["first byte p50 ms"]
    allowed = 1.03 * first["direct"] + 1.0
    return [
        Must("real engine, 8 streams: throughput by direct", ">= 0.98", f"{throughput:.3f}", throughput >= 0.98),
        Must(
            "real engine: first byte at the median",
            f"<= {allowed:.2f} ms (1.03 x direct + 1 ms)",
            f"{first['through']:.2f} ms",
            first["through"] <= allowed,
        ),
    ]


def _at_most(result: Figures, kind: str, other: str, limit: float, title: str) -> Must:
    what = f"CPU, {title}: kvguard by {other}"
    found = _ratio(result, kind, other)
    if found is None:
        return Must(what, f"<= {limit:g}", "not measured", None)
    return Must(what, f"<= {limit:g}", f"{found:.3g}", found <= limit)


def _fewer(result: Figures, kind: str, times: float, title: str) -> Must:
    what = f"CPU, {title}: LiteLLM by kvguard"
    found = _ratio(result, kind, "LiteLLM")
    if found is None:
        return Must(what, f">= {times:g}", "not measured", None)
    return Must(what, f">= {times:g}", f"{1 / found:.3g}", 1 / found >= times)


def _ratio(result: Figures, kind: str, other: str) -> float | None:
    found = result["ratios"][kind].get(f"kvguard / {other}")
    return None if found is None else float(found["median"])


def _zeros(values: Figures) -> str:
    return ", ".join(f"{value:g}" for value in values.values())


def show(musts: Sequence[Must]) -> None:
    """The table."""
    says = {True: "reached", False: "MISSED", None: "unknown"}
    width = max(len(must.what) for must in musts)
    print(f"\n{'the data plane':{width}}  {'required':34}{'found':>14}")
    for must in musts:
        print(f"{must.what:{width}}  {must.required:34}{must.found:>14}  {says[must.reached]}")


def main() -> None:
    """The command."""
    found = [Path(tempfile.gettempdir()) / name for name in _FILES]
    show([Must(**must) for path in found if path.exists() for must in json.loads(path.read_text()).get("musts", ())])


if __name__ == "__main__":
    main()
