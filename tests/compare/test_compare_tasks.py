"""Generated tasks: the same everywhere, answerable by what they say, read as they should be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.compare.draw import Draw
from kvguard.compare.models import Item, Match
from kvguard.compare.own_tasks import own_items
from kvguard.compare.planning import TASKS, chosen_tasks, make_plan
from kvguard.compare.reading import broken, right
from kvguard.compare.reasoning import arithmetic, strings
from kvguard.compare.retrieval import DEPTHS, lengths, retrieval
from kvguard.vocabulary import UsageError

GOLDEN = "sha256:14e512a3e5f45f3f8a5191845e1fca4dea5a3b43be0af7360f66b06d8b928137"
"""Digest of the quick plan of seed 0: changes only with the tasks, never with the machine."""

MAKE = (
    "from kvguard.compare.planning import TASKS, make_plan;"
    "plan = make_plan(seed=0, quick=True, tasks=TASKS, own=(), max_model_len=2048, max_num_seqs=8, tokens_per_hundred=1200);"
    "print(plan.digest)"
)


def item(answer: str, match: Match) -> Item:
    return Item(task="t", id="t-0", messages=(), answer=answer, match=match, max_tokens=10)


@pytest.mark.parametrize("hashing", ["0", "1", "random"])
def test_the_same_seed_gives_the_same_plan_in_any_process(hashing: str) -> None:
    env = {"PYTHONHASHSEED": hashing, "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    done = subprocess.run([sys.executable, "-c", MAKE], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == GOLDEN


def test_another_seed_gives_other_items() -> None:
    one, other = arithmetic(0, 20), arithmetic(1, 20)
    assert all(a.messages != b.messages for a, b in zip(one, other, strict=True))


@given(st.integers(0, 2**64), st.integers(1, 1000))
def test_draws_stay_below_their_limit(seed: int, limit: int) -> None:
    draw = Draw(seed, "x")
    assert all(0 <= draw.below(limit) < limit for _ in range(5))
    assert sorted(Draw(seed).some(range(7), 7)) == list(range(7))


def test_draws_are_even() -> None:
    draw = Draw(5, "even")
    counts = [0] * 6
    for _ in range(6000):
        counts[draw.below(6)] += 1
    assert max(counts) - min(counts) < 200


def test_retrieval_covers_every_length_and_depth_up_to_the_limit() -> None:
    items = retrieval(0, 20, 2048, 1200)
    assert {(one.length, one.depth) for one in items} == {(length, depth) for length in lengths(2048) for depth in DEPTHS}
    assert max(lengths(2048)) == 1945


def test_the_needle_stands_once_at_its_depth_and_the_distractors_do_not_answer() -> None:
    for one in retrieval(3, 40, 4096, 1200):
        text = one.messages[0].content
        body = text.split("\n\n")[1]
        place = re.search(r"valid access code of (\w+)\?", text)
        assert place is not None
        needle = f"The access code of {place[1]} is {one.answer}."
        assert text.count(one.answer) == text.count(needle) == 1
        assert one.depth is not None
        where = body.index(needle) / max(len(body) - len(needle), 1)
        # Other needles and distractors before it move it by at most seven lines.
        assert abs(where - one.depth / 100) < 0.06 + 7 * 90 / len(body)


@pytest.mark.parametrize("seed", range(5))
def test_arithmetic_is_right(seed: int) -> None:
    for one in arithmetic(seed, 30):
        text, total = one.messages[0].content, 0
        for sentence in text.split(" How many")[0].split(". "):
            numbers = [int(n) for n in re.findall(r"\d+", sentence)]
            if " has " in sentence:
                total = numbers[0]
            elif "buys" in sentence:
                total += numbers[0] * numbers[1]
            elif "gives" in sentence:
                total -= numbers[0]
            elif "grows" in sentence:
                total *= numbers[0]
        assert str(total) == one.answer


def test_strings_are_right() -> None:
    for one in strings(2, 60):
        text = one.messages[0].content
        found = re.search(r"`(\w+)`", text)
        assert found is not None
        word = found[1]
        for sentence in text.split("What is")[0].split(". ")[1:]:
            if "backwards" in sentence:
                word = word[::-1]
            elif "first letter" in sentence:
                word = word[1:]
            elif "at its end" in sentence:
                word += sentence.split("letter ")[1][0]
            elif "last letter" in sentence:
                word = word[-1] + word[:-1]
        assert word == one.answer


@pytest.mark.parametrize(
    ("answer", "match", "text", "want"),
    [
        ("12345", "code", "The code is 12345.", True),
        ("12345", "code", "54321, or 12345", False),
        ("12345", "code", "912345", False),
        ("42", "number", "3 + 39 = 42. Answer: 42", True),
        ("42", "number", "Answer: 1,042", False),
        ("1042", "number", "so there are 1,042", True),
        ("42", "number", "Answer: 42 marbles, of 50", True),
        ("42", "number", "no idea", False),
        ("tkram", "text", "steps\nAnswer: `TKRAM`.", True),
        ("tkram", "text", "tkramx", False),
        ("tkram", "text", "first market\ntkram", True),
        ("Paris", "contains", "It is paris!", True),
        ("Paris", "contains", "It is Lyon", False),
        ("42", "number", "", False),
    ],
)
def test_answers_are_read(answer: str, match: Match, text: str, want: bool) -> None:
    assert right(item(answer, match), text) is want


@given(st.text(max_size=200), st.sampled_from(["code", "number", "text", "contains"]))
def test_any_text_can_be_read(text: str, match: Match) -> None:
    assert right(item("12345", match), text) in (True, False)
    assert broken(text) in ("", "repeated word")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("!" * 60, True),
        ("\n" * 48, True),
        ("the " * 20, True),
        ("a b " * 5, False),
        ("Answer: 4", False),
        ("", False),
        ("no no no yes", False),
    ],
)
def test_broken_text_is_seen(text: str, want: bool) -> None:
    assert bool(broken(text)) is want


def test_task_names() -> None:
    assert chosen_tasks("") == TASKS
    assert chosen_tasks("strings, retrieval,strings") == ("strings", "retrieval")
    with pytest.raises(UsageError, match="--tasks 'gsm8k': required are some of retrieval"):
        chosen_tasks("gsm8k")


def test_a_plan_without_load_has_none_and_max_tokens_overrides() -> None:
    plan = make_plan(
        seed=0,
        quick=False,
        tasks=("strings",),
        own=(),
        max_model_len=2048,
        max_num_seqs=None,
        tokens_per_hundred=1200,
        items=3,
        max_tokens=7,
    )
    assert [one.max_tokens for one in plan.items] == [7, 7, 7]
    assert (plan.throughput_runs, plan.texts) == (0, ())


def test_own_items(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    lines = [
        {"prompt": "2+2?", "answer": "4", "match": "number"},
        {
            "task": "chat",
            "id": "x",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "answer": "a",
        },
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    one, other = own_items(file)
    assert (one.task, one.id, one.match, one.max_tokens) == ("own", "own-0001", "number", 256)
    assert (other.task, other.id, len(other.messages)) == ("chat", "x", 2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: the line"),
        ('{"prompt": "x"}', "line 1: answer"),
        ('{"answer": "x"}', "line 1: required is one of `prompt` and `messages`"),
        ('{"prompt": "x", "answer": " "}', "line 1: answer: required is a text"),
        ('{"prompt": "x", "answer": "y", "match": "regex"}', "line 1: match"),
        ('{"prompt": "x", "answer": "y", "matched": "z"}', "line 1: matched"),
        ('{"prompt": "x", "answer": "y", "task": "<b>"}', "line 1: task"),
        ('{"prompt": "\\ud800", "answer": "y"}', "line 1: holds a lone surrogate"),
        ('{"task": "retrieval", "prompt": "x", "answer": "y"}', "line 1: task: 'retrieval' is a generated task's name"),
        ('{"id": "a", "prompt": "x", "answer": "y"}\n{"id": "a", "prompt": "x", "answer": "y"}', "line 2: id 'a' stands twice"),
        ("", "no item in it"),
    ],
)
def test_own_items_that_are_none_are_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(line)
    with pytest.raises(UsageError, match=re.escape(said)):
        own_items(file)
