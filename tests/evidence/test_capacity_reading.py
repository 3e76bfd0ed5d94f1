"""Bytes per token prove a width, never a name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.evidence.capacity import capacity
from kvguard.evidence.layouts import Layout

SMALL = {"bfloat16": 23040.0, "float16": 23040.0, "fp8_e4m3": 11520.0, "fp8_e5m2": 11520.0, "nvfp4": 6480.0}


def uniform(sizes: dict[str, float]) -> tuple[Layout, ...]:
    return tuple(Layout(dtype=name, bytes_per_token=size) for name, size in sizes.items())


@pytest.mark.parametrize(
    ("kv_bytes", "tokens", "width", "candidates"),
    [
        (1024**3, 46592, 16, ("bfloat16", "float16")),
        (1024**3, 93184, 8, ("fp8_e4m3", "fp8_e5m2")),
        (1024**3, 165700, 4, ("nvfp4",)),
    ],
)
def test_a_width_is_proven(kv_bytes: int, tokens: int, width: int, candidates: tuple[str, ...]) -> None:
    reading = capacity(kv_bytes, tokens, uniform(SMALL))
    assert (reading.width, reading.candidates) == (width, candidates)
    assert reading.claim.value == f"{width}-bit"


@pytest.mark.parametrize(("off", "width"), [(1.019, 8), (0.981, 8), (1.03, None), (0.97, None)])
def test_two_percent(off: float, width: int | None) -> None:
    assert capacity(round(11520 * off * 1000), 1000, uniform(SMALL)).width == width


@pytest.mark.parametrize(
    ("kv_bytes", "tokens", "sizes", "reason"),
    [
        (None, 10, SMALL, "the cache's bytes are not known"),
        (10, None, SMALL, "the cache's tokens are not known"),
        (0, 10, SMALL, "the cache's bytes are not known"),
        (10, -1, SMALL, "the cache's tokens are not known"),
        (17000 * 10, 10, SMALL, "fit no dtype within 2%"),
        (100, 10, {}, "no arithmetic for this architecture"),
        (1000, 10, {"fp8_e4m3": 100.0, "bfloat16": 101.0}, "fit several widths"),
        (1000, 10, {"fp8_e4m3": 100.0, "something_new": 100.0}, "fit several widths"),
    ],
)
def test_unknown_says_why(kv_bytes: int | None, tokens: int | None, sizes: dict[str, float], reason: str) -> None:
    reading = capacity(kv_bytes, tokens, uniform(sizes))
    assert reading.width is None
    assert reading.claim.value is None
    assert reason in reading.reason


@given(
    st.integers(1, 10**15),
    st.integers(1, 10**9),
    st.dictionaries(st.sampled_from([*SMALL, "x"]), st.floats(1, 1e9), max_size=5),
)
def test_what_is_proven_is_within_the_tolerance(kv_bytes: int, tokens: int, sizes: dict[str, float]) -> None:
    reading = capacity(kv_bytes, tokens, uniform(sizes))
    assert reading.reason
    for name in reading.candidates:
        assert abs(kv_bytes / tokens - sizes[name]) <= 0.0201 * sizes[name]
    assert reading.width is None or reading.candidates
