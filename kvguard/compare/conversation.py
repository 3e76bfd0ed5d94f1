"""Several turns with a system prompt: facts told turn by turn, one of them changed, then asked for."""

from __future__ import annotations

from kvguard.compare.draw import Draw
from kvguard.compare.models import Item
from kvguard.compare.words import NAMES, PLACES
from kvguard.reference.prompts import Turn

TASK = "conversation"
MAX_TOKENS = 48

_SYSTEM = (
    "You are the clerk of a storage house. You note which locker code belongs to whom. A code that is changed replaces the "
    "earlier one. When you are asked for a code you reply with its five digits and nothing else."
)


def conversation(seed: int, count: int) -> tuple[Item, ...]:
    """`count` conversations of four to seven user turns."""
    return tuple(_item(Draw(seed, TASK, number), number) for number in range(count))


def _item(draw: Draw, number: int) -> Item:
    people = draw.some(NAMES, draw.between(3, 5))
    codes = {name: draw.between(10_000, 99_999) for name in people}
    told = [
        (f"{name} from {draw.one(PLACES)} takes a locker with the code {codes[name]}.", name, codes[name]) for name in people
    ]
    changed = draw.one(people)
    codes[changed] = draw.between(10_000, 99_999)
    told.append((f"{changed} has changed the code to {codes[changed]}.", changed, codes[changed]))
    asked = draw.one(people)
    turns = [Turn(role="system", content=_SYSTEM)]
    for text, name, code in told:
        turns += [Turn(role="user", content=text), Turn(role="assistant", content=f"The code of {name} is {code}.")]
    turns.append(Turn(role="user", content=f"What is the code of {asked} now?"))
    return Item(
        task=TASK,
        id=f"{TASK}-{number:04d}",
        messages=tuple(turns),
        answer=str(codes[asked]),
        match="code",
        max_tokens=MAX_TOKENS,
    )
