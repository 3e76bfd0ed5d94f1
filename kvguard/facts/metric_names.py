"""The names of vLLM's Prometheus series and of the labels of its cache description, by version."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from kvguard.facts.versions import in_range
from kvguard.vocabulary import Json


@cache
def _document() -> Json:
    return json.loads((files("kvguard.facts") / "data" / "metrics.json").read_text("utf-8"))


def series_names(meaning: str, version: str | None = None) -> tuple[str, ...]:
    """The names a series has had, preferred first; with a version, only the names that version exports.

    Meanings: cache_config_info, kv_pinned_ratio, running, waiting, preemptions_total, process_start, generated_total,
    prefix_queries_total, prefix_hits_total, drafted_total, accepted_total.
    """
    entries = _document()["series"][meaning]
    return tuple(e["name"] for e in entries if version is None or in_range(version, e["versions"]))


def meanings() -> tuple[str, ...]:
    """What the series that kvguard reads mean."""
    return tuple(_document()["series"])


@cache
def all_series_names() -> frozenset[str]:
    """Every series kvguard reads."""
    return frozenset(entry["name"] for entries in _document()["series"].values() for entry in entries)


def other_series(version: str) -> tuple[str, ...]:
    """Further series of the V1 engine that this version exports and kvguard does not read."""
    names = {
        entry["name"]
        for entry in _document()["other_series"]
        if entry.get("engine", "V1") == "V1" and in_range(version, entry["versions"])
    }
    return tuple(sorted(names))


def info_labels(version: str) -> tuple[str, ...]:
    """The labels of vllm:cache_config_info in this version."""
    return tuple(label for label, entry in _document()["labels"].items() if in_range(version, entry["versions"]))


def label_note(label: str) -> str:
    """What is known about a label of vllm:cache_config_info that its name does not say."""
    return str(_document()["labels"].get(label, {}).get("note", ""))
