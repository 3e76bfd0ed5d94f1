"""Shadow settings from a command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.shadow.settings import Settings, parse_settings
from kvguard.vocabulary import UsageError


def test_nothing_given_is_the_defaults() -> None:
    assert parse_settings([]) == Settings()


def test_every_kind_of_value() -> None:
    settings = parse_settings(
        ["rate=0.5", "max-stall-ms=80", "queue_items=4", "greedy=yes", "require-opt-in=0", "prompt-multipliers=1, 2,4,8"]
    )
    assert settings == Settings(rate=0.5, max_stall_ms=80, queue_items=4, greedy=True, prompt_multipliers=(1, 2, 4, 8))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate", ["'rate'", "name=value"]),
        ("speed=1", ["'speed'", "no such setting", "max-stall-ms"]),
        ("rate=2", ["rate=2", "less than or equal to 1"]),
        ("rate=nan", ["rate=nan"]),
        ("queue-items=1.5", ["queue-items=1.5", "integer"]),
        ("greedy=perhaps", ["greedy=perhaps", "true or false"]),
        ("turn-multipliers=1,2", ["turn-multipliers=1,2"]),
        ("turn-multipliers=1,2,3,4", ["turn-multipliers=1,2,3,4"]),
        ("turn-multipliers=1,2,0", ["never left out"]),
        ("prompt-multipliers=1,1,1,inf", ["never left out"]),
        ("max-age-s=", ["max-age-s="]),
    ],
)
def test_errors_name_the_setting_and_what_is_wrong(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings([text])
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_setting_given_twice() -> None:
    with pytest.raises(UsageError, match="max-age-s: given twice"):
        parse_settings(["max-age-s=1", "max_age_s=2"])


@given(
    st.lists(
        st.sampled_from(["rate", "greedy", "turn-multipliers", "queue-items", "x\n"]).flatmap(
            lambda name: st.text(max_size=6).map(lambda value: f"{name}={value}")
        ),
        max_size=3,
    )
)
def test_only_usage_errors(texts: list[str]) -> None:
    try:
        settings = parse_settings(texts)
    except UsageError as refused:
        message = str(refused)
    else:
        message = ""
        assert 0 <= settings.rate <= 1
    assert "\n" not in message
