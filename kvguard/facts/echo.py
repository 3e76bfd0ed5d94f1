"""What an engine's own statement of its cache dtype is worth, by version and by what decided the dtype."""

from __future__ import annotations

from kvguard.facts.versions import entry_for, in_range, read_data
from kvguard.vocabulary import Frozen


class Echo(Frozen):
    """One cause of a cache dtype, what log and metrics show then, and whether that is what runs."""

    cause: str
    what: str
    shows: str
    true: bool
    source: str


def echoes(version: str) -> tuple[Echo, ...]:
    """What log and metrics show for each cause this version knows."""
    return tuple(
        Echo(cause=entry["cause"], what=entry["what"], shows=entry["shows"], true=entry["true"], source=entry["source"])
        for entry in read_data("echo")["causes"]
        if in_range(version, entry["versions"])
    )


def ready_message(version: str) -> tuple[str, ...] | None:
    """What the engine process tells the front end once it is up (never a KV dtype); None where it was not read."""
    entry = entry_for(version, read_data("echo")["ready_message"])
    return None if entry is None else tuple(entry["carries"])


def stale_labels(version: str) -> dict[str, str]:
    """Labels of vllm:cache_config_info that this version may leave wrong, and why."""
    return {
        entry["label"]: entry["reason"] for entry in read_data("echo")["stale_labels"] if in_range(version, entry["versions"])
    }
