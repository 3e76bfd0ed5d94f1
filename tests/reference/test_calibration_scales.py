"""From what keys and values span to scales: the formula, rounding, and what is refused."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_fakes import refusal
from kvguard.reference.ranges import LayerRange, Ranges, Side, over_ranks, over_sequences
from kvguard.reference.scales import (
    DEFAULT_HEADROOM,
    Scales,
    layer_index,
    parse_scales,
    report_layers,
    scale_of,
    scales_from,
    unit_scales,
)
from kvguard.vocabulary import PolicyRefusal


def side(*amax: float, count: int = 100, saturated: int = 0, underflowed: int = 0, subnormal: int = 0) -> Side:
    return Side(amax=amax, count=count, saturated=saturated, underflowed=underflowed, subnormal=subnormal)


def ranges(k: Side, v: Side, name: str = "model.layers.0.self_attn.attn") -> Ranges:
    return {name: LayerRange(k=k, v=v)}


def test_the_largest_value_lands_at_448_over_the_headroom() -> None:
    assert scale_of(448.0, 1.0) == 1.0
    assert scale_of(10.6875, 2.0) == 196 / 256 / 16  # 0.04771…, rounded up
    found = scales_from(ranges(side(7.0, 10.6875, 6.0), side(0.6)), DEFAULT_HEADROOM)
    assert found == Scales(k={0: 0.0478515625}, v={0: 176 / 256 / 256})


@given(st.floats(1e-6, 1e6), st.floats(1, 64))
def test_scales_are_rounded_up_by_at_most_one_percent(largest: float, headroom: float) -> None:
    exact = largest * headroom / 448
    scale = scale_of(largest, headroom)
    assert exact <= scale * (1 + 1e-12)
    assert scale <= exact * 1.01
    assert struct.pack(">f", scale)[2:] == b"\0\0", "a bfloat16 is the upper half of a float32"


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_values_from_which_no_scale_follows_are_named(bad: float) -> None:
    with pytest.raises(PolicyRefusal, match=r"layer model\.layers\.0\.self_attn\.attn: the largest value is"):
        scales_from(ranges(side(1.0), side(bad)), 2.0)


@pytest.mark.parametrize("bad", [1e-50, 1e42])
def test_values_whose_scale_no_float32_holds_are_named(bad: float) -> None:
    with pytest.raises(PolicyRefusal, match=r"the largest key is .*, whose scale no float32 holds"):
        scales_from(ranges(side(bad), side(1.0)), 2.0)


@pytest.mark.parametrize("name", ["attn", "blocks.3.experts.4.attn"])
def test_a_layer_without_one_index_is_refused(name: str) -> None:
    with pytest.raises(PolicyRefusal, match="no single index"):
        layer_index(name)


def test_the_report_says_what_scale_one_would_lose() -> None:
    measured = ranges(side(10.0, 20.0, count=2000, saturated=2, underflowed=10, subnormal=100), side(0.5, count=0))
    [row] = report_layers(measured, scales_from(measured, 1.0))
    assert row["layer"] == 0
    assert row["k"] == {
        "amax": 20.0,
        "amax_by_head": [10.0, 20.0],
        "scale": 0.044677734375,
        "at_scale_one": {"saturated": 0.001, "underflowed": 0.005, "subnormal": 0.05},
    }
    assert row["v"]["at_scale_one"]["saturated"] == 0.0
    json.dumps(row)


# --- ranks and sequences ---


def test_heads_of_ranks_stand_side_by_side_and_counts_add_up() -> None:
    one = ranges(side(1.0, 2.0, saturated=1), side(0.1, 0.2))
    two = ranges(side(3.0, 4.0, underflowed=2), side(0.3, 0.4))
    [layer] = over_ranks([one, two]).values()
    assert layer.k.amax == (1.0, 2.0, 3.0, 4.0)
    assert layer.k.largest == 4.0
    assert (layer.k.count, layer.k.saturated, layer.k.underflowed) == (200, 1, 2)


def test_sequences_keep_each_heads_largest() -> None:
    one = ranges(side(1.0, 9.0), side(0.5, 0.1))
    two = ranges(side(5.0, 2.0, subnormal=7), side(0.2, 0.3))
    [layer] = over_sequences([one, two]).values()
    assert (layer.k.amax, layer.v.amax, layer.k.subnormal) == ((5.0, 9.0), (0.5, 0.3), 7)


def test_what_does_not_belong_together_is_refused() -> None:
    one, other = ranges(side(1.0), side(1.0)), ranges(side(1.0), side(1.0), "model.layers.1.self_attn.attn")
    with pytest.raises(ValueError, match="different layers"):
        over_ranks([one, other])
    with pytest.raises(ValueError, match="different layers"):
        over_sequences([one, other])
    with pytest.raises(ValueError, match="longer"):
        over_sequences([one, ranges(side(1.0, 2.0), side(1.0))])


# --- scales from a file ---


def test_a_scales_file_and_its_document_are_the_same() -> None:
    given_scales = Scales(k={0: 0.1, 2: 0.2}, v={0: 0.3, 2: 0.4})
    assert given_scales.as_document() == {"layers": [0, 2], "k": [0.1, 0.2], "v": [0.3, 0.4]}
    assert parse_scales(given_scales.as_document(), "f") == given_scales
    assert parse_scales({"k": [1, 2], "v": [3, 4]}, "f") == Scales(k={0: 1.0, 1: 2.0}, v={0: 3.0, 1: 4.0})
    assert unit_scales((0, 5)) == Scales(k={0: 1.0, 5: 1.0}, v={0: 1.0, 5: 1.0})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "required is an object"),
        ({"k": [1.0]}, "f: v: required is a list"),
        ({"k": [], "v": []}, "f: k: required is a list"),
        ({"k": [0.0], "v": [1.0]}, "f: k[0]: required is a finite float32 above 0, found 0.0"),
        ({"k": [1.0, -1], "v": [1.0, 1.0]}, "f: k[1]"),
        ({"k": [True], "v": [1.0]}, "f: k[0]"),
        ({"k": [1e999], "v": [1.0]}, "f: k[0]"),
        ({"k": ["1"], "v": [1.0]}, "f: k[0]"),
        ({"k": [1e39], "v": [1.0]}, "f: k[0]: required is a finite float32 above 0, found 1e+39"),
        ({"k": [10**400], "v": [1.0]}, "f: k[0]: required is a finite float32 above 0, found 1000"),
        ({"k": [1.0], "v": [1e-50]}, "f: v[0]: required is a finite float32 above 0, found 1e-50"),
        ({"k": [1.0], "v": [1.0], "scale": 1}, "f: scale: unknown key; known are k, v, layers"),
        ({"k": [1.0], "v": [1.0], "a\nb": 1}, "f: a\ufffdb: unknown key"),
        ({"k": [1.0, 2.0], "v": [1.0]}, "f: layers"),
        ({"k": [1.0, 2.0], "v": [1.0, 2.0], "layers": [0, 0]}, "f: layers"),
        ({"k": [1.0], "v": [1.0], "layers": ["0"]}, "f: layers"),
        ({"k": [1.0], "v": [1.0], "layers": [-1]}, "f: layers"),
    ],
)
def test_a_scales_file_that_is_none(document: object, words: str) -> None:
    assert words in refusal(lambda: parse_scales(document, "f"))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda c: st.lists(c) | st.dictionaries(st.text(max_size=5), c),
    )
)
def test_any_document_is_read_or_refused(document: object) -> None:
    assert "\n" not in refusal(lambda: parse_scales(document, "f"))
