"""Drive every parser with changed inputs: `python tests/fuzz/run.py --minutes 10`. Exit 1 when one broke.

What broke a parser is written to --out, one file an input, named after parser and error; copy it into corpus/ when it is cured.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random

from fuzz_inputs import mutated
from fuzz_targets import NOISY, TARGETS, Target, broken_by

TURN = 1.0
"""Seconds that a parser is driven before the next one's turn."""


def main() -> int:
    """Run, and say what was run."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0, help="how long in all (default: 10)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--target", choices=sorted(TARGETS), action="append", help="only these (default: all)")
    options.add_argument("--out", type=Path, help="where inputs that broke a parser go (default: a new directory)")
    given = options.parse_args()
    warnings.simplefilter("error")
    NOISY.disabled = True
    out = given.out or Path(tempfile.mkdtemp(prefix="kvguard-fuzz-found-"))
    chosen = [TARGETS[name] for name in given.target or TARGETS]
    counts, slowest, found = dict.fromkeys(TARGETS, 0), dict.fromkeys(TARGETS, 0.0), dict[str, str]()
    draw, until = Random(given.seed), time.monotonic() + 60 * given.minutes
    while time.monotonic() < until:
        for target in chosen:
            seeds, turn = target.seeds(), min(time.monotonic() + TURN, until)
            while time.monotonic() < turn:
                data = mutated(seeds, draw)
                begun = time.perf_counter()
                error = broken_by(target, data)
                slowest[target.name] = max(slowest[target.name], time.perf_counter() - begun)
                counts[target.name] += 1
                if error is not None:
                    _note(target, data, error, out, found)
    for target in chosen:
        print(f"{target.name:<14} {counts[target.name]:>9,} inputs, slowest {slowest[target.name]:.3f} s")
    print(f"{sum(counts.values()):,} inputs, {len(found)} ways to break" + (f", see {out}" if found else ""))
    return 1 if found else 0


def _note(target: Target, data: bytes, error: BaseException, out: Path, found: dict[str, str]) -> None:
    """Write the input down, once for each place in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no place"
    way = f"{target.name} {type(error).__name__} {place}"
    if way in found:
        return
    path = out / f"{target.name}-{type(error).__name__}-{hashlib.sha256(data).hexdigest()[:12]}"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    found[way] = str(path)
    print(f"{way}: {' '.join(str(error).split())[:200]}; {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
