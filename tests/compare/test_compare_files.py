"""Results on disk, the gate's file, the arms' names and commands."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint_fakes import SMOLLM2, write
from compare_fakes import arm, arms, plan
from fake_engine import install
from kvguard.compare.arms import arm_of, chosen_arms, weak_or_why
from kvguard.compare.asking import Asker, request_seed
from kvguard.compare.counters import Counters
from kvguard.compare.directory import claim
from kvguard.compare.finished import read_arms
from kvguard.compare.gate import Gate, below, load_gate
from kvguard.compare.judge import judge
from kvguard.compare.models import AGAIN, REFERENCE, WEAK, Answered, ArmFile, Forced, Generated, Throughput
from kvguard.compare.results import Rows, Start, file_stem, read_arm, write_whole
from kvguard.compare.run import Wish, refuse_unanswerable
from kvguard.engine.client import Answer
from kvguard.vocabulary import EngineFailed, UsageError
from overlay_fakes import CONFIG, checkpoint, reread

START = Start(record_digest="sha256:" + "a" * 64, plan_digest="sha256:" + "b" * 64)


def answered(number: int) -> Answered:
    return Answered(task="arithmetic", item=f"arithmetic-{number:04d}", text="täxt\n", score=1.0, finish="stop")


def test_rows_survive_a_kill_and_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "arms" / "a.jsonl"
    rows = Rows(path)
    rows.begin(START)
    rows.add(answered(0))
    rows.add(Throughput(requests=1, tokens=2, prompt_tokens=3, seconds=0.5))
    with path.open("a") as file:  # what a kill in the middle of a write leaves
        file.write('{"kind": "answered", "task": "ar')
    rows.close()
    again = Rows(path)
    assert again.rows == [answered(0), Throughput(requests=1, tokens=2, prompt_tokens=3, seconds=0.5)]
    again.begin(START)
    again.add(answered(1))
    again.close()
    assert len(Rows(path).rows) == 3
    assert len(path.read_text().splitlines()) == 4
    assert path.stat().st_mode & 0o777 == 0o600


def test_rows_of_another_start_are_not_mixed(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.jsonl")
    rows.begin(START)
    rows.close()
    with pytest.raises(UsageError, match="results are of another engine start or plan"):
        Rows(tmp_path / "a.jsonl").begin(START.model_copy(update={"record_digest": "sha256:" + "c" * 64}))


def test_what_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"kind": "answered"}\n')
    with pytest.raises(UsageError, match="line 1: not a result"):
        Rows(tmp_path / "a.jsonl")


def test_a_full_disk_is_named_and_what_was_written_counts(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "a.jsonl")
    rows.begin(START)
    rows.add(answered(0))
    rows.close()
    again = Rows(tmp_path / "a.jsonl")
    again.begin(START)
    again.close()
    again._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 (closed with the rows)
    with pytest.raises(UsageError, match=r"a\.jsonl: cannot be written: No space left on device"):
        again.add(answered(1))
    again.close()
    assert Rows(tmp_path / "a.jsonl").rows == again.rows == [answered(0)]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "report.md").mkdir()
    with pytest.raises(UsageError, match=r"report\.md: cannot be written: Is a directory"):
        write_whole(tmp_path / "report.md", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


class FakeEngine:
    """An engine client that answers completions, and fails when told to."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._fails_after = fails_after

    async def post(self, path: str, body: dict[str, Any], deadline: float = 0) -> Answer:
        self.asked.append((path, body))
        if self._fails_after is not None and len(self.asked) > self._fails_after:
            return Answer(error="connection lost")
        choice = {"message": {"content": "Answer: 7"}, "finish_reason": "stop"}
        return Answer(status=200, body={"choices": [choice], "usage": {"completion_tokens": 3, "prompt_tokens": 30}})


def ask(tmp_path: Path, client: FakeEngine, **more: Any) -> Rows:
    rows = Rows(tmp_path / "a.jsonl")
    rows.begin(START)
    asker = Asker(client, "m", True, plan(items=9), rows, lambda *_: None, concurrency=1, **more)  # type: ignore[arg-type]
    try:
        asyncio.run(asker.items())
    finally:
        rows.close()
    return rows


