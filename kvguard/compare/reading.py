"""Reading an answer: what it says, and whether it is right."""

from __future__ import annotations

import re

from kvguard.compare.models import Item

_CODE = re.compile(r"(?<!\d)\d{5}(?!\d)")
_ANSWER = re.compile(r"answer\s*(?:is)?\s*:?\s*", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"[^\W_]+")
_RUN, _LEAST, _SHARE = 16, 24, 0.8


def right(item: Item, text: str) -> bool:
    """Whether the text gives the item's answer; see `Match`."""
    if item.match == "contains":
        return item.answer.casefold() in text.casefold()
    if item.match == "code":
        found = _CODE.search(text)
        return found is not None and found[0] == item.answer
    parts = _ANSWER.split(text)
    if item.match == "number":
        after = _NUMBER.findall(parts[-1])
        numbers = after[:1] if len(parts) > 1 and after else _NUMBER.findall(text)[-1:]
        return bool(numbers) and _value(numbers[0]) == _value(item.answer)
    said = parts[-1].strip() if len(parts) > 1 else text.strip().rpartition("\n")[2]
    return _plain(said.split("\n")[0]) == _plain(item.answer)


def broken(text: str) -> str:
    """ "repeated word" for an answer that is one word, or one character, again and again; else ""."""
    words = _WORD.findall(text) or list(text.strip())
    run = longest = 0
    for before, word in zip(["", *words], words, strict=False):
        run = run + 1 if word == before else 1
        longest = max(longest, run)
    commonest = max((words.count(word) for word in set(words)), default=0) if len(words) >= _LEAST else 0
    same = re.search(r"(\S|\n)\1{31,}", text) is not None
    return "repeated word" if longest >= _RUN or (commonest and commonest >= _SHARE * len(words)) or same else ""


def _value(text: str) -> float | None:
    try:
        return float(text.replace(",", "").strip())
    except ValueError:
        return None


def _plain(text: str) -> str:
    return " ".join(_WORD.findall(text)).casefold()
