"""The words that generated tasks are made of. Changing one changes every generated item, and so the plan's digest."""

from __future__ import annotations

PLACES = (
    "Arlen", "Bexford", "Calder", "Dunmore", "Elstow", "Farley", "Gorsby", "Halden", "Ilford", "Jarrow", "Kelso", "Lorton",
    "Marsham", "Norwell", "Oakham", "Penrose", "Quenby", "Rothley", "Selwick",
    "Thornby", "Upwood", "Varley", "Wexham", "Yarrow",
)  # fmt: skip
NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Hugo", "Irene", "Jonas", "Karla", "Louis")
THINGS = ("apples", "books", "candles", "coins", "cups", "eggs", "keys", "lamps", "marbles", "pens", "plates", "stamps")
LETTERED = (
    "garden", "window", "market", "planet", "silver", "bridge", "castle", "forest", "harbor", "island", "jacket", "kitten",
    "ladder", "mirror", "needle", "orange", "pencil", "rabbit", "saddle", "timber",
)  # fmt: skip
ADJECTIVES = ("old", "quiet", "narrow", "bright", "heavy", "distant", "careful", "green", "cold", "patient", "broken", "warm")
NOUNS = ("miller", "river", "teacher", "cart", "clock", "harvest", "letter", "roof", "sailor", "stone", "valley", "wagon")
VERBS = ("passed", "watched", "followed", "remembered", "carried", "crossed", "left", "painted", "heard", "repaired")
WHEN = ("in the morning", "before the rain", "after supper", "last autumn", "without a word", "near the mill", "at noon")