def test_asking_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="connection lost"):
        ask(tmp_path, FakeEngine(fails_after=4))
    engine = FakeEngine()
    rows = ask(tmp_path, engine)
    assert len(engine.asked) == 5
    assert [row.item for row in rows.rows if isinstance(row, Answered)] == [f"arithmetic-{n:04d}" for n in range(9)]


def test_requests_are_greedy_cold_and_seeded_by_item(tmp_path: Path) -> None:
    engine = FakeEngine()
    ask(tmp_path, engine)
    bodies = [body for _, body in engine.asked]
    assert {body["temperature"] for body in bodies} == {0}
    assert len({body["cache_salt"] for body in bodies}) == 9
    assert bodies[0]["seed"] == request_seed(0, "arithmetic-0000", 0) == 1990997956
    assert {path for path, _ in engine.asked} == {"/v1/chat/completions"}


# Arms


def test_arm_names() -> None:
    assert chosen_arms("fp8_e4m3, 16bit") == ("16bit", "fp8_e4m3")
    assert chosen_arms("16bit@TRITON_ATTN,fp8_e5m2@TRITON_ATTN") == ("16bit@TRITON_ATTN", "fp8_e5m2@TRITON_ATTN")
    assert chosen_arms("16bit,fp8_e4m3=/data/a b") == ("16bit", "fp8_e4m3=/data/a b")
    for bad in ("16bit=/x,fp8", "16bit", "fp8_e4m3", "16bit,bfloat16", "16bit,fp9", "16bit,16bit@X,fp8", "16bit,fp8;rm"):
        with pytest.raises(UsageError, match="--arms"):
            chosen_arms(bad)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    script = install(tmp_path / "engine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "engine" / "site"))
    return str(script)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write(tmp_path / "model", SMOLLM2, {}, tokenizer_config__json='{"chat_template": "{{ messages }}"}'))


def environment(vllm: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(vllm).parent.parent / "site"), "HOME": "/nonexistent"}


def test_arms_are_equal_but_for_the_cache(vllm: str, model: str) -> None:
    base = (vllm, "serve", model, "--max-model-len", "2048", "--seed", "9")
    one, other = (arm_of(name, base, environment(vllm), seed=5, production=False) for name in ("16bit", "fp8_e4m3"))
    assert one.argv[:-1] == other.argv[:-1] == (*base[:-2], "--seed", "5", "--enforce-eager", "--kv-cache-dtype")
    assert (one.argv[-1], other.argv[-1]) == ("auto", "fp8_e4m3")
    assert one.policy.kv_cache.min_confidence == other.policy.kv_cache.min_confidence == "proven"
    calibrated = arm_of("fp8_e4m3=/scales", base, environment(vllm), seed=5, production=False)
    assert (calibrated.scales, calibrated.policy.kv_cache.scales, calibrated.argv) == (Path("/scales"), "runtime", other.argv)
    production = arm_of("fp8_e4m3@TRITON_ATTN", base, environment(vllm), seed=5, production=True)
    assert "--enforce-eager" not in production.argv
    assert production.argv[-4:] == ("--attention-backend", "TRITON_ATTN", "--kv-cache-dtype", "fp8_e4m3")


def test_a_command_that_sets_the_cache_is_refused(vllm: str, model: str) -> None:
    with pytest.raises(UsageError, match="--kv-cache-dtype: the arms set it"):
        arm_of("16bit", (vllm, "serve", model, "--kv-cache-dtype", "fp8"), environment(vllm), seed=0, production=False)


