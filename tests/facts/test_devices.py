import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_fakes import refusal
from kvguard.facts.devices import cuda_device, device_rule, doubled_scales, find_device, rocm_device
from kvguard.facts.versions import in_range, read_data


@pytest.mark.parametrize(
    ("text", "platform", "detail"),
    [
        ("h100", "cuda", "9.0"),
        ("NVIDIA H100", "cuda", "9.0"),
        ("B200", "cuda", "10.0"),
        ("RTX 5090", "cuda", "12.0"),
        ("GeForce RTX 4090", "cuda", "8.9"),
        ("sm90", "cuda", "9.0"),
        ("sm_100a", "cuda", "10.0"),
        ("8.6", "cuda", "8.6"),
        ("mi300x", "rocm", "gfx942"),
        ("gfx950", "rocm", "gfx950"),
        ("cpu", "cpu", ""),
    ],
)
def test_names(text, platform, detail):
    device = find_device(text)
    assert (device.platform, device.capability or device.architecture) == (platform, detail)


@pytest.mark.parametrize("text", ["", "tpu-v9", "sm", "9", "gfx", "h100 or so"])
def test_unknown_names_are_refused_with_the_known_ones(text):
    assert "h100" in refusal(lambda: find_device(text))


@given(st.text(max_size=20))
def test_any_text_is_a_device_or_refused(text):
    refusal(lambda: find_device(text))


def test_patterns():
    h100, b200, mi300 = find_device("h100"), find_device("b200"), find_device("mi300")
    assert h100.matches("any")
    assert h100.matches("cuda")
    assert h100.matches("cuda:9")
    assert not h100.matches("cuda:10")
    assert b200.matches("cuda:9,cuda:10")
    assert not b200.matches("cuda:1")
    assert mi300.matches("rocm:gfx94")
    assert not mi300.matches("rocm:gfx95")
    assert not find_device("cpu").matches("rocm:gfx94")
    assert find_device("rtx3090").below("8.9")
    assert not find_device("l4").below("8.9")
    assert not mi300.below("8.9")


def result(version, device, dtype, *, mla=False, traits=()):
    rule = device_rule(version, find_device(device), dtype, mla=mla, traits=frozenset(traits))
    return rule and rule.result


@pytest.mark.parametrize(
    ("version", "device", "dtype", "expected"),
    [
        ("0.32.0", "t4", "fp8_e4m3", "fails"),
        ("0.32.0", "a100", "fp8_e4m3", "unknown"),
        ("0.32.0", "l4", "fp8_e4m3", None),
        ("0.32.0", "h100", "fp8_e4m3", None),
        ("0.32.0", "a100", "fp8_per_token_head", "fails"),
        ("0.32.0", "a100", "int8_per_token_head", None),
        ("0.24.0", "h100", "nvfp4", "unknown"),
        ("0.25.0", "h100", "nvfp4", "fails"),
        ("0.32.0", "h100", "nvfp4", "as_is"),
        ("0.32.0", "h100", "nvfp4_4over6", "fails"),
        ("0.25.0", "b200", "nvfp4", "as_is"),
        ("0.32.0", "b200", "nvfp4_ds_mla", "as_is"),
        ("0.32.0", "h100", "nvfp4_ds_mla", "fails"),
        ("0.32.0", "mi250", "fp8_e4m3", "unknown"),
        ("0.32.0", "mi300x", "fp8_e4m3", None),
        ("0.32.0", "cpu", "bfloat16", None),
        ("0.32.0", "gfx1100", "fp8_e4m3", "unknown"),
        ("0.32.0", "gfx1201", "fp8_e4m3", "unknown"),
        ("0.16.0", "h100", "fp8_e5m2", "unknown"),
        ("0.22.0", "h100", "fp8_e5m2", None),
        ("0.32.0", "xpu", "nvfp4", "fails"),
        ("0.32.0", "xpu", "turboquant_k8v4", "unknown"),
    ],
)
def test_what_a_device_does_with_a_dtype(version, device, dtype, expected):
    assert result(version, device, dtype) == expected


def test_mla_and_mixed_head_sizes_have_no_way_out_below_8_9():
    assert result("0.32.0", "a100", "fp8_e4m3", mla=True) == "fails"
    assert result("0.20.2", "a100", "fp8_e4m3", mla=True) == "unknown"
    assert result("0.32.0", "a100", "fp8_e4m3", traits=["mixed_head_sizes"]) == "fails"
    assert result("0.32.0", "h100", "fp8_e4m3", traits=["mixed_head_sizes"]) is None
    assert result("0.16.0", "l40s", "fp8_e4m3", mla=True) == "unknown"
    assert result("0.18.0", "l40s", "fp8_e4m3", mla=True) is None
    assert result("0.16.0", "h100", "fp8_e4m3", mla=True) is None


def test_scales_are_doubled_on_fnuz_devices_only():
    assert doubled_scales(find_device("mi300x"))
    assert doubled_scales(find_device("mi355x")) is None
    assert doubled_scales(None) is None


def test_every_device_that_was_read_has_its_versions_and_its_source():
    for entry in read_data("devices")["examined"]:
        assert entry["source"]
        assert entry["names"]
        assert in_range("0.32.0", entry["versions"])
    known = [name for name in read_data("devices")["devices"] if find_device(name).examined("0.32.0")]
    assert set(read_data("devices")["devices"]) - set(known) == {"orin", "thor"}
    assert not find_device("h100").examined("0.33.0")
    assert not find_device("cpu").examined("0.8.4")


def test_every_rule_is_usable():
    for rule in read_data("devices")["rules"]:
        in_range("0.32.0", rule["versions"])
        assert rule["result"] in ("as_is", "fails", "unknown")
        assert rule["result"] != "fails" or (rule["reason"] and rule["do"])
        assert rule["source"]


def test_what_tools_call_devices():
    assert cuda_device("NVIDIA A100-SXM4-80GB", "8.0") == find_device("a100")
    assert cuda_device("NVIDIA A10", "8.6") == find_device("a10")
    assert cuda_device("Quadro P1000", "6.1") == find_device("6.1")
    assert cuda_device("NVIDIA A100", "[N/A]") is None
    assert rocm_device("gfx950").architecture == "gfx950"
    for text in ("h100", "cpu", "gfx"):
        assert "gfx942" in refusal(lambda text=text: rocm_device(text))


@given(st.text(max_size=30), st.text(max_size=8) | st.sampled_from(["9.0", "12.1"]))
def test_any_name_and_capability_are_a_device_or_none(name, capability):
    found = cuda_device(name, capability)
    assert found is None or found.capability == capability.strip()
