"""What each version does with --calculate-kv-scales, and how checkpoints carry scales."""

from __future__ import annotations

import pytest

from kvguard.facts.calibration import attach_form, calculate_flag, flag_ignored, pass_missing, scale_names
from kvguard.facts.kv_dtypes import has_calculate_kv_scales, runtime_scales
from kvguard.facts.versions import EXAMINED, NEWEST, in_range, read_data

NOTHING = {"dynamic_dtype": False, "query_scale": False, "compressed_tensors_scheme": False, "hybrid": False}


@pytest.mark.parametrize(
    ("version", "platform", "eager", "result"),
    [
        ("0.10.2", None, True, "crashes"),
        ("0.20.2", None, True, "dummy"),
        ("0.26.0", "cpu", True, "dummy"),
        ("0.27.1", "cpu", True, "real"),
        ("0.27.1", "cpu", False, "dummy"),
        ("0.27.1", None, True, "dummy"),
        ("0.28.0", "cpu", True, "absent"),
        ("0.32.0", None, False, "absent"),
    ],
)
def test_what_the_flag_calibrates_on(version: str, platform: str | None, eager: bool, result: str) -> None:
    flag = calculate_flag(version, platform=platform, eager=eager)
    assert flag is not None
    assert flag.result == result
    assert flag.reason
    assert flag.source


def test_every_examined_version_has_one_answer_and_it_agrees_with_the_other_facts() -> None:
    for version in EXAMINED:
        for platform in ("cpu", None):
            flags = [calculate_flag(version, platform=platform, eager=eager) for eager in (True, False)]
            other = runtime_scales(version, platform)
            for flag, eager in zip(flags, (True, False), strict=True):
                assert flag is not None, version
                assert (flag.result != "absent") == has_calculate_kv_scales(version)
                if other is not None:
                    wanted = {
                        "startup_error": "crashes",
                        "dummy": "dummy",
                        "first_batch_if_eager": "real" if eager else "dummy",
                    }
                    assert flag.result == wanted[other.input], (version, platform, eager)


def test_unread_versions_have_no_answer() -> None:
    assert calculate_flag("0.99.0", platform=None, eager=True) is None
    assert calculate_flag("", platform=None, eager=True) is None


@pytest.mark.parametrize(
    ("version", "condition"),
    [
        ("0.27.1", "dynamic_dtype"),
        ("0.27.1", "query_scale"),
        ("0.21.0", "compressed_tensors_scheme"),
        ("0.20.0", "hybrid"),
    ],
)
def test_when_the_flag_is_ignored(version: str, condition: str) -> None:
    assert flag_ignored(version, **NOTHING) is None
    ignored = flag_ignored(version, **{**NOTHING, condition: True})
    assert ignored is not None
    assert ignored.result == "ignored"
    assert flag_ignored("0.32.0", **{**NOTHING, condition: True}) is None


def test_an_explicit_dtype_keeps_the_flag_beside_a_scheme_since_0_22() -> None:
    assert flag_ignored("0.22.0", **{**NOTHING, "compressed_tensors_scheme": True}) is None


def test_the_pass_and_the_forms_have_their_versions() -> None:
    assert pass_missing("0.14.1") is not None
    assert pass_missing("0.27.1") is None
    assert attach_form(NEWEST, None) == ("compressed_tensors_block", attach_form(NEWEST, None)[1])  # type: ignore[index]
    assert attach_form(NEWEST, "awq") is None
    assert attach_form("0.16.0", "modelopt_mixed") is None


def test_names_are_known_where_somebody_read_them() -> None:
    assert scale_names("0.20.0", "LlamaForCausalLM") is not None
    assert scale_names("0.20.0", "Qwen3ForCausalLM") is None
    found = scale_names("0.32.0", "Qwen3ForCausalLM")
    assert found is not None
    assert found.pattern.format(attention="model.layers.0.self_attn", side="k") == "model.layers.0.self_attn.k_scale"
    assert scale_names("0.32.0", "DeepseekV3ForCausalLM") is None
    assert scale_names("0.32.0", None) is None


def test_every_entry_has_a_source_and_a_range() -> None:
    facts = read_data("calibration")
    for group in ("flag", "flag_ignored", "attach", "names"):
        for entry in facts[group]:
            assert entry["source"], entry
            assert isinstance(in_range("0.20.0", entry["versions"]), bool)