def test_the_weak_arm_is_an_overlay_that_only_this_comparison_finds(tmp_path: Path, vllm: str) -> None:
    checkpoint(tmp_path / "dense", CONFIG, tokenizer__json="{}")
    base = (vllm, "serve", str(tmp_path / "dense"))
    weak, why = weak_or_why("16bit", base, environment(vllm), tmp_path / "weak", seed=0, production=False)
    assert (why, weak is None) == ("", False)
    assert weak is not None
    assert weak.scales is not None
    assert weak.scales.parent == tmp_path / "weak"
    _, declared, _ = reread(weak.scales)
    found = [value for values in declared.scales.k.values() for value in values]
    assert found == pytest.approx([0.002] * 3, rel=1e-6)
    assert weak_or_why("16bit", base, environment(vllm), tmp_path / "weak", seed=0, production=False) == (weak, "")
    prepared = weak.prepared(environment(vllm))
    assert prepared.runtime is not None
    assert prepared.runtime.way == "overlay"
    quantized = arm_of("fp8_e4m3", base, environment(vllm), seed=0, production=False)
    assert prepared.digests == quantized.prepared(environment(vllm)).digests
    assert weak.argv == quantized.argv


def test_where_scales_would_be_dropped_there_is_no_weak_arm(tmp_path: Path, vllm: str) -> None:
    checkpoint(tmp_path / "awq", {**CONFIG, "quantization_config": {"quant_method": "awq"}})
    base = (vllm, "serve", str(tmp_path / "awq"))
    weak, why = weak_or_why("16bit", base, environment(vllm), tmp_path / "weak", seed=0, production=False)
    assert weak is None
    assert "quantization method awq loads no KV scales" in why


def wish(vllm: str, model: str, seed: int = 0) -> Wish:
    return Wish(
        base=(vllm, "serve", model),
        arms=("16bit", "fp8_e4m3"),
        tasks=("strings",),
        own=(),
        seed=seed,
        quick=True,
        production=False,
        samples=1,
        items=2,
        max_tokens=None,
        concurrency=1,
    )


def test_a_directory_is_of_one_comparison_and_one_process(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    first = claim(out, {"seed": 0, "arms": ["16bit", "fp8_e4m3"]})
    with pytest.raises(UsageError, match="another kvguard compare is working in it"):
        claim(out, {"seed": 0, "arms": ["16bit", "fp8_e4m3"]})
    os.close(first)
    (out / "plan.json").touch()
    os.close(claim(out, {"seed": 0, "arms": ["16bit", "fp8_e4m3"]}))
    with pytest.raises(UsageError, match=r"holds another comparison \(seed: 0, now 1\)"):
        claim(out, {"seed": 1, "arms": ["16bit", "fp8_e4m3"]})
    with pytest.raises(UsageError, match=r"\(arms: fp8_e4m3, now fp8_e5m2\)"):
        claim(out, {"seed": 0, "arms": ["16bit", "fp8_e5m2"]})
    with pytest.raises(UsageError, match=r"\(arms: nothing, now fp8_e5m2\)"):
        claim(out, {"seed": 0, "arms": ["16bit", "fp8_e4m3", "fp8_e5m2"]})
    os.close(claim(out, {"seed": 0, "arms": ["16bit", "fp8_e4m3"]}))  # a refusal holds no lock


def test_a_directory_that_nothing_was_asked_in_takes_other_options(tmp_path: Path) -> None:
    """A mistyped flag that the engine did not start with costs no directory."""
    os.close(claim(tmp_path / "out", {"seed": 0}))
    (tmp_path / "out" / "records").mkdir()
    os.close(claim(tmp_path / "out", {"seed": 1}))
    (tmp_path / "out" / "arms").mkdir()
    with pytest.raises(UsageError, match="seed: 1, now 0"):
        claim(tmp_path / "out", {"seed": 0})


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"options": 3}', "\xff"])
def test_a_wish_that_is_none_is_another_comparisons(tmp_path: Path, content: str) -> None:
    (tmp_path / "wish.json").write_text(content, "latin-1")
    (tmp_path / "plan.json").touch()
    with pytest.raises(UsageError, match="holds another comparison"):
        claim(tmp_path, {"seed": 0})


def test_what_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    for path, said in (
        (tmp_path / "file", "cannot be used: File exists"),
        (tmp_path / "file" / "x", "cannot be used: Not a directory"),
        (tmp_path / ("x" * 300), "cannot be used: File name too long"),
        (tmp_path / "full", "neither empty nor of a comparison"),
    ):
        with pytest.raises(UsageError, match=said):
            claim(path, {"seed": 0})


