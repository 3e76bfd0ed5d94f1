"""Runs `kvguard serve` on the fake engine: an environment in which `vllm` is tests/fake_vllm.py, version 0.32.0."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoint_fakes import SMOLLM2, write
from guarded import Guarded

TESTS = Path(__file__).parent


def install(directory: Path) -> Path:
    """Make the fake engine in a directory; returns its `vllm`."""
    site = directory / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm/__init__.py").write_text('__version__ = "0.32.0"\n')
    (site / "vllm-0.32.0.dist-info").mkdir()
    (site / "vllm-0.32.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    python, script = directory / "bin/python3", directory / "bin/vllm"
    python.parent.mkdir()
    # What the fake engine runs is not measured: measuring is slow, and none of it is ours.
    python.write_text(f'#!/bin/sh\nunset COVERAGE_PROCESS_CONFIG\nexec {sys.executable} "$@"\n')
    script.write_text(f"#!{python}\nimport sys\nsys.path[:0] = [{str(TESTS)!r}]\nfrom fake_vllm import main\nmain()\n")
    for file in (python, script):
        file.chmod(0o755)
    return script


class Faulty(Guarded):
    """One `kvguard serve` of a fake engine with faults."""

    start_limit, look_every = 90.0, 0.05

    def __init__(
        self,
        directory: Path,
        *flags: str,
        faults: Sequence[str] = (),
        policy: str = "",
        options: Sequence[str] = (),
        out: Path | None = None,
        err: Path | None = None,
        **env: str,
    ):
        vllm = install(directory / "engine")
        model = write(directory / "model", SMOLLM2, {}, tokenizer_config__json='{"chat_template": "{{ messages }}"}')
        self.notes = directory / "notes"
        self.notes.mkdir()
        super().__init__(
            directory,
            model,
            *flags,
            vllm=str(vllm),
            policy=policy,
            options=options,
            out=out,
            err=err,
            env={
                "PYTHONPATH": os.pathsep.join(filter(None, (str(vllm.parent.parent / "site"), os.environ.get("PYTHONPATH")))),
                "FAKE_VLLM_FAULTS": ",".join(faults),
                "FAKE_VLLM_NOTES": str(self.notes),
                **env,
            },
        )

    def note(self, name: str) -> list[int]:
        """Process ids that the engine left for us."""
        return [int(word) for word in (self.notes / name).read_text().split()]

    def wait_note(self, name: str) -> list[int]:
        self._wait(lambda: (self.notes / name).exists() and (self.notes / name).read_text(), f"noted {name}")
        return self.note(name)
