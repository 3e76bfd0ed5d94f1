"""A refusal is remembered: the same start is refused before its engine is started, and a changed one begins anew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from checkpoint_fakes import SMOLLM2, write
from fake_engine import Faulty, install
from kvguard.engine.command import FlagUse
from kvguard.guard.prepare import Prepared, prepare
from kvguard.guard.refusals import Refusal, place, recall, remember
from kvguard.policy.models import Policy
from kvguard.policy.parse import parse_policy
from kvguard.vocabulary import Check, CheckResult

UNIT = "kv_cache: {dtype: fp8_e4m3, scales: unit}\n"
FAILED = Check(
    name="kv_cache_dtype", result=CheckResult.FAIL, required="fp8_e4m3", found="bfloat16", where="cache tensors", action="do it"
)
UNVERIFIED = FAILED.model_copy(update={"name": "confidence", "result": CheckResult.UNVERIFIED})
PASSED = FAILED.model_copy(update={"name": "kv_scales", "result": CheckResult.PASS})


def policy(text: str = UNIT) -> Policy:
    return parse_policy(text.encode(), "policy")


# What it rests on


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    directory = tmp_path_factory.mktemp("start")
    vllm = install(directory / "engine")
    model = write(directory / "model", SMOLLM2, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory / "engine/site"))
        argv = (str(vllm), "serve", str(model), "--port", "1", "--max-model-len", "64")
        return prepare(argv, policy(), dict(os.environ))


def name(prepared: Prepared, text: str = UNIT, **env: str) -> str:
    return place(Path("/refusals"), prepared, policy(text), env).name


def with_flag(prepared: Prepared, flag: str, value: str) -> Prepared:
    use = prepared.command.uses[0].model_copy(update={"name": flag, "values": (value,)})
    uses: tuple[FlagUse, ...] = (*prepared.command.uses, use)
    return prepared.model_copy(update={"command": prepared.command.model_copy(update={"uses": uses})})


def test_the_same_start_has_the_same_place(prepared: Prepared) -> None:
    found = place(Path("/refusals"), prepared, policy(), {})
    assert found.parent == Path("/refusals")
    assert found == place(Path("/refusals"), prepared, policy("kv_cache: {scales: unit, dtype: [fp8_e4m3]}"), {})
    assert len(found.stem) == 32


@pytest.mark.parametrize(
    "changed",
    [
        lambda one: {"engine": one.engine.model_copy(update={"full_version": "0.32.1"})},
        lambda one: {"engine": one.engine.model_copy(update={"python_version": "3.9"})},
        lambda one: {"digests": (one.digests[0].model_copy(update={"sha256": "0" * 64}), *one.digests[1:])},
        lambda one: {"digests": one.digests[1:]},
        lambda one: {"resolution": one.resolution.model_copy(update={"target": "fp8_e5m2"})},
        lambda one: {"calibration": {"way": "flag"}},
        lambda one: {"command": with_flag(one, "--max-num-seqs", "3").command},
    ],
)
def test_what_the_verdict_rests_on_moves_it(prepared: Prepared, changed: Callable[[Prepared], dict[str, Any]]) -> None:
    assert name(prepared.model_copy(update=changed(prepared))) != name(prepared)


def test_policy_and_environment_move_it(prepared: Prepared) -> None:
    names = {
        name(prepared),
        name(prepared, "kv_cache: {dtype: fp8_e4m3}"),
        name(prepared, UNIT + "on_violation: hold\n"),
        name(prepared, VLLM_ATTENTION_BACKEND="FLASH_ATTN"),
        name(prepared, CUDA_VISIBLE_DEVICES="1"),
    }
    assert len(names) == 5


def test_another_kvguard_judges_anew(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    before = name(prepared)
    monkeypatch.setattr("kvguard.__version__", "9.9.9")
    assert name(prepared) != before


def test_where_it_is_served_and_who_may_ask_moves_nothing(prepared: Prepared) -> None:
    assert name(prepared, HOSTNAME="pod-2", VLLM_PORT="9", VLLM_HOST_IP="10.0.0.2") == name(prepared)
    assert name(with_flag(prepared, "--host", "10.0.0.2")) == name(prepared)
    assert name(with_flag(prepared, "--api-key", "one")) == name(with_flag(prepared, "--api-key", "two"))
    assert name(prepared, VLLM_API_KEY="one") == name(prepared, VLLM_API_KEY="two")


# Remembering and recalling


def test_only_what_evidence_contradicts_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.json"
    remember(path, [UNVERIFIED, PASSED])
    assert not path.exists()
    remember(None, [FAILED])
    remember(path, [FAILED, UNVERIFIED, PASSED])
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]
    assert Refusal.model_validate_json(path.read_bytes()).checks == (FAILED,)


def test_what_is_recalled_says_since_when_and_how_to_try_again(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    assert recall(path, policy()) == ()
    remember(path, [FAILED])
    (check,) = recall(path, policy())
    assert (check.name, check.result, check.found) == (FAILED.name, CheckResult.FAIL, FAILED.found)
    assert check.where.startswith("cache tensors; remembered from 20")
    assert check.action.startswith("do it; nothing it rests on has changed since")
    assert f"delete {path}" in check.action


def test_a_policy_that_warns_recalls_nothing(tmp_path: Path) -> None:
    remember(tmp_path / "one.json", [FAILED])
    assert recall(tmp_path / "one.json", policy(UNIT + "on_violation: warn\n")) == ()
    assert len(recall(tmp_path / "one.json", None)) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"refused_at": 5}', b"\xff\x00", b'{"refused_at": "x", "checks": [1]}']
)
def test_what_is_no_refusal_refuses_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "one.json").write_bytes(content)
    with capture_logs() as logs:
        assert recall(tmp_path / "one.json", policy()) == ()
    (line,) = logs
    assert line["event"] == "a remembered refusal cannot be read; the engine is started"


def test_a_check_that_passed_refuses_nothing_although_it_is_in_the_file(tmp_path: Path) -> None:
    found = Refusal(refused_at="2026-01-01T00:00:00+00:00", checks=(PASSED,))
    (tmp_path / "one.json").write_text(found.model_dump_json())
    assert recall(tmp_path / "one.json", policy()) == ()


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with capture_logs() as logs:
        remember(tmp_path / "file" / "one.json", [FAILED])
    assert logs[0]["event"] == "the refusal could not be remembered"


# As a container sees it


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Faulty]]:
    """Starts kvguard on the fake engine, with one folder of refusals for all starts of a test."""
    started: list[Faulty] = []

    def one(*flags: str, policy: str = UNIT, **more: Any) -> Faulty:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        options = ("--settle", "0", "--refusals", str(tmp_path / "refusals"))
        started.append(Faulty(directory, *flags, policy=policy, options=options, **more))
        return started[-1]

    yield one
    for each in started:
        each.close()


def test_a_restart_is_refused_without_an_engine(start: Callable[..., Faulty], tmp_path: Path) -> None:
    first = start(faults=["sixteen_bit"])
    assert first.wait_exit() == 3
    assert "the refusal is remembered" in first.err
    (file,) = (tmp_path / "refusals").iterdir()
    assert json.loads(file.read_text())["checks"]
    second = start(faults=["sixteen_bit"])
    assert second.wait_exit() == 3
    assert "engine started" not in second.err
    assert "kvguard: the engine is not started" in second.err
    assert second.engine_group() is None
    said = second.termination_log.read_text()
    assert said.startswith("refused by policy: kv_cache_dtype fail: required fp8_e4m3; found bfloat16")
    assert "remembered from 20" in said
    assert str(file) in said
    assert second.record()["predicate"]["verdict"] == "refuse"
    third = start("--max-num-batched-tokens", "4096").wait_ready()
    assert third.chat().status_code == 200, "with another command the engine is started, and judged by what it is"
    file.unlink()
    assert start().wait_ready().chat().headers["x-kvguard-kv-cache-dtype"] == "fp8_e4m3"


def test_a_held_refusal_is_held_again_and_can_be_read(start: Callable[..., Faulty]) -> None:
    hold = UNIT + "on_violation: hold\n"
    first = start(faults=["sixteen_bit"], policy=hold).wait_state("refused")
    assert first.stop() == 3
    second = start(faults=["sixteen_bit"], policy=hold).wait_state("refused")
    assert "engine started" not in second.err
    assert "remembered from 20" in second.management("/readyz").json()["reason"]
    assert second.management("/record").json()["predicate"]["verdict"] == "hold"
    assert second.api("/v1/models").status_code == 503
    assert second.stop() == 3


def test_what_could_not_be_verified_is_tried_again(start: Callable[..., Faulty], tmp_path: Path) -> None:
    proven = "kv_cache: {dtype: fp8_e4m3, scales: unit, min_confidence: proven}\n"
    assert start(faults=["rank_missing"], policy=proven).wait_exit() == 3
    assert not (tmp_path / "refusals").exists()
    start(policy=proven).wait_ready()


def test_a_start_that_is_refused_before_its_engine_needs_no_memory(start: Callable[..., Faulty], tmp_path: Path) -> None:
    assert start("--kv-cache-dtype", "fp8_e5m2").wait_exit() == 3
    assert not (tmp_path / "refusals").exists()
