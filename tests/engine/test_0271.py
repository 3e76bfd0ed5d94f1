"""The scenario table on vLLM 0.27.1: what the facts predict for it is what it does; one engine proves it from its tensors."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from guarded import KVGUARD, Guarded
from kvguard.demo.environment import is_complete
from kvguard.demo.variants import K_SCALE, V_SCALE
from kvguard.vocabulary import ExitCode

VERSION = "0.27.1"
FP8 = "kv_cache: {dtype: fp8_e4m3, scales: checkpoint, min_confidence: proven}\n"


@pytest.fixture(scope="module")
def older(engine_cache: Path) -> Path:
    """That version's `vllm`."""
    directory = engine_cache / "engines" / VERSION
    if not is_complete(directory):
        pytest.skip(f"vLLM {VERSION} is not set up: kvguard demo setup --engine-version {VERSION}")
    return directory / "bin" / "vllm"


@pytest.mark.parametrize(
    ("kind", "flags", "dtype", "scales"),
    [
        ("plain", (), "bfloat16", "not_quantized"),
        ("kv_scheme_scales", (), "fp8_e4m3", "checkpoint"),
        ("kv_scheme_no_scales", (), "fp8_e4m3", "unit_default"),
        ("modelopt", (), "fp8_e4m3", "unit_default"),
        ("toplevel_key", (), "bfloat16", "not_quantized"),
        ("plain", ("--kv-cache-dtype", "fp8_e4m3"), "fp8_e4m3", "unit_default"),
        ("kv_scheme_half_scales", (), "fp8_e4m3", "partial"),
    ],
)
def test_the_table_is_the_same_as_on_later_versions(
    variant: Callable[[str], Path], kind: str, flags: tuple[str, ...], dtype: str, scales: str
) -> None:
    words = ["vllm", "serve", str(variant(kind)), *flags]
    command = [KVGUARD, "check", "--json", "--engine-version", VERSION, "--", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (ExitCode.CLEAN, ExitCode.POLICY_VIOLATION), done.stderr
    assert (done.returncode == ExitCode.POLICY_VIOLATION) is (scales == "partial")
    answer = json.loads(done.stdout)
    assert (answer["kv_cache_dtype"], answer["scales"], answer["engine_version"]) == (dtype, scales, VERSION)


@pytest.fixture(scope="module")
def served(older: Path, variant: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """The trap, as written: nothing about the KV cache on the command line."""
    one = Guarded(
        tmp_path_factory.mktemp("older"), variant("kv_scheme_scales"), vllm=str(older), policy=FP8, options=("--reverify", "2")
    )
    yield one.wait_ready()
    one.close()


def test_the_trap_is_proven_fp8_with_the_files_scales(served: Guarded) -> None:
    effective = served.effective()
    assert (effective.dtype, effective.confidence, effective.scales) == ("fp8_e4m3", "proven", "checkpoint")
    assert served.check("prediction").result == "pass"
    assert served.record()["predicate"]["engine"]["version"] == VERSION
    layers = served.record()["predicate"]["layers"]
    assert len(layers) == 30
    for layer in layers:
        assert layer["k_scale"] == [pytest.approx(K_SCALE, rel=1e-6)]
        assert layer["v_scale"] == [pytest.approx(V_SCALE, rel=1e-6)]
    answer = served.chat()
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-kvguard-kv-cache-dtype"] == "fp8_e4m3"


def test_it_is_verified_again_while_it_serves(served: Guarded) -> None:
    def verified_at() -> float:
        lines = served.management("/metrics").text.splitlines()
        name = "kvguard_last_verified_timestamp_seconds "
        return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    first, digest = verified_at(), served.management("/record").json()["predicate"]["content_digest"]
    served._wait(lambda: verified_at() > first, "verified again")
    assert "kvguard_verification_stale 0.0" in served.management("/metrics").text
    assert served.management("/record").json()["predicate"]["content_digest"] == digest
    assert served._state() == "serving"


def test_sigterm_leaves_nothing(served: Guarded) -> None:
    assert served.stop() == ExitCode.CLEAN
    deadline = time.monotonic() + 300
    while served.engine_processes() and time.monotonic() < deadline:
        time.sleep(0.2)  # killed processes of a busy machine take their time to be gone
    served.assert_nothing_left()
