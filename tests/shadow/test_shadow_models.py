"""Strata, and token ids that no repr shows."""

import pytest

from kvguard.shadow.models import PROMPT_STRATA, TURN_STRATA, Decode, Pass, Stratum, stratum


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (0, "0-256"),
        (256, "0-256"),
        (257, "257-1024"),
        (1024, "257-1024"),
        (1025, "1025-4096"),
        (4096, "1025-4096"),
        (4097, "4097+"),
    ],
)
def test_prompt_lengths_fall_into_their_stratum(tokens: int, prompt: str) -> None:
    assert stratum(tokens, 1) == Stratum(prompt, "1", "")
    assert prompt in PROMPT_STRATA


@pytest.mark.parametrize(("turns", "name"), [(1, "1"), (2, "2-4"), (4, "2-4"), (5, "5+"), (90, "5+")])
def test_turns_fall_into_their_stratum(turns: int, name: str) -> None:
    assert stratum(10, turns, "french") == Stratum("0-256", name, "french")
    assert name in TURN_STRATA


def test_no_repr_shows_a_token_id_or_a_logprob() -> None:
    decode = Decode((424242,), (535353,), (-0.646464,), (((535353, -0.646464),),), "stop")
    reference = Pass((-0.757575,), (535353,), ((-0.757575,),), "16bit")
    shown = repr(decode) + repr(reference)
    assert "stop" in shown
    assert "16bit" in shown
    for secret in ("424242", "535353", "646464", "757575"):
        assert secret not in shown
