"""Hardware as an input of the prediction, and what the engine's own log and metrics will say."""

from __future__ import annotations

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, MODELOPT, SMOLLM2, files, scales
from kvguard.checkpoint.declared import declare
from kvguard.evidence.prediction import predict
from kvguard.facts.devices import find_device
from kvguard.facts.versions import EXAMINED, read_data
from kvguard.vocabulary import ScaleState

ALL = scales(range(30))


def model(config=None, tensors=None):
    return declare(files({**SMOLLM2, **(config or {})}, tensors))


PLAIN, CT, MO = model(), model(COMPRESSED_TENSORS, ALL), model(MODELOPT, ALL)


def on(device, version="0.32.0", typed=None, declared=PLAIN):
    return predict(version, typed, declared, device=find_device(device) if device else None)


@pytest.mark.parametrize(
    ("device", "typed", "dtype", "fails"),
    [
        ("t4", "fp8", "unknown", True),
        ("a100", "fp8", "unknown", False),
        ("l40s", "fp8", "fp8_e4m3", False),
        ("h100", "fp8", "fp8_e4m3", False),
        ("mi300x", "fp8", "fp8_e4m3", False),
        ("cpu", "fp8", "fp8_e4m3", False),
        ("a100", "int8_per_token_head", "int8_per_token_head", False),
        ("h100", "nvfp4_4over6", "unknown", True),
        ("b200", "nvfp4", "nvfp4", False),
        ("cpu", "nvfp4", "unknown", False),
        ("t4", None, "float16", False),
        ("v100", None, "float16", False),
        ("sm999", None, "unknown", False),
        ("sm999", "fp8", "unknown", False),
        ("gfx1100", None, "bfloat16", False),
        ("gfx1100", "fp8", "unknown", False),
        ("mi355x", "fp8", "fp8_e4m3", False),
        ("xpu", "fp8", "fp8_e4m3", False),
        ("xpu", "fp8_e5m2", "unknown", False),
        ("t4", "turboquant_k8v4", "unknown", False),
    ],
)
def test_a_typed_value_by_device(device, typed, dtype, fails):
    found = on(device, typed=typed)
    assert (found.dtype, found.fails) == (dtype, fails)
    assert found.explicit_honoured == (None if typed is None or (dtype == "unknown" and not fails) else not fails)


@pytest.mark.parametrize(
    ("device", "versions"),
    [
        ("orin", EXAMINED),
        ("thor", EXAMINED),
        ("sm61", EXAMINED),
        ("gfx906", EXAMINED),
        ("rtx5090", ("0.16.0", "0.23.0")),
        ("b200", ("0.9.2",)),
        ("mi355x", ("0.26.0",)),
        ("gfx1201", ("0.31.0",)),
        ("xpu", ("0.19.1",)),
    ],
)
def test_a_device_that_was_not_read_for_a_version_is_unknown_there(device, versions):
    for version in versions:
        for typed in (None, "fp8"):
            for declared in (PLAIN, CT, MO):
                found = on(device, version, typed, declared)
                assert not found.fails
                assert found.dtype == "unknown"
                assert "was not examined" in found.reason


def test_the_same_device_is_known_from_the_version_that_was_read_on():
    assert on("rtx5090", "0.24.0").dtype == on("b200", "0.10.0").dtype == on("xpu", "0.20.0").dtype == "bfloat16"


@pytest.mark.parametrize(("version", "dtype"), [("0.9.2", "unknown"), ("0.16.0", "unknown"), ("0.32.0", "fp8_e5m2")])
def test_e5m2_on_hopper_depends_on_the_backend_before_0_22(version, dtype):
    found = on("h100", version, "fp8_e5m2")
    assert found.dtype == dtype
    assert on("l40s", version, "fp8_e5m2").dtype == "fp8_e5m2"


def test_a_declared_fp8_meets_the_device_too():
    for declared in (CT, MO):
        assert on("t4", declared=declared).fails
        assert on("t4", typed="float16", declared=model({"torch_dtype": "float16", **COMPRESSED_TENSORS})).dtype == "float16"
        assert on("h100", declared=declared).dtype == "fp8_e4m3"


def test_an_expected_failure_names_the_way_out():
    assert "instead: --kv-cache-dtype" in on("t4", typed="fp8").reason
    assert "t4" in on("t4", typed="fp8").reason


def test_the_cpu_is_a_device_like_others():
    assert on("cpu", "0.20.2", "fp8").dtype == "bfloat16"
    assert on("cpu", "0.20.2", "fp8").echo == "auto"
    assert on("cpu", "0.11.0", "fp8_e4m3").echo == "fp8_e5m2"
    assert on("h100", "0.20.2", "fp8").dtype == "fp8_e4m3"


def test_fnuz_devices_double_loaded_scales():
    block = {"quantization_config": {"quant_method": "fp8"}}
    found = on("mi300x", typed="fp8", declared=model(block, ALL))
    assert found.scales is ScaleState.CHECKPOINT
    assert "doubled" in found.reason
    assert "doubled" not in on("mi355x", typed="fp8", declared=model(block, ALL)).reason
    assert "doubled" not in on("mi300x", typed="fp8", declared=model(block)).reason


@pytest.mark.parametrize(
    ("declared", "version", "typed", "echo"),
    [
        (PLAIN, "0.32.0", None, "auto"),
        (PLAIN, "0.32.0", "fp8", "fp8_e4m3"),
        (CT, "0.16.0", None, "auto"),
        (CT, "0.16.0", "bfloat16", "bfloat16"),
        (CT, "0.32.0", "bfloat16", "bfloat16"),
        (CT, "0.14.1", None, "auto"),
        (MO, "0.32.0", None, "fp8_e4m3"),
        (MO, "0.13.0", None, "auto"),
        (PLAIN, "0.32.0", "int8", None),
        (PLAIN, "0.33.0", "fp8", None),
    ],
)
def test_what_log_and_metrics_will_show(declared, version, typed, echo):
    assert predict(version, typed, declared).echo == echo


def test_every_device_gets_an_answer_everywhere():
    for name in read_data("devices")["devices"]:
        for version in EXAMINED[::6]:
            for declared in (PLAIN, CT, MO):
                for typed in (None, "fp8", "bfloat16"):
                    found = on(name, version, typed, declared)
                    assert "\n" not in found.reason
                    assert not (found.fails and (found.dtype != "unknown" or found.echo))
