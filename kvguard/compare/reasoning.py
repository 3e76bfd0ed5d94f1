"""Reasoning with exact answers: arithmetic in several steps, and words that are changed step by step."""

from __future__ import annotations

from kvguard.compare.draw import Draw
from kvguard.compare.models import Item, Match
from kvguard.compare.words import LETTERED, NAMES, THINGS
from kvguard.reference.prompts import Turn

ARITHMETIC = "arithmetic"
STRINGS = "strings"
MAX_TOKENS = 320
_END = "Work step by step, and end with one line `Answer: ` followed by"


def arithmetic(seed: int, count: int) -> tuple[Item, ...]:
    """`count` word problems of two to five steps; the answer is a whole number that is not negative."""
    return tuple(_sum(Draw(seed, ARITHMETIC, number), number) for number in range(count))


def strings(seed: int, count: int) -> tuple[Item, ...]:
    """`count` words to change in two to four steps."""
    return tuple(_word(Draw(seed, STRINGS, number), number) for number in range(count))


def _sum(draw: Draw, number: int) -> Item:
    name, thing, total = draw.one(NAMES), draw.one(THINGS), draw.between(12, 60)
    told = [f"{name} has {total} {thing}."]
    for _ in range(draw.between(2, 5)):
        kind = draw.below(3)
        if kind == 0:
            bags, each = draw.between(2, 6), draw.between(2, 9)
            total += bags * each
            told.append(f"{name} buys {bags} bags with {each} {thing} in each.")
        elif kind == 1:
            less = draw.between(1, total - 1) if total > 1 else 0
            total -= less
            told.append(f"{name} gives {less} {thing} away.")
        else:
            friends = draw.between(2, 4)
            total *= friends
            told.append(f"Then the number of {thing} grows to {friends} times what it was.")
    question = f"How many {thing} does {name} have now? {_END} the number."
    return _item(ARITHMETIC, number, f"{' '.join(told)} {question}", str(total), "number")


def _word(draw: Draw, number: int) -> Item:
    word = draw.one(LETTERED)
    told = [f"Start with the word `{word}`."]
    for _ in range(draw.between(2, 4)):
        kind = draw.below(4)
        if kind == 0:
            word = word[::-1]
            told.append("Write it backwards.")
        elif kind == 1 and len(word) > 3:
            word = word[1:]
            told.append("Remove its first letter.")
        elif kind == 2:
            letter = draw.one("bdfgklmnprst")
            word += letter
            told.append(f"Put the letter {letter} at its end.")
        else:
            word = word[-1] + word[:-1]
            told.append("Move its last letter to the front.")
    return _item(STRINGS, number, f"{' '.join(told)} What is the result? {_END} the result.", word, "text")


def _item(task: str, number: int, content: str, answer: str, match: Match) -> Item:
    return Item(
        task=task,
        id=f"{task}-{number:04d}",
        messages=(Turn(role="user", content=content),),
        answer=answer,
        match=match,
        max_tokens=MAX_TOKENS,
    )
