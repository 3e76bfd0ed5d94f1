"""lm-eval's tasks: its command, its samples as scores, and verdicts from them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_fakes import arm, install_lm_eval, plan
from kvguard.compare.harness import chosen_harness, harness_command, run_harness
from kvguard.compare.judge import judge
from kvguard.compare.models import AGAIN, REFERENCE, WEAK, Answered, ArmFile, Harness, Harnessed
from kvguard.compare.outcome import Rules
from kvguard.compare.planning import digest_of
from kvguard.compare.results import read_arm
from kvguard.engine.client import Answer
from kvguard.vocabulary import EngineFailed, PolicyRefusal, UsageError


class FakeClient:
    def __init__(self, healthy: bool = True) -> None:
        self.asked: list[dict[str, Any]] = []
        self._healthy = healthy

    async def post(self, path: str, body: dict[str, Any], deadline: float = 0) -> Answer:
        self.asked.append(body)
        finish = "length" if len(self.asked) == 1 else "stop"
        return Answer(status=200, body={"choices": [{"text": f"said {len(self.asked)}", "finish_reason": finish}]})

    async def health(self) -> Answer:
        return Answer(status=200) if self._healthy else Answer(error="connection lost")


@pytest.fixture
def command(tmp_path: Path) -> str:
    return str(install_lm_eval(tmp_path / "bin"))


def run(command: str, out: Path, client: FakeClient, *arguments: str, tokenizer: str = "/models/m") -> Harnessed:
    return asyncio.run(
        run_harness(
            Harness(tasks=("gsm8k", "own.task"), arguments=arguments),
            command,
            client,  # type: ignore[arg-type]
            served_model="m",
            tokenizer=tokenizer,
            directory=out / "lm-eval" / "16bit",
            seed=7,
            concurrency=3,
        )
    )


def test_each_documents_score_is_that_of_the_first_filter_and_metric(tmp_path: Path, command: str) -> None:
    client = FakeClient()
    found = run(command, tmp_path, client, "--num_fewshot", "5")
    assert [(row.task, row.item, row.score) for row in found.answers] == [
        (f"lm-eval:{task}", str(n), float(n % 2)) for task in ("gsm8k", "own.task") for n in range(4)
    ]
    assert found.answers[0].text == '["said 1"]'
    assert (found.version, found.generated, found.cut) == ("0.4.9", 8, 1)
    assert len({body["cache_salt"] for body in client.asked}) == 8
    log = (tmp_path / "lm-eval/16bit/log").read_text()
    for word in ("'local-completions'", "'--num_fewshot', '5'", "'--seed', '7'", "num_concurrent=3", "tokenizer=/models/m"):
        assert word in log
    assert "Bearer" not in log
    again = run(command, tmp_path, FakeClient())  # what an earlier run left is gone
    assert again == found


def test_a_run_that_fails_says_its_last_line(tmp_path: Path, command: str) -> None:
    with pytest.raises(UsageError, match=r"exit code 1: ValueError: no such task; .*/log"):
        run(command, tmp_path, FakeClient(), "--boom")
    with pytest.raises(EngineFailed, match="the engine ended while lm-eval ran"):
        run(command, tmp_path, FakeClient(healthy=False), "--boom")
    with pytest.raises(UsageError, match="has a comma"):
        run(command, tmp_path, FakeClient(), tokenizer="/a,b")
    with pytest.raises(UsageError, match="No such file"):
        run(str(tmp_path / "nowhere"), tmp_path, FakeClient())


def test_a_run_that_is_cancelled_is_ended_with_what_it_started(tmp_path: Path, command: str) -> None:
    Path(command).write_text(
        f"#!/bin/sh\nsleep 600 &\necho $$ $! > {tmp_path}/ids.new\nmv {tmp_path}/ids.new {tmp_path}/ids\nwait\n"
    )
    ids = tmp_path / "ids"

    async def cancelled() -> None:
        harness = Harness(tasks=("gsm8k",))
        more: dict[str, Any] = {"served_model": "m", "tokenizer": "t", "directory": tmp_path / "x", "seed": 0, "concurrency": 1}
        working = asyncio.create_task(run_harness(harness, command, FakeClient(), **more))  # type: ignore[arg-type]
        async with asyncio.timeout(120):
            while not ids.exists():
                await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert working.cancelled()
        async with asyncio.timeout(120):
            while any(running(int(word)) for word in ids.read_text().split()):
                await asyncio.sleep(0.01)

    asyncio.run(cancelled())


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: no score"),
        ("[]", "line 1: no score"),
        ('{"doc_id": 1}', "no metric is listed"),
        ('{"doc_id": 1, "metrics": ["word_perplexity"], "word_perplexity": [1, 2]}', "word_perplexity is not a number"),
        ('{"doc_id": 1, "metrics": ["bleu"], "bleu": 31.5}', "no score between 0 and 1"),
        ('{"metrics": ["acc"], "acc": 1}', "no score"),
        ("", "left no samples"),
    ],
)
def test_samples_without_a_score_are_named(tmp_path: Path, command: str, line: str, said: str) -> None:
    script = Path(command)
    made = (
        f"(Path(sys.argv[sys.argv.index('--output_path') + 1]) / 'samples_x_2026-01-02T03-04-05.6.jsonl').write_text({line!r})"
    )
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n{made}\n")
    with pytest.raises(UsageError, match=said):
        run(command, tmp_path, FakeClient())


def test_what_is_asked_of_it() -> None:
    assert chosen_harness("", []) is None
    assert chosen_harness("gsm8k, mmlu_stem,gsm8k", ["--limit", "5"]) == Harness(
        tasks=("gsm8k", "mmlu_stem"), arguments=("--limit", "5")
    )
    for named, words, said in (
        ("a;b", (), "--lm-eval 'a;b'"),
        ("../x", (), "--lm-eval"),
        ("gsm8k", ("--model_args=x",), "kvguard sets it"),
        ("", ("--limit", "5"), "name the tasks with --lm-eval"),
    ):
        with pytest.raises(UsageError, match=said):
            chosen_harness(named, words)


def test_its_command_is_found_before_anything_runs(command: str) -> None:
    assert harness_command(command, {}) == command
    assert harness_command("lm_eval", {"PATH": str(Path(command).parent)}).endswith("lm_eval")
    with pytest.raises(UsageError, match=r"install the extra, `pip install 'kvguard\[lm-eval\]'`"):
        harness_command("lm_eval_nowhere", {"PATH": ""})


# Verdicts


def harnessed(name: str, right: Callable[[int], bool], *, digest: str = "d", cut: int = 0) -> ArmFile:
    asked = plan(("strings",), items=200).model_copy(update={"harness": Harness(tasks=("gsm8k",)), "digest": ""})
    asked = asked.model_copy(update={"digest": digest_of(asked)})
    answers = tuple(
        Answered(task="lm-eval:gsm8k", item=str(n), text=json.dumps([f"{name} {n}"]), score=float(right(n))) for n in range(400)
    )
    found = Harnessed(version="0.4.9", digest=digest, generated=400, cut=cut, answers=answers)
    return arm(name, asked, lambda place: float(name != WEAK), harnessed=found)


def four(right: Callable[[int], bool], **more: Any) -> list[ArmFile]:
    names = (REFERENCE, "fp8_e4m3", WEAK, AGAIN)
    scores: dict[str, Callable[[int], bool]] = {"fp8_e4m3": right, WEAK: lambda n: False}
    return [harnessed(name, scores.get(name, lambda n: True), **(more if name == "fp8_e4m3" else {})) for name in names]


def test_its_tasks_are_judged_as_all_others() -> None:
    found = judge(four(lambda n: n % 10 > 0), Rules())
    task = next(one for one in found.arms[1].tasks if one.task == "lm-eval:gsm8k")
    assert task.verdict == found.arms[1].verdict == "keep 16-bit"
    assert task.paired is not None
    assert task.paired.loss == pytest.approx(0.1)
    assert found.scores["lm-eval:gsm8k"]["fp8_e4m3"][0] == pytest.approx(0.9)


def test_no_loss_in_them_is_a_free_win() -> None:
    assert judge(four(lambda n: True), Rules()).arms[1].verdict == "free win"


def test_truncation_in_them_is_no_loss() -> None:
    task = judge(four(lambda n: n % 10 > 0, cut=40), Rules()).arms[1].tasks[-1]
    assert (task.verdict, task.truncated_arm) == ("cannot tell", 0.1)
    assert "truncation, not loss" in task.why


def test_other_documents_or_prompts_are_refused() -> None:
    with pytest.raises(PolicyRefusal, match="differ in their lm-eval questions"):
        judge(four(lambda n: True, digest="other"), Rules())


def test_they_come_back_from_a_file(tmp_path: Path) -> None:
    one = harnessed("fp8_e4m3", lambda n: True)
    assert one.harnessed is not None
    (tmp_path / "x.json").write_text(one.model_dump_json())
    assert read_arm(tmp_path / "x.json") == one
    twice = one.harnessed.model_copy(update={"answers": (one.harnessed.answers[0],) * 2})
    for wrong in (None, twice):
        (tmp_path / "x.json").write_text(one.model_copy(update={"harnessed": wrong}).model_dump_json())
        with pytest.raises(UsageError, match="harnessed"):
            read_arm(tmp_path / "x.json")
