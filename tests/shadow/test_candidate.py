"""Which requests can be replayed, and why the others cannot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.shadow.candidate import Candidate, Reason, Rules, Skipped, read_request
from kvguard.shadow.models import Stratum

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def read(path: str, request: Any, *headers: tuple[bytes, bytes], rules: Rules | None = None) -> Candidate | Skipped:
    return read_request(path, json.dumps(request).encode(), headers, rules or Rules())


def chat(**fields: Any) -> Candidate | Skipped:
    return read(CHAT, {"messages": [USER]} | fields)


def completion(**fields: Any) -> Candidate | Skipped:
    return read(COMPLETION, {"prompt": "Hello"} | fields)


def test_a_chat_is_a_candidate() -> None:
    found = chat(model="m", stream=True, stream_options={"include_usage": True}, temperature=0.3)
    assert isinstance(found, Candidate)
    assert (found.kind, found.turns, found.adapter, found.prompt_chars) == ("chat", 1, "", len("userHello"))
    assert found.body["temperature"] == 0.3


def test_a_completion_of_token_ids_counts_each_as_a_token() -> None:
    found = completion(prompt=list(range(300)))
    assert isinstance(found, Candidate)
    assert found.estimated_tokens == 300
    assert found.stratum == Stratum("257-1024", "1")


def test_text_beyond_ascii_counts_by_its_bytes() -> None:
    found = completion(prompt="漢" * 400)
    assert isinstance(found, Candidate)
    assert found.prompt_chars == 1200


@pytest.mark.parametrize("prompt", [["one"], [[1, 2]]])
def test_a_list_of_one_prompt_is_one_prompt(prompt: Any) -> None:
    assert isinstance(completion(prompt=prompt), Candidate)


def test_turns_are_the_answers_asked_for() -> None:
    answer = {"role": "assistant", "content": "Yes"}
    system = {"role": "system", "content": "Be brief"}
    messages = [system, USER, answer, USER, answer, USER]
    found = chat(messages=messages)
    assert isinstance(found, Candidate)
    assert found.turns == 3
    continued = chat(messages=[*messages, answer], continue_final_message=True, add_generation_prompt=False)
    assert isinstance(continued, Candidate)
    assert continued.turns == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "n>1"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "beam_search"),
        ({"echo": True}, "echo"),
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"allowed_token_ids": [1, 2]}, "forced_tokens"),
        ({"thinking_token_budget": 20}, "forced_tokens"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_output"),
        ({"guided_json": {}}, "structured_output"),
        ({"response_format": {"type": "json_object"}}, "structured_output"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer"),
        ({"vllm_xargs": {"a": 1}}, "custom_arguments"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"max_tokens": 0}, "not_generation"),
        ({"n": "two"}, "not_json"),
        ({"max_tokens": True}, "not_json"),
    ],
)
def test_what_neither_kind_can_replay(fields: dict[str, Any], reason: str) -> None:
    assert chat(**fields) == Skipped(Reason(reason))
    assert completion(**fields) == Skipped(Reason(reason))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "use_beam_search": False},
        {"n": None, "logit_bias": None, "response_format": {"type": "text"}, "structured_outputs": None},
        {"thinking_token_budget": -1, "stop_token_ids": [7], "stop": ["\n"], "bad_words": ["no"], "min_tokens": 3},
        {"user": "someone", "metadata": {"a": "b"}, "unknown_field": 1},
    ],
)
def test_what_says_nothing_special_is_replayed(fields: dict[str, Any]) -> None:
    assert isinstance(chat(**fields), Candidate)
    assert isinstance(completion(**fields), Candidate)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "images"),
        ({"type": "input_image", "image_url": "data:"}, "images"),
        ({"image_url": "https://example.com/a.png"}, "images"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "images"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "prompt_embeds", "data": "AAAA"}, "prompt_embeds"),
        ({"type": "text", "text": "a", "audio_embeds": "AAAA"}, "audio"),
        ({"type": "hologram"}, "other_content"),
        ({"type": ["text"]}, "other_content"),
        (7, "not_json"),
    ],
)
def test_content_that_is_not_text(part: Any, reason: str) -> None:
    text = {"type": "text", "text": "What is this?"}
    assert chat(messages=[USER, {"role": "user", "content": [text, part]}]) == Skipped(Reason(reason))


def test_text_parts_and_past_tool_calls_are_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}, "plain"]}
    assert isinstance(chat(messages=[USER, call, result]), Candidate)


@pytest.mark.parametrize(
    ("fields", "free", "probed"),
    [
        ({"tool_choice": "none"}, False, True),
        ({}, False, False),
        ({}, True, True),
        ({"tool_choice": None}, False, False),
        ({"tool_choice": "auto"}, True, True),
        ({"tool_choice": "required"}, True, False),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, True, False),
        ({"tools": [{"type": "function", "function": {"name": "look", "strict": True}}]}, True, False),
    ],
)
def test_tools_are_replayed_where_no_grammar_shapes_the_answer(fields: Any, free: bool, probed: bool) -> None:
    found = read(CHAT, {"messages": [USER], "tools": [TOOL]} | fields, rules=Rules(free_auto_tools=free))
    assert isinstance(found, Candidate) if probed else found == Skipped(Reason.TOOLS)


@pytest.mark.parametrize(
    ("values", "required", "outcome"),
    [
        ([], False, None),
        ([], True, "not_opted_in"),
        ([b"on"], True, None),
        ([b" ON "], True, None),
        ([b"off"], False, "opted_out"),
        ([b"of"], False, "opted_out"),
        ([b""], True, "opted_out"),
        ([b"on", b"off"], True, "opted_out"),
        ([b"on, off"], True, "opted_out"),
    ],
)
def test_consent(values: list[bytes], required: bool, outcome: str | None) -> None:
    headers = [(b"X-KVGuard-Shadow", value) for value in values]
    found = read(CHAT, {"messages": [USER]}, *headers, rules=Rules(require_opt_in=required))
    assert isinstance(found, Candidate) if outcome is None else found == Skipped(Reason(outcome))


def test_consent_comes_before_the_body_is_read() -> None:
    assert read_request(CHAT, b"{not json", [(b"x-kvguard-shadow", b"off")]) == Skipped(Reason.OPTED_OUT)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions/batch", "/v1/models", ""])
def test_other_paths_generate_nothing(path: str) -> None:
    assert read(path, {"prompt": "Hello"}) == Skipped(Reason.NOT_GENERATION)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b"\xff\xfe\x00", b'{"prompt": NaN}', b"[" * 200_000, b'{"prompt": ' + b"1" * 9000 + b"}"],
)
def test_what_is_no_json_object(body: bytes) -> None:
    assert read_request(COMPLETION, body, []) == Skipped(Reason.NOT_JSON)


def test_a_large_body_is_not_parsed() -> None:
    assert read_request(COMPLETION, b"{" * 101, [], Rules(max_body_bytes=100)) == Skipped(Reason.TOO_LARGE)


@pytest.mark.parametrize("prompt", ["", [], None, 5, [1, "a"], [[1], ["a"]], [-1], [True]])
def test_prompts_vllm_refuses(prompt: Any) -> None:
    assert completion(prompt=prompt) == Skipped(Reason.NOT_JSON)


def test_several_prompts_are_several_answers() -> None:
    assert completion(prompt=["a", "b"]) == Skipped(Reason.SEVERAL_ANSWERS)


def test_adapters_need_a_reference_that_knows_them() -> None:
    request = {"prompt": "Hello", "model": "my-lora"}
    names = frozenset({"base", "alias"})
    assert read(COMPLETION, request, rules=Rules(base_models=names)) == Skipped(Reason.ADAPTER)
    found = read(COMPLETION, request, rules=Rules(base_models=names, adapters=frozenset({"my-lora"})))
    assert read(
        COMPLETION, request | {"model": "other"}, rules=Rules(base_models=names, adapters=frozenset({"my-lora"}))
    ) == Skipped(Reason.ADAPTER)
    assert isinstance(found, Candidate)
    assert found.stratum.adapter == "my-lora"
    base = read(COMPLETION, request | {"model": "alias"}, rules=Rules(base_models=names))
    assert isinstance(base, Candidate)
    assert base.adapter == ""


def test_no_prompt_in_the_representation() -> None:
    assert "Hello" not in repr(chat())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4) | st.sampled_from(["text", "user", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "content", "x"]), inner),
    max_leaves=8,
)
names = st.sampled_from(["messages", "prompt", "n", "max_tokens", "tools", "tool_choice", "response_format", "model", "stop"])


@given(path=st.sampled_from([CHAT, COMPLETION]), request=st.dictionaries(names, json_values))
def test_never_raises(path: str, request: dict[str, Any]) -> None:
    for rules in (Rules(), Rules(base_models=frozenset({"a"}), adapters=frozenset({"b"}), free_auto_tools=True)):
        found = read(path, request, rules=rules)
        assert isinstance(found, Skipped) or (found.turns >= 1 and found.estimated_tokens >= 1)


@given(st.binary(max_size=40))
def test_never_raises_on_bytes(body: bytes) -> None:
    assert isinstance(read_request(CHAT, body, [(b"x", body)]), Skipped)
