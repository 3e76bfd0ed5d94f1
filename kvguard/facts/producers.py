"""What the tools that write quantized checkpoints intend by the KV scales they write or leave out."""

from __future__ import annotations

from kvguard.facts.kv_dtypes import Fact
from kvguard.facts.versions import parse, read_data


def intended_scale(name: str | None, version: str | None, state: str) -> Fact | None:
    """Why scales in this state (a `ScaleState` value) are what the producer means, or None when nothing is known."""
    written = parse(version) if version else None
    for entry in read_data("producers")["producers"]:
        if entry["name"] != name or entry["state"] != state or written is None:
            continue
        below, since = parse(entry.get("below", "")), parse(entry.get("from", ""))
        if (below is None or written < below) and (since is None or written >= since):
            return Fact(reason=entry["reason"], source=entry["source"])
    return None
