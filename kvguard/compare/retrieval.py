"""Long-context retrieval: one of several needles in generated text, by length and depth, among distractors."""

from __future__ import annotations

from kvguard.compare.draw import Draw
from kvguard.compare.models import Item
from kvguard.compare.words import ADJECTIVES, NOUNS, PLACES, VERBS, WHEN
from kvguard.reference.prompts import Turn

TASK = "retrieval"
DEPTHS = (0, 25, 50, 75, 100)
NEEDLES = 4
MAX_TOKENS = 48
OVERHEAD = 200
"""Tokens kept for needles, distractors, question and template."""


def sentence(draw: Draw) -> str:
    """One sentence of filler."""
    subject, thing = draw.some(NOUNS, 2)
    return f"The {draw.one(ADJECTIVES)} {subject} {draw.one(VERBS)} the {draw.one(ADJECTIVES)} {thing} {draw.one(WHEN)}."


def filler(draw: Draw, sentences: int) -> str:
    """That many sentences."""
    return " ".join(sentence(draw) for _ in range(sentences))


def lengths(limit: int) -> tuple[int, ...]:
    """Target lengths in tokens: an eighth, a quarter, a half and nearly all of the model's limit."""
    return tuple(max(limit * share // 100, OVERHEAD + 64) for share in (12, 25, 50, 95))


def retrieval(seed: int, count: int, limit: int, tokens_per_hundred: int) -> tuple[Item, ...]:
    """`count` items spread evenly over lengths and depths. `tokens_per_hundred` sentences of filler measures the tokenizer."""
    cells = [(length, depth) for length in lengths(limit) for depth in DEPTHS]
    chosen = [cells[(number * 7) % len(cells)] for number in range(count)]  # 7 and 20 share no factor: every cell in turn
    return tuple(_item(seed, number, length, depth, tokens_per_hundred) for number, (length, depth) in enumerate(chosen))


def _item(seed: int, number: int, length: int, depth: int, tokens_per_hundred: int) -> Item:
    draw = Draw(seed, TASK, number)
    room = length - OVERHEAD - MAX_TOKENS
    lines = [sentence(draw) for _ in range(max(room * 100 // tokens_per_hundred, 2))]
    places = draw.some(PLACES, NEEDLES + 2)
    codes = _codes(draw, 2 * NEEDLES + 2)
    told = [f"The access code of {place} is {code}." for place, code in zip(places[:NEEDLES], codes, strict=False)]
    # Distractors: the asked place's expired code, and codes of other things.
    distracting = [
        f"The access code of {places[0]} used to be {codes[-1]}, and is not valid any more.",
        f"The postal code of {places[0]} is {codes[-2]}.",
        f"The access code of {places[NEEDLES]} is not known.",
    ]
    at = len(lines) * depth // 100
    placed = [(at, told[0])] + [(draw.below(len(lines) + 1), text) for text in (*told[1:], *distracting)]
    for place, text in sorted(placed, key=lambda pair: pair[0], reverse=True):
        lines.insert(place, text)
    question = f"What is the valid access code of {places[0]}? Reply with the five digits only."
    content = f"Read this text.\n\n{' '.join(lines)}\n\n{question}"
    return Item(
        task=TASK,
        id=f"{TASK}-{number:04d}",
        messages=(Turn(role="user", content=content),),
        answer=str(codes[0]),
        match="code",
        max_tokens=MAX_TOKENS,
        length=length,
        depth=depth,
    )


def _codes(draw: Draw, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        code = draw.between(10_000, 99_999)
        if code not in found:
            found.append(code)
    return found