def test_options_that_decide_results_are_told_without_secrets(vllm: str, model: str) -> None:
    asked = wish(vllm, model)
    asked = replace(asked, base=(*asked.base, "--api-key", "sesame-4711"))
    assert asked.options["command"] == [vllm, "serve", model, "--api-key", "***"]
    assert set(asked.options) == {
        *("command", "arms", "tasks", "own-tasks", "items", "max-tokens", "seed", "quick", "production", "samples"),
        *("concurrency", "lm-eval"),
    }


def test_a_task_that_cannot_be_asked_ends_it_with_the_engines_words() -> None:
    rows = [answered(0), Answered(task="retrieval", item="r-0", problem="HTTP 400: too long\n\x1b[31m")]
    with pytest.raises(UsageError, match="task retrieval: all 1 requests failed: HTTP 400: too long") as found:
        refuse_unanswerable(rows)
    assert str(found.value).isprintable()
    refuse_unanswerable([*rows, Answered(task="retrieval", item="r-1", text="12345")])


def test_what_an_engine_counted_of_a_part_is_left_out() -> None:
    """It answered what an earlier start had left; how it caches prefixes is as true as before."""
    counted = Counters(preemptions=3.0, drafted=5.0, prefix_caching=True, prefix_queries=9.0, prefix_hits=2.0, block_size=16)
    assert counted.without_counts() == Counters(prefix_caching=True, block_size=16)


# Finished arms


def test_finished_arms_are_read_in_order(tmp_path: Path) -> None:
    paths = []
    for one in reversed(arms(plan(items=3), lambda place: 1.0)):
        paths.append(tmp_path / f"{file_stem(one.arm)}.json")
        paths[-1].write_text(one.model_dump_json())
    assert [one.arm for one in read_arms(paths)[0]] == [REFERENCE, "fp8_e4m3", WEAK, AGAIN]
    assert read_arm(paths[0]) == arms(plan(items=3), lambda place: 1.0)[3]
    with pytest.raises(UsageError, match="'16bit' is given twice"):
        read_arms([*paths, paths[-1]])
    with pytest.raises(UsageError, match="required are the 16bit arm and at least one quantized one"):
        read_arms(paths[:2])


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 1, "arm": 3}'])
def test_a_file_that_is_no_arm_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UsageError, match=re.escape(f"arm file {tmp_path}/x.json")):
        read_arm(tmp_path / "x.json")


def changed(one: ArmFile, **more: Any) -> ArmFile:
    return one.model_copy(update=more)


def with_row(one: ArmFile, **more: Any) -> ArmFile:
    return changed(one, answers=(one.answers[0].model_copy(update=more), *one.answers[1:]))


def with_record(one: ArmFile, **more: Any) -> ArmFile:
    return changed(one, record={**one.record, "predicate": {**one.record["predicate"], **more}})


WRONG: dict[str, tuple[Callable[[ArmFile], ArmFile], str]] = {
    "no record": (lambda one: changed(one, record={}), "record .*: not a run record"),
    "a record of something else": (lambda one: changed(one, record={"predicate": {"engine": {}}}), "not a run record"),
    "a changed record": (lambda one: with_record(one, ranks=7), "was changed after it was written"),
    "another record's digest": (lambda one: changed(one, record_digest="sha256:" + "0" * 64), "record_digest: .* is not its"),
    "another cache": (
        lambda one: changed(one, effective=one.effective.model_copy(update={"dtype": "bfloat16"})),
        "effective.dtype: 'bfloat16', its record shows fp8_e4m3",
    ),
    "another capacity": (
        lambda one: changed(one, effective=one.effective.model_copy(update={"kv_tokens": 999_999})),
        "effective.kv_tokens: '999999', its record shows 93184",
    ),
    "another size": (
        lambda one: changed(one, effective=one.effective.model_copy(update={"bytes_per_token": 1.0})),
        "effective.bytes_per_token: '1.0', its record shows",
    ),
    "another arm's name": (lambda one: changed(one, arm="fp8_e5m2"), "arm: 'fp8_e5m2', its record shows fp8_e4m3"),
    "a path for a name": (lambda one: changed(one, arm="../../x"), "arm: '../../x', its record shows fp8_e4m3"),
    "a changed plan": (lambda one: changed(one, plan=one.plan.model_copy(update={"seed": 5})), "plan: was changed"),
    "an answer missing": (lambda one: changed(one, answers=one.answers[:-1]), "answers: 1 of 3 are missing"),
    "an answer twice": (lambda one: changed(one, answers=(*one.answers, one.answers[0])), "stands twice"),
    "an answer to nothing": (lambda one: with_row(one, item="x"), "is not in its plan"),
    "a score of more than all": (lambda one: with_row(one, score=1.5), "answers.0.score"),
    "a score that is none": (lambda one: with_row(one, score=float("nan")), "answers.0.score"),
    "a text of no plan": (lambda one: changed(one, forced=(Forced(text="text-000"),)), "is no text of its plan"),
    "no name": (lambda one: changed(one, arm="\x1b[31m"), "is no arm's name"),
    "another format": (lambda one: changed(one, format=9), "format 9, this kvguard reads 1"),
}


