"""The texts a calibration sees: ours, a user's file, and the digest of either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_fakes import refusal
from kvguard.reference.prompts import default_prompts, load_prompts, parse_prompts

OURS = "sha256:235750524ba06e89ed0eb0b6ae19e7c1a9cbb7dd532394b09e806624165b56d8"


def texts(text: str) -> list[str]:
    return [prompt.plain for prompt in parse_prompts(text, "f")]


def test_our_own_set_is_varied_small_and_does_not_change_unnoticed() -> None:
    ours = default_prompts()
    assert ours.digest == OURS, "changing the set changes everybody's calibrations: change this digest knowingly"
    assert ours == load_prompts(None)
    chats = [prompt for prompt in ours.prompts if prompt.messages]
    words = "".join(prompt.plain for prompt in ours.prompts)
    assert len(chats) >= 5
    assert any(len(chat.messages) > 2 for chat in chats)
    for sign in ("def ", "SELECT", "3.14159", "中" if "中" in words else "昨", "в", "ع", "ह", "、", "을", "🚢"):
        assert sign in words, sign
    assert len(words) < 20_000


def test_plain_text_is_a_prompt_a_block_or_a_prompt_a_line() -> None:
    assert texts("one\ntwo\n\nthree\n \t\n\n four\n") == ["one\ntwo", "three", "four"]
    assert texts("one\r\ntwo\r\n") == ["one", "two"]
    assert texts("\n\nonly one\n\n") == ["only one"]


def test_json_lines_hold_texts_and_chats() -> None:
    lines = [
        {"text": "a\n\nb"},
        {"prompt": "c"},
        {"messages": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}], "more": 1},
    ]
    found = parse_prompts("\n" + "\n".join(json.dumps(line) for line in lines), "f")
    assert [prompt.plain for prompt in found] == ["a\n\nb", "c", "d\n\ne"]
    assert found[2].as_json() == [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no prompt in it"),
        (" \n\t\n", "no prompt in it"),
        ('{"text": "a"}\nplain', "line 2: not JSON"),
        ('{"text": 1}', "line 1: required is an object with `text`"),
        ('{"text": " "}', "line 1: required"),
        ('{"messages": []}', "line 1: required"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "line 1: messages: each needs a role"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "line 1: messages"),
        ('{"text": "a", "messages": [{"role": "user", "content": "a"}]}', "line 1: required"),
        ('{"text": "\\ud800"}', "line 1: holds a lone surrogate"),
        ("one\n\ntw\0o\n", "line 3: holds a NUL byte"),
        ('{"text": "a"}\n\0', "line 2: holds a NUL byte"),
    ],
)
def test_what_is_no_prompt_is_named_by_line(text: str, words: str) -> None:
    assert words in refusal(lambda: parse_prompts(text, "f"))


@pytest.mark.parametrize(("content", "line"), [('["a"]', 1), ('\n"a"\n', 2), ("plain", 1), ('{"text": "a"}\n["b"]\n', 2)])
@pytest.mark.parametrize("name", ["p.jsonl", "p.JSONL", "p.ndjson"])
def test_a_file_named_as_json_lines_is_no_plain_text(tmp_path: Path, name: str, content: str, line: int) -> None:
    (tmp_path / name).write_text(content)
    assert f"{name} line {line}: " in refusal(lambda: load_prompts(tmp_path / name))


def test_a_file_is_read_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffgrün\n\nrot".encode())
    found = load_prompts(path)
    assert [prompt.text for prompt in found.prompts] == ["grün", "rot"]
    assert found.origin == str(path)
    path.write_bytes(b"\xff\xfe")
    assert "not UTF-8 at byte 0" in refusal(lambda: load_prompts(path))
    assert "no such file" in refusal(lambda: load_prompts(tmp_path / "none"))


def test_the_digest_is_of_the_words_not_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\n\ntwo\n")
    (tmp_path / "b").write_text('{"text": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "c").write_text("two\n\none\n")
    digests = [load_prompts(tmp_path / name).digest for name in "abc"]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2], "the order counts, since a first batch is cut"


@given(st.text(max_size=200))
def test_any_text_is_prompts_or_a_refusal(text: str) -> None:
    refused = refusal(lambda: parse_prompts(text, "f"))
    assert refused.startswith("prompt file f") or all(prompt.plain.strip() for prompt in parse_prompts(text, "f"))
