"""A 16-bit engine as the reference: what it must prove first, and reading what it scored."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.engine.client import Answer, EngineClient
from kvguard.record.build import build_record
from kvguard.reference.external import NOT_BY_RECORD, Asked, Primary, ask_reference, run_teacher_forced
from kvguard.reference.inside import PassResult
from kvguard.reference.models import EXACT, Choice, Decode
from kvguard.shadow.references import External
from kvguard.vocabulary import ScaleState
from record_samples import sample

CANARY = "quixotic-bandicoot-58213"
PRIMARY = Primary("0.32.0", frozenset({"m"}))
DECODE = Decode((1, 2, 3), (10, 11), (-1.0, -0.5), (((10, -1.0), (12, -1.2)), ((11, -0.5), (13, -3.0))))
PROVEN = {"x-kvguard-kv-cache-dtype": "bfloat16", "x-kvguard-confidence": "proven"}


class Engine:
    """Another engine: its model list, its version, and its answer to completions."""

    target = "http://other"

    def __init__(self, completion: Any = None, *, headers: dict[str, str] = PROVEN, version: str | None = "0.32.0") -> None:
        self.cards: Any = [{"id": "lora", "parent": "m"}, {"id": "m", "parent": None}]
        self.listed: Answer | None = None
        self._completion = completion
        self._headers = headers
        self._version = version
        self.asked: list[dict[str, Any]] = []

    async def models(self) -> Answer:
        return self.listed or Answer(200, {"data": self.cards}, headers=self._headers)

    async def version(self) -> str | None:
        return self._version

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        assert path == "/v1/completions"
        self.asked.append(body)
        if isinstance(self._completion, Answer):
            return self._completion
        return Answer(200, self._completion, headers=self._headers)


def client(engine: Engine) -> EngineClient:
    return cast(EngineClient, engine)


def entry(logprob: Any) -> dict[str, Any]:
    return {"logprob": logprob, "rank": 1, "decoded_token": CANARY}


def scored(*positions: Any) -> dict[str, Any]:
    prompt = [None, {"2": entry(-9.0)}, {"3": entry(-9.0)}]
    return {"choices": [{"text": CANARY, "prompt_logprobs": [*prompt, *positions]}]}


GOOD = scored({"10": entry(-1.5), "12": entry(-0.2), "77": entry(-4.0)}, {"11": entry(-0.25), "14": entry(-2.0)})


def run(engine: Engine, *choices: Choice) -> PassResult:
    return asyncio.run(run_teacher_forced(client(engine), "m", DECODE, choices or [EXACT]))


def test_the_decode_is_teacher_forced() -> None:
    engine = Engine(GOOD)
    [found] = run(engine).passes
    assert (found.logprobs, found.top1, found.label) == ((-1.5, -0.25), (12, 11), "16bit")
    assert found.at == ((-1.5, -0.2), (-0.25, None)), "what the reference does not say is unknown, not 0"
    [body] = engine.asked
    assert len(body.pop("cache_salt")) == 32
    assert body == {"model": "m", "prompt": [1, 2, 3, 10, 11], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 20}


def test_there_are_no_fake_quantized_passes() -> None:
    engine = Engine(GOOD)
    found = run(engine, EXACT, Choice(label="x", format="fp8_e4m3"))
    assert found.problem == "an external reference has no fake-quantized passes"
    assert engine.asked == []


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        CANARY,
        {},
        {"choices": []},
        {"choices": [None]},
        {"choices": [{"text": CANARY}]},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": {"a": CANARY}}]},
        {"choices": [{"prompt_logprobs": CANARY}]},
        scored(),
        scored({"10": entry(-1.5)}),
        scored({"10": entry(-1.5)}, {"11": entry(-1.5)}, {"12": entry(-1.5)}),
        scored(None, {"11": entry(-1.0)}),
        scored({"12": entry(-1.5)}, {"11": entry(-1.0)}),
        scored({}, {"11": entry(-1.0)}),
        scored([1], {"11": entry(-1.0)}),
        scored({CANARY: entry(-1.0)}, {"11": entry(-1.0)}),
        scored({"10": None}, {"11": entry(-1.0)}),
        scored({"10": entry(None)}, {"11": entry(-1.0)}),
        scored({"10": entry(CANARY)}, {"11": entry(-1.0)}),
        scored({"10": entry(-(10**400))}, {"11": entry(-1.0)}),
        scored({"9" * 5000: entry(-1.0)}, {"11": entry(-1.0)}),
    ],
)
def test_an_answer_that_is_not_understood(body: Any) -> None:
    found = run(Engine(body))
    assert found.passes == ()
    assert found.problem.startswith("the reference engine's answer was not understood: ")
    assert CANARY not in found.problem


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["10", "11", "logprob", "x"]), inner),
    max_leaves=12,
)


@given(JSON, JSON)
def test_any_positions_are_an_answer_or_a_problem(first: Any, second: Any) -> None:
    found = run(Engine(scored(first, second)))
    assert bool(found.problem) is (found.passes == ())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            Answer(error="/v1/completions: no answer within 120 s"),
            "the reference engine: /v1/completions: no answer within 120 s",
        ),
        (Answer(400, {"error": {"message": f"input: {CANARY}"}}), "the reference engine: HTTP 400 without a readable answer"),
        (Answer(200, error=f"not JSON: {CANARY}"), "the reference engine: HTTP 200 without a readable answer"),
    ],
)
def test_errors_do_not_repeat_what_was_asked(answer: Answer, problem: str) -> None:
    assert run(Engine(answer)).problem == problem


def ask(engine: Engine, primary: Primary = PRIMARY, record: Any = None) -> Asked:
    async def read() -> Any:
        return record

    return asyncio.run(ask_reference(client(engine), primary, read if record is not None else None))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_a_proven_sixteen_bit_engine_of_this_version(version: str) -> None:
    found = ask(Engine(version=version))
    assert (found.problem, found.model, found.standing.equality) == ("", "m", NOT_BY_RECORD)
    assert found.standing.adapters == {"lora"}
    half = Engine(headers={**PROVEN, "x-kvguard-kv-cache-dtype": "float16"})
    assert ask(half, Primary(version, frozenset({"m"}))).problem == ""


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, "no x-kvguard-kv-cache-dtype header, no confidence"),
        ({"x-kvguard-kv-cache-dtype": "fp8_e4m3", "x-kvguard-confidence": "proven"}, "fp8_e4m3, proven"),
        ({"x-kvguard-kv-cache-dtype": "bfloat16", "x-kvguard-confidence": "echoed"}, "bfloat16, echoed"),
        ({"x-kvguard-kv-cache-dtype": "bfloat16"}, "bfloat16, no confidence"),
        ({"x-kvguard-kv-cache-dtype": "unknown", "x-kvguard-confidence": "unknown"}, "unknown, unknown"),
    ],
)
def test_an_engine_that_is_not_proven_sixteen_bit_is_no_reference(headers: dict[str, str], found: str) -> None:
    asked = ask(Engine(headers=headers))
    assert asked.problem == f"http://other: a reference must be proven 16-bit behind kvguard; found {found}"
    assert (asked.model, asked.standing.absent) == ("", False)


@pytest.mark.parametrize(("version", "words"), [("0.31.0", "vLLM 0.31.0"), (None, "vLLM of unknown version")])
def test_an_engine_of_another_version_is_no_reference(version: str | None, words: str) -> None:
    problem = ask(Engine(version=version)).problem
    assert (words in problem, "the primary 0.32.0" in problem) == (True, True)


def test_two_unknown_versions_are_not_the_same() -> None:
    assert "of unknown version" in ask(Engine(version=None), Primary("")).problem


@pytest.mark.parametrize(
    ("listed", "absent"),
    [
        (Answer(error="connection refused"), True),
        (Answer(503, {"error": "the engine is starting"}), True),
        (Answer(401, {"error": "Unauthorized"}), True),
        (Answer(200, {"data": []}, headers=PROVEN), False),
        (Answer(200, {"data": [{"id": "lora", "parent": "m"}, {"id": 3}, None]}, headers=PROVEN), False),
    ],
)
def test_an_engine_without_a_model_is_no_reference(listed: Answer, absent: bool) -> None:
    engine = Engine()
    engine.listed = listed
    asked = ask(engine)
    assert asked.problem.startswith("http://other: no model is served there (")
    assert (asked.model, asked.standing.absent) == ("", absent)


@pytest.mark.parametrize(
    ("cards", "same"),
    [
        ([{"id": "m"}], True),
        ([{"id": "other", "root": "/models/m/"}], True),
        ([{"id": "org/m"}], True),
        ([{"id": "other"}, {"id": "m"}], True),
        ([{"id": "other", "root": "/models/n"}], False),
    ],
)
def test_without_a_record_the_model_goes_by_its_name(cards: Any, same: bool) -> None:
    engine = Engine()
    engine.cards = cards
    problem = ask(engine).problem
    assert (problem == "") is same
    assert same or "serves n or other, the primary m; name its run record" in problem


OURS = build_record(sample())
THEIRS = build_record(sample(dtype="bfloat16", scales=ScaleState.NOT_QUANTIZED))
DIGEST = THEIRS["predicate"]["content_digest"]
NAMED = {**PROVEN, "x-kvguard-record": DIGEST}
WITH_RECORD = Primary("0.32.0", frozenset({"another name"}), OURS)


def test_with_its_record_the_reference_is_shown_to_be_equal() -> None:
    asked = ask(Engine(headers=NAMED), WITH_RECORD, (THEIRS, ""))
    assert (asked.problem, asked.record) == ("", DIGEST)
    assert asked.standing.equality == (
        f"by its run record {DIGEST[:19]}: nothing but the KV cache, sizes and addresses differs"
    )


@pytest.mark.parametrize(
    ("headers", "primary", "record", "words"),
    [
        (NAMED, WITH_RECORD, (None, "record there.json: No such file"), "record there.json: No such file"),
        (PROVEN, WITH_RECORD, (THEIRS, ""), "its answers name the record of no digest, the one given is sha256:"),
        ({**PROVEN, "x-kvguard-record": "sha256:12"}, WITH_RECORD, (THEIRS, ""), "name the record sha256:12, the one"),
        (NAMED, PRIMARY, (THEIRS, ""), "the primary has no run record"),
        (
            NAMED,
            Primary("0.32.0", record=build_record(sample(extra_argv=("--enforce-eager",)))),
            (THEIRS, ""),
            "more than its KV cache, by their records: argv.--enforce-eager (True, there nothing)",
        ),
    ],
)
def test_a_record_that_shows_no_equality_refuses(headers: Any, primary: Primary, record: Any, words: str) -> None:
    asked = ask(Engine(headers=headers), primary, record)
    assert words in asked.problem
    assert not asked.standing.absent


def test_an_answer_of_another_engine_than_was_looked_at_is_not_used() -> None:
    def scored_by(digest: str) -> str:
        engine = Engine(Answer(200, GOOD, headers={"x-kvguard-record": digest}))
        return asyncio.run(run_teacher_forced(client(engine), "m", DECODE, [EXACT], DIGEST)).problem

    assert scored_by(DIGEST) == ""
    assert "replaced by another one" in scored_by("sha256:12")


def test_an_adapter_is_asked_for_by_its_name() -> None:
    engine = Engine(GOOD)
    asyncio.run(run_teacher_forced(client(engine), "m", replace(DECODE, adapter="lora"), [EXACT]))
    assert engine.asked[0]["model"] == "lora"


def test_both_behind_the_runners_interface() -> None:
    async def use() -> None:
        engine = Engine(GOOD)
        reference = External(client(engine), PRIMARY)
        assert await reference.unavailable() == ""
        assert (reference.standing.equality, reference.standing.max_tokens) == (NOT_BY_RECORD, None)
        scored = await reference.run(DECODE, [EXACT])
        assert (scored.problem, [one.label for one in scored.passes], engine.asked[0]["model"]) == ("", ["16bit"], "m")
        other = External(client(engine), Primary("0.31.0", frozenset({"m"})))
        assert (await other.unavailable()).startswith("http://other: runs vLLM 0.32.0")

    asyncio.run(use())
