"""Which metrics exist: kvguard's from its own families, vLLM's from the facts, and the few of others that alerts need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from kvguard.facts.metric_names import all_series_names, other_series
from kvguard.telemetry.metrics import FAMILIES
from kvguard.telemetry.shadow_metrics import SHADOW_FAMILIES

VLLM = "0.32.0"
"""The version whose metric names are used."""

OTHERS = frozenset({"up", "kube_pod_container_status_ready", "kube_pod_container_status_last_terminated_exitcode"})
"""Prometheus' own, and kube-state-metrics' where an exit code is the only trace."""

_HISTOGRAM = ("_bucket", "_sum", "_count")
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_SELECTOR = re.compile(r"\{[^{}]*\}")
_DURATION = re.compile(r"\[[^\]]*\]|\$__\w+|\$\w+")
_NAME = re.compile(r"(?<![\w:.])[a-zA-Z_][\w:]*(?!\s*\()(?![\w:])")
_WORDS = frozenset(
    {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "inf", "nan", "e"}
)


def defined() -> frozenset[str]:
    """Every series name that a query may use, recorded ones not among them."""
    ours = [name for family in (*FAMILIES, *SHADOW_FAMILIES) for name in _series(family.name, family.kind)]
    engine = {*all_series_names(), *other_series(VLLM)}
    counted = {f"{name}_total" for name in engine}
    parts = {name + suffix for name in engine for suffix in _HISTOGRAM}
    return frozenset({*ours, *engine, *counted, *parts, *OTHERS})


def _series(name: str, kind: str) -> tuple[str, ...]:
    suffixes = {"histogram": _HISTOGRAM, "summary": _HISTOGRAM[1:]}.get(kind, ("",))
    return tuple(name + suffix for suffix in suffixes)


def used(query: str) -> frozenset[str]:
    """The series names in a PromQL expression."""
    bare = _SELECTOR.sub(" ", _STRINGS.sub('""', query))
    bare = _DURATION.sub(" ", _GROUPING.sub(" ", bare))
    return frozenset(name for name in _NAME.findall(bare) if name not in _WORDS)


def rules(path: Path) -> list[dict[str, Any]]:
    """The rules in a rule file, in order."""
    groups = yaml.safe_load(path.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded(path: Path) -> frozenset[str]:
    """The names that a rule file records."""
    return frozenset(rule["record"] for rule in rules(path) if "record" in rule)


def undefined(query: str, known: frozenset[str]) -> list[str]:
    """The names in a query that nothing defines."""
    return sorted(used(query) - known)
