"""Prompts of the divergence task: whole texts to continue, of several kinds, drawn from a seed."""

from __future__ import annotations

from kvguard.compare.draw import Draw
from kvguard.compare.retrieval import filler
from kvguard.shadow.prompts import SELF_CHECK


def divergence_texts(seed: int, count: int, sentences: int) -> tuple[str, ...]:
    """`count` prompts: kvguard's own short ones, and every third a long text of `sentences` generated sentences."""
    prompts = []
    for number in range(count):
        draw = Draw(seed, "divergence", number)
        short = SELF_CHECK[number % len(SELF_CHECK)]
        long = number % 3 == 2 or number >= len(SELF_CHECK)
        prompts.append(f"{filler(draw, sentences)}\n\nRetell this in your own words." if long else short)
    return tuple(prompts)
