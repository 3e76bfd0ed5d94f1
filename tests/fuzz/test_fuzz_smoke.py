"""A little of `python tests/fuzz/run.py`: the corpus itself, and some hundred changes of it for each parser."""

from __future__ import annotations

from random import Random

import pytest
from fuzz_inputs import mutated
from fuzz_targets import CORPUS, NOISY, TARGETS, Target, broken_by

from kvguard.vocabulary import KvguardError


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NOISY, "disabled", True)


def check(target: Target, data: bytes) -> None:
    error = broken_by(target, data)
    if error is not None:
        raise AssertionError(f"{target.name}: {data[:400]!r}") from error


@pytest.mark.parametrize("name", TARGETS)
def test_no_parser_breaks(name: str) -> None:
    target, draw = TARGETS[name], Random(7)
    seeds = target.seeds()
    for data in seeds:
        check(target, data)
    for _ in range(150):
        check(target, mutated(seeds, draw))


@pytest.mark.parametrize("name", TARGETS)
def test_something_of_each_corpus_is_accepted(name: str) -> None:
    """A corpus that is only refused would drive nothing."""
    target = TARGETS[name]

    def accepted(data: bytes) -> bool:
        try:
            target.parse(data)
        except KvguardError:
            return False
        return True

    assert any(accepted(data) for data in target.seeds())


def test_the_corpus_is_small_and_every_folder_is_driven() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 300_000
