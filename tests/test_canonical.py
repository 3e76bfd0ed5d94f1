from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.canonical import canonical_json, sha256_of

# RFC 8785, appendix B: IEEE 754 bits and the text they must have.
RFC_NUMBERS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555555", "333333333.3333333"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]


@pytest.mark.parametrize(("bits", "text"), RFC_NUMBERS)
def test_numbers_print_as_the_rfc_lists_them(bits: str, text: str) -> None:
    import struct

    assert canonical_json(struct.unpack(">d", bytes.fromhex(bits))[0]) == text.encode()


def test_keys_are_sorted_by_utf16_and_nothing_is_escaped_that_need_not_be() -> None:
    value = {
        "\u20ac": 1,
        "\r": 2,
        "\ufb33": 3,
        "1": 4,
        "\U0001f600": 5,
        "\x80": 6,
        "ö": [True, None, '\u20ac$\x0f\n"\\/'],
    }
    expected = '{"\\r":2,"1":4,"\x80":6,"ö":[true,null,"€$\\u000f\\n\\"\\\\/"],"€":1,"😀":5,"\ufb33":3}'
    assert canonical_json(value).decode() == expected


def test_what_json_cannot_say_is_an_error() -> None:
    for value in (math.nan, math.inf, [-math.inf], "\ud800", {1: 2}, {"a": b""}, {"a": {1}}):
        with pytest.raises(ValueError):  # noqa: PT011 - messages differ by kind
            canonical_json(value)


def test_digest_is_of_the_value_not_its_spelling() -> None:
    assert sha256_of({"b": 1.0, "a": (1, 2)}) == sha256_of({"a": [1, 2], "b": 1})
    assert sha256_of({}) == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_reads_back(number: float) -> None:
    assert float(json.loads(canonical_json(number))) == number


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


@given(JSON)
def test_reading_and_writing_again_changes_nothing(value: object) -> None:
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
