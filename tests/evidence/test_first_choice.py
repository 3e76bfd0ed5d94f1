"""FP8 or INT8 first, by version and device."""

from __future__ import annotations

import pytest

from checkpoint_fakes import SMOLLM2, files, scales
from kvguard.checkpoint.declared import declare
from kvguard.evidence.first_choice import first_choice
from kvguard.facts.devices import find_device

PLAIN = declare(files(SMOLLM2))
CALIBRATED = declare(files({**SMOLLM2, "quantization_config": {"quant_method": "fp8"}}, scales(range(30))))


@pytest.mark.parametrize(
    ("version", "device", "dtype"),
    [
        ("0.32.0", "h100", "fp8_e4m3"),
        ("0.32.0", "mi300x", "fp8_e4m3"),
        ("0.32.0", "a100", "int8_per_token_head"),
        ("0.32.0", "t4", "int8_per_token_head"),
        ("0.18.1", "a100", None),
        ("0.18.1", "h100", "fp8_e4m3"),
        ("0.32.0", "cpu", "fp8_e4m3"),
        ("0.20.2", "cpu", None),
        ("0.33.0", "h100", None),
    ],
)
def test_by_version_and_device(version, device, dtype):
    found = first_choice(version, PLAIN, find_device(device))
    assert found.dtype == dtype
    assert found.reasons
    assert not any("\n" in reason for reason in found.reasons)


def test_reasons():
    assert "name it with --device" in first_choice("0.32.0", PLAIN, None).reasons[0]
    assert "measure both" in first_choice("0.32.0", PLAIN, find_device("h100")).reasons[1]
    assert "calibrated scales" in first_choice("0.32.0", CALIBRATED, find_device("h100")).reasons[1]
    older = first_choice("0.18.1", PLAIN, find_device("h100")).reasons
    assert any("does not accept --kv-cache-dtype int8_per_token_head" in reason for reason in older)
