"""The log templates and metric names as data."""

from __future__ import annotations

import pytest

from kvguard.facts.log_lines import log_lines, request_log_files
from kvguard.facts.metric_names import all_series_names, label_note, series_names
from kvguard.facts.versions import EXAMINED


def test_every_template_names_versions_and_source() -> None:
    for line in log_lines():
        assert any(line.belongs_to(version) for version in EXAMINED), line.pattern.pattern
        assert line.source, line.pattern.pattern
        assert line.kind in {"dtype", "int", "gib", "flag", "text", "layer"}


def test_a_template_has_a_value_group_or_a_constant() -> None:
    for line in log_lines():
        assert ("value" in line.pattern.groupindex) != (line.constant is not None), line.pattern.pattern


def test_request_lines_are_named() -> None:
    assert "logger.py" in request_log_files()


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("0.8.5", ("vllm:gpu_cache_usage_perc",)),
        ("0.10.2", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        ("0.14.1", ("vllm:kv_cache_usage_perc",)),
        ("0.32.0+cpu", ("vllm:kv_cache_usage_perc",)),
    ],
)
def test_the_usage_gauge_was_renamed(version: str, names: tuple[str, ...]) -> None:
    assert series_names("kv_pinned_ratio", version) == names


def test_labels_carry_what_their_name_does_not_say() -> None:
    assert "never corrected" in label_note("cache_dtype")
    assert label_note("no such label") == ""
    assert "vllm:cache_config_info" in all_series_names()