@pytest.mark.parametrize("how", WRONG)
def test_an_arm_that_contradicts_itself_is_named(tmp_path: Path, how: str) -> None:
    """Anybody may have written or changed the file: it is never a traceback, and never a report."""
    change, said = WRONG[how]
    path = tmp_path / "x.json"
    path.write_text(change(arm("fp8_e4m3", plan(items=3))).model_dump_json())
    with pytest.raises(UsageError, match=said) as found:
        read_arm(path)
    assert str(path) in str(found.value)
    assert "\n" not in str(found.value)


def test_generated_rows_keep_ids_and_logprobs(tmp_path: Path) -> None:
    row = Generated(text="text-000", prompt_ids=(1,), ids=(2,), logprobs=(-0.5,), top=(((2, -0.5), (3, -1.5)),))
    rows = Rows(tmp_path / "a.jsonl")
    rows.begin(START)
    rows.add(row)
    rows.close()
    assert Rows(tmp_path / "a.jsonl").rows == [row]


# The gate


def test_a_gate_is_read_and_held_against_the_verdict(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("require: cannot tell\narms: [fp8_e4m3]\nmargin_points: 5\ncapacity_ratio: 1.8\n")
    gate = load_gate(file)
    assert (gate.rules.margin, gate.rules.capacity_ratio, gate.rules.truncation) == (0.05, 1.8, 0.05)
    unsure = judge(arms(plan(items=20), lambda place: 1.0), gate.rules)
    assert below(gate, unsure) == ()
    assert below(Gate(), unsure) == ("arm fp8_e4m3: required is 'free win', found 'cannot tell'",)
    lost = judge(arms(plan(items=100), lambda place: 0.0), gate.rules)
    assert below(gate, lost) == ("arm fp8_e4m3: required is 'cannot tell', found 'keep 16-bit'",)
    with pytest.raises(UsageError, match="arm 'nvfp4' is not compared; found fp8_e4m3"):
        below(Gate(arms=("nvfp4",)), lost)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "required is a mapping"),
        ("a: [", "not YAML"),
        ("requires: free win", "requires: Extra inputs"),
        ("require: win", "require: Input should be"),
        ("margin_points: 0", "margin_points: Input should be greater"),
        ("capacity_ratio: .nan", "capacity_ratio"),
    ],
)
def test_a_gate_that_is_none_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "gate.yaml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)):
        load_gate(tmp_path / "gate.yaml")


def test_names_of_files() -> None:
    assert [file_stem(name) for name in ("16bit again", "fp8@X", "weak")] == ["16bit-again", "fp8@X", "weak"]
    ones = [file_stem(f"fp8_e4m3={path}") for path in ("/a/b", "/a-b", "/" + "x" * 4000, "/" + "x" * 4001)]
    assert len(set(ones)) == 4, "two calibrations never share a file"
    assert all(re.fullmatch(r"fp8_e4m3--[-ax/b]+-[0-9a-f]{8}", one) and len(one) < 80 for one in ones)
    assert arm("x", plan(items=1)).arm == "x"
