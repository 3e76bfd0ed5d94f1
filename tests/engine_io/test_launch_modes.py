"""Ways to launch vLLM that kvguard refuses by name, or guards with something lost."""

from __future__ import annotations

import pytest

from kvguard.engine.command import Command, parse_command, split_words
from kvguard.engine.plan import degraded_modes, refused_modes
from kvguard.facts.launch_modes import LaunchMode, launch_modes
from launches import command

# Every mode of the table: flags (or an environment) that use it, and ones that do not.
MODES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor_parallel": (("-tp", "2"), ("--tensor-parallel-size", "1")),
    "pipeline_parallel": (("-pp", "2"), ()),
    "several_api_servers": (("--api-server-count", "2"), ("--api-server-count", "1")),
    "data_parallel": (("-dp", "4"), ("--data-parallel-size=1",)),
    "data_parallel_external": (("--data-parallel-rank", "0"), ()),
    "data_parallel_external_lb": (("--data-parallel-external-lb",), ("--no-data-parallel-external-lb",)),
    "data_parallel_hybrid_lb": (("--data-parallel-hybrid-lb",), ("--no-data-parallel-hybrid-lb",)),
    "data_parallel_start_rank": (("--data-parallel-start-rank", "1"), ()),
    "data_parallel_multi_port": (("--data-parallel-multi-port-external-lb",), ()),
    "headless": (("--headless",), ()),
    "several_nodes": (("--nnodes", "2"), ("--nnodes", "1")),
    "ray": (("--distributed-executor-backend", "ray"), ("--distributed-executor-backend", "mp")),
    "grpc": (("--grpc",), ()),
    "rust_front_end": (("VLLM_USE_RUST_FRONTEND=1",), ("VLLM_USE_RUST_FRONTEND=0",)),
    "snapshot": (("snapshot",), ()),
    "sleep_mode": (("--enable-sleep-mode",), ("--enable-sleep-mode", "--no-enable-sleep-mode")),
    "kv_connector": (("--kv-transfer-config.kv_connector", "X"), ()),
    "kv_offload": (("--kv-offloading-size", "4"), ()),
    "encoder_connector": (("--ec-transfer-config", "{}"), ()),
    "elastic_experts": (("--enable-elastic-ep",), ("--no-enable-elastic-ep",)),
    "speculative": (("--speculative-config", '{"model": "d"}'), ()),
    "no_statistics": (("--disable-log-stats",), ()),
    "dev_mode": (("VLLM_SERVER_DEV_MODE=true",), ("VLLM_SERVER_DEV_MODE=",)),
}


def used(words: tuple[str, ...]) -> tuple[list[LaunchMode], list[LaunchMode]]:
    """Modes refused and degraded for these words: a subcommand, NAME=value of the environment, or flags."""
    env: dict[str, str] = {}
    typed: Command
    if words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words[0].partition("=")
        env, typed = {name: value}, command()
    elif words == ("snapshot",):
        typed = parse_command(split_words(("vllm", "snapshot", "m")), "0.32.0", lambda _: b"")
    else:
        typed = command(*words)
    return list(refused_modes(typed, env)), list(degraded_modes(typed, env))


def test_every_mode_of_the_table_is_tried_here() -> None:
    assert {mode.id for mode in launch_modes()} == set(MODES)


@pytest.mark.parametrize("mode", launch_modes(), ids=lambda mode: mode.id)
def test_a_mode_is_found_and_explained(mode: LaunchMode) -> None:
    refused, degraded = used(MODES[mode.id][0])
    assert (mode in refused, mode in degraded) == (mode.support == "refused", mode.support == "degraded")
    assert mode.because
    assert mode.source
    assert mode.do or mode.support != "refused"


def test_what_each_mode_is() -> None:
    """A mode that changes its place here changes what users can start."""
    placed: dict[str, set[str]] = {}
    for mode in launch_modes():
        placed.setdefault(mode.support, set()).add(mode.id)
    assert placed == {
        "supported": {"tensor_parallel", "pipeline_parallel"},
        "degraded": {
            "several_api_servers",
            "data_parallel",
            "sleep_mode",
            "kv_connector",
            "kv_offload",
            "encoder_connector",
            "speculative",
            "no_statistics",
            "dev_mode",
        },
        "refused": {
            "data_parallel_external",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_start_rank",
            "data_parallel_multi_port",
            "headless",
            "several_nodes",
            "ray",
            "grpc",
            "rust_front_end",
            "snapshot",
            "elastic_experts",
        },
    }


@pytest.mark.parametrize("mode", launch_modes(), ids=lambda mode: mode.id)
def test_a_mode_is_not_found_where_it_is_not_used(mode: LaunchMode) -> None:
    refused, degraded = used(MODES[mode.id][1])
    assert mode not in refused + degraded


def test_a_mode_in_the_config_file_counts() -> None:
    typed = command("--config", "c.yaml", config=b"data-parallel-size: 2\nkv_transfer_config: {kv_connector: X}\n")
    assert [mode.id for mode in degraded_modes(typed, {})] == ["data_parallel", "kv_connector"]


@pytest.mark.parametrize("value", ["auto", "²", ""])
def test_a_size_that_is_no_number_is_vllms_to_reject(value: str) -> None:
    assert refused_modes(command(f"--data-parallel-size={value}"), {}) == ()
