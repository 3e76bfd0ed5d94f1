"""The launch plan where runtime scales are wanted: the flag, or an overlay in the model's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvguard.engine.command import parse_command, split_words
from kvguard.engine.plan import Plan, make_plan
from kvguard.engine.resolve import resolve
from kvguard.verdict.runtime_scales import RuntimeScales
from launches import declared

OVERLAY = RuntimeScales(way="overlay", reason="no flag", overlay="/cache/overlays/abc")
FLAG = RuntimeScales(way="flag", reason="it is real")
MODULE = ("python3", "-m", "vllm.entrypoints.openai.api_server")


def planned(runtime: RuntimeScales | None, *argv: str, config: str = "", version: str = "0.27.1") -> Plan:
    command = parse_command(split_words(argv), version, lambda _: config.encode())
    files = declared()
    return make_plan(
        command,
        resolve(command, version, files, None, {}),
        files,
        executable=command.words.prefix,
        run_directory=Path("/run/x"),
        free_port=1,
        env={},
        colour=False,
        runtime=runtime,
    )


def after(plan: Plan, flag: str) -> str:
    return plan.argv[plan.argv.index(flag) + 1]


def test_the_flag_is_added_once() -> None:
    plan = planned(FLAG, "vllm", "serve", "m")
    assert plan.argv.count("--calculate-kv-scales") == 1
    assert any(change.what == "--calculate-kv-scales" and change.why == "it is real" for change in plan.changes)
    typed = planned(FLAG, "vllm", "serve", "m", "--calculate-kv-scales")
    assert typed.argv.count("--calculate-kv-scales") == 1
    off = planned(FLAG, "vllm", "serve", "m", "--no-calculate-kv-scales")
    assert "--no-calculate-kv-scales" not in off.argv
    assert "--calculate-kv-scales" in off.argv


def test_an_overlay_takes_the_models_place_under_the_models_name() -> None:
    plan = planned(OVERLAY, "vllm", "serve", "org/model", "--max-model-len", "64")
    assert plan.argv[:5] == ("vllm", "serve", "/cache/overlays/abc", "--max-model-len", "64")
    assert "org/model" not in plan.argv[:5]
    assert after(plan, "--served-model-name") == "org/model"
    assert [change.what for change in plan.changes if "model" in change.what] == [
        "model /cache/overlays/abc",
        "--served-model-name org/model",
    ]


def test_a_name_that_was_chosen_stays() -> None:
    plan = planned(OVERLAY, "vllm", "serve", "m", "--served-model-name", "mine")
    assert plan.argv.count("--served-model-name") == 1
    assert after(plan, "--served-model-name") == "mine"
    assert "m" not in plan.argv


@pytest.mark.parametrize(
    "argv", [("vllm", "serve", "--model", "m", "--seed", "1"), ("vllm", "serve", "--model=m", "--seed", "1")]
)
def test_a_model_given_as_a_flag_is_replaced(argv: tuple[str, ...]) -> None:
    plan = planned(OVERLAY, *argv)
    assert plan.argv[:5] == ("vllm", "serve", "/cache/overlays/abc", "--seed", "1")
    assert not any(word.startswith("--model") and "len" not in word for word in plan.argv)


def test_the_module_form_takes_its_model_as_a_flag() -> None:
    plan = planned(OVERLAY, *MODULE, "--model", "m", "--seed", "1")
    assert plan.argv[:5] == (*MODULE, "--model", "/cache/overlays/abc")
    assert plan.argv.count("--model") == 1


@pytest.mark.parametrize("key", ["model", "model_tag"])
def test_a_model_in_the_yaml_file_is_replaced(key: str) -> None:
    config = f"{key}: m\nseed: 1\ncalculate-kv-scales: true\n"
    plan = planned(OVERLAY, "vllm", "serve", "--config", "c.yaml", config=config)
    assert plan.argv[:3] == ("vllm", "serve", "/cache/overlays/abc")
    assert after(plan, "--config") == "/run/x/config.yaml"
    assert yaml.safe_load(plan.files["config.yaml"]) == {"seed": 1}
    assert after(plan, "--served-model-name") == "m"


def test_a_typed_flag_that_would_overwrite_the_scales_goes() -> None:
    plan = planned(OVERLAY, "vllm", "serve", "m", "--calculate-kv-scales")
    assert "--calculate-kv-scales" not in plan.argv
    assert any(change.what == "--calculate-kv-scales removed" for change in plan.changes)


def test_a_way_that_cannot_be_taken_changes_nothing() -> None:
    impossible = OVERLAY.model_copy(update={"overlay": "", "problem": "no calibration"})
    assert planned(impossible, "vllm", "serve", "m").argv == planned(None, "vllm", "serve", "m").argv
