"""Random draws that are the same on every machine and Python version: SHA-256 over a key and a counter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from kvguard.canonical import canonical_json

T = TypeVar("T")
_WIDTH = 8


class Draw:
    """Draws that depend on the seed and the names alone."""

    def __init__(self, seed: int, *names: str | int) -> None:
        self._key = canonical_json([seed, *names])
        self._counter = 0

    def below(self, limit: int) -> int:
        """A whole number from 0 to `limit` − 1, each as likely as any other; `limit` is positive and below 2**63."""
        most = (1 << 8 * _WIDTH) // limit * limit
        while True:
            block = hashlib.sha256(self._key + b"#" + str(self._counter).encode()).digest()
            self._counter += 1
            value = int.from_bytes(block[:_WIDTH], "big")
            if value < most:
                return value % limit

    def between(self, least: int, most: int) -> int:
        """A whole number from `least` to `most`, both included."""
        return least + self.below(most - least + 1)

    def one(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different places of `items`, in drawn order."""
        left = list(items)
        for place in range(count):
            other = place + self.below(len(left) - place)
            left[place], left[other] = left[other], left[place]
        return left[:count]
