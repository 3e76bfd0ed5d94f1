"""The command of a launched reference, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2, scales, write
from fake_engine import install
from kvguard.cli.serve import _reference, _variables
from kvguard.engine.run_directory import RunDirectory
from kvguard.guard.prepare import prepare
from kvguard.guard.reference_start import ReferenceStart, start_reference
from kvguard.vocabulary import UsageError


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ReferenceStart]]:
    """The reference of a primary with these flags, on a checkpoint that may carry an FP8 scheme."""
    script = install(tmp_path / "engine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "engine/site"))
    plain = write(tmp_path / "plain", SMOLLM2)
    trap = write(tmp_path / "trap", {**SMOLLM2, **COMPRESSED_TENSORS}, scales(range(30)))
    without = {key: value for key, value in SMOLLM2.items() if "dtype" not in key}
    unsaid = write(tmp_path / "unsaid", without)
    with RunDirectory({"KVGUARD_RUN_DIR": f"/tmp/kvgr-{os.getpid()}"}) as run:

        def one(*flags: str, own: tuple[str, ...] = (), kind: str = "plain", env: Any = None) -> ReferenceStart:
            model = {"plain": plain, "trap": trap, "unsaid": unsaid}[kind]
            env = {**os.environ, **(env or {})}
            primary = prepare((str(script), "serve", str(model), *flags), None, env)
            return start_reference(primary, own, run, env)

        yield one


def after(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_the_same_command_with_the_models_own_dtype_on_a_socket_of_its_own(start: Callable[..., ReferenceStart]) -> None:
    found = start("--kv-cache-dtype", "fp8", "--port", "8000", "--seed=3", own=("--gpu-memory-utilization=0.4", "-tp 2"))
    argv = found.plan.argv
    assert argv.count("--kv-cache-dtype") == 1
    assert after(argv, "--kv-cache-dtype") == "bfloat16"
    assert after(argv, "--uds").endswith("/reference.sock")
    assert {"--seed=3", "--gpu-memory-utilization=0.4", "-tp", "2"} <= set(argv)
    assert "8000" not in argv
    assert found.argv[-2:] == ("--kv-cache-dtype", "auto"), "in the record, as resolved for a policy of 16bit"
    assert found.key is None


def test_a_scheme_of_the_checkpoint_is_overridden(start: Callable[..., ReferenceStart]) -> None:
    found = start(kind="trap")
    assert found.prepared.resolution.target == "bfloat16"
    assert after(found.plan.argv, "--kv-cache-dtype") == "bfloat16"


def test_flags_of_the_quantized_cache_and_those_that_two_engines_cannot_share_are_left_out(
    start: Callable[..., ReferenceStart],
) -> None:
    argv = start(
        *("--kv-cache-dtype-skip-layers", "0", "1", "--enable-log-requests", "--kv-events-config", "{}", "--seed", "3")
    ).plan.argv
    assert not {"--kv-cache-dtype-skip-layers", "0", "1", "--enable-log-requests", "--kv-events-config", "{}"} & set(argv)
    assert after(argv, "--seed") == "3"


def test_two_engines_read_their_own_files(start: Callable[..., ReferenceStart], tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("kv-cache-dtype: fp8\nport: 8000\nseed: 3\n")
    plan = start("--config", str(config)).plan
    assert list(plan.files) == ["reference.yaml"]
    assert after(plan.argv, "--config").endswith("/reference.yaml")
    assert "fp8" not in plan.files["reference.yaml"]


def test_the_key_is_the_primarys(start: Callable[..., ReferenceStart]) -> None:
    found = start("--api-key", "s3cret-key")
    assert found.key == "s3cret-key"
    assert "s3cret-key" not in found.plan.argv
    assert "s3cret-key" not in repr(found.plan)


@pytest.mark.parametrize(
    ("flags", "own", "kind", "says"),
    [
        ((), ("--kv-cache-dtype=fp8",), "plain", "always 16-bit; leave this flag out"),
        ((), ("--kv-cache-dt fp8",), "plain", "always 16-bit; leave this flag out|ambiguous"),
        ((), ("--no-such-flag",), "plain", "--shadow-launch: the reference's command: .*no such flag"),
        ((), ('--seed "',), "plain", "--shadow-launch-flag '--seed \"': No closing quotation"),
        (
            (),
            ("--kv-transfer-config.kv_connector=X",),
            "plain",
            "the reference's command: --kv-transfer-config: it takes no KV blocks",
        ),
        (("--kv-cache-dtype", "fp8"), (), "unsaid", "no 16-bit reference of this model: .*own dtype is not known"),
    ],
)
def test_what_is_no_reference_is_said_before_the_start(
    start: Callable[..., ReferenceStart], flags: tuple[str, ...], own: tuple[str, ...], kind: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        start(*flags, own=own, kind=kind)


@pytest.mark.parametrize(
    ("named", "record", "launch", "flags", "says"),
    [
        ("in-engine", "", True, [], "--shadow in-engine and --shadow-launch: there is one reference"),
        ("off", "", False, ["--seed=1"], "--shadow-launch-flag and --shadow-launch-env need --shadow-launch"),
        ("off", "r.json", False, [], "--shadow-record is for the engine that --shadow URL"),
        ("in-engine", "r.json", False, [], "--shadow-record is for"),
        ("off", "r.json", True, [], "--shadow-record is for"),
        ("elsewhere", "", False, [], "required is off, in-engine, http.s.://HOST"),
        ("http://", "", False, [], "required is off, in-engine, http.s.://HOST"),
        ("./engine.sock", "", False, [], "or the absolute path of a Unix socket"),
    ],
)
def test_options_that_contradict_each_other(named: str, record: str, launch: bool, flags: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _reference(named, record, launch=launch, flags=flags, settings=[])


def test_settings_of_probes_that_are_off() -> None:
    with pytest.raises(UsageError, match="--shadow-set sets probes, which are off"):
        _reference("off", "", launch=False, flags=[], settings=["rate=1"])
    assert _reference("off", "", launch=True, flags=[], settings=["rate=1"]) == "launch"


def test_variables_for_the_reference_alone() -> None:
    assert _variables(["CUDA_VISIBLE_DEVICES=1,2", "A="]) == {"CUDA_VISIBLE_DEVICES": "1,2", "A": ""}
    for wrong in ("A", "=1", "a b=1"):
        with pytest.raises(UsageError, match="required is NAME=VALUE"):
            _variables([wrong])


def test_options_that_go_together() -> None:
    assert _reference("off", "", launch=True, flags=["--seed=1"], settings=[]) == "launch"
    assert _reference("http://other", "r.json", launch=False, flags=[], settings=["rate=1"]) == "http://other"
    with pytest.raises(UsageError):
        _reference("launch", "", launch=False, flags=[], settings=[])
