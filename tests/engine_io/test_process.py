"""The engine as a child: started, relayed, stopped, and nothing of it left. Orphans are seen in tests/guard/test_faults.py."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvguard.engine.process import EngineProcess, children_of, ending, reap_adopted
from kvguard.engine.run_directory import process_group_members
from kvguard.vocabulary import EngineFailed

SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
FAMILY = (
    "import subprocess, sys, time\n"
    "for _ in range(2): subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print('family', flush=True); time.sleep(600)\n"
)


class Engine:
    """An engine process that runs `code`; what it writes is kept."""

    def __init__(self, code: str, secrets: tuple[str, ...] = (), **env: str) -> None:
        self.seen: dict[str, bytes] = {}
        self._pipes = (os.pipe(), os.pipe())
        self.process = EngineProcess(
            [sys.executable, "-c", code],
            {**os.environ, **env},
            on_bytes=self._see,
            secrets=secrets,
            outputs=(self._pipes[0][1], self._pipes[1][1]),
        )

    def _see(self, stream: str, data: bytes) -> None:
        self.seen[stream] = self.seen.get(stream, b"") + data

    def passed(self) -> tuple[bytes, bytes]:
        """What went to standard output and error; to be called once, at the end."""
        read = []
        for reader, writer in self._pipes:
            os.close(writer)
            with os.fdopen(reader, "rb") as file:
                read.append(file.read())
        return read[0], read[1]

    async def until(self, reached: Callable[[], bool]) -> None:
        for _ in range(1000):
            if reached():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"not reached; it wrote {self.seen}")


def test_it_is_its_own_group_and_its_output_passes() -> None:
    async def live() -> Engine:
        engine = Engine(
            "import os, sys; print(os.getpgid(0), 'out', sys.stdin.read()); print('err hunter22', file=sys.stderr)",
            ("hunter22",),
        )
        assert await engine.process.wait() == 0
        await engine.process.clear()
        return engine

    engine = asyncio.run(live())
    out, err = engine.passed()
    assert out == b"%d out \n" % engine.process.pid
    assert err == b"err [redacted]\n"
    assert engine.seen == {"stdout": out, "stderr": err}
    assert engine.process.exit_code == 0


def test_sigterm_is_asked_first() -> None:
    async def live() -> int:
        engine = Engine(SLEEP)
        assert engine.process.exit_code is None
        await engine.until(lambda: bytes(sys.executable, "utf-8") in Path(f"/proc/{engine.process.pid}/cmdline").read_bytes())
        code = await engine.process.stop(5)
        engine.passed()
        assert not process_group_members(engine.process.pid)
        return code

    assert asyncio.run(live()) == -signal.SIGTERM


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    async def live() -> int:
        engine = Engine(DEAF)
        await engine.until(lambda: b"deaf" in engine.seen.get("stdout", b""))
        code = await engine.process.stop(0.2)
        engine.passed()
        return code

    assert asyncio.run(live()) == -signal.SIGKILL


@pytest.mark.parametrize("killed", [False, True])
def test_the_whole_group_goes(killed: bool) -> None:
    async def live() -> None:
        engine = Engine(FAMILY)
        await engine.until(lambda: b"family" in engine.seen.get("stdout", b""))
        group = engine.process.pid
        assert len(process_group_members(group)) == 3
        if killed:
            os.kill(group, signal.SIGKILL)
            assert await engine.process.wait() == -signal.SIGKILL
        await engine.process.clear()
        assert not process_group_members(group)
        await engine.process.stop(1)
        engine.passed()

    asyncio.run(live())


def test_the_resource_tracker_may_finish_its_work() -> None:
    """It unlinks shared memory after everybody else is gone; killed, it would leave it behind."""
    tracker = "import os, time; time.sleep(0.3); os.write(1, b'unlinked'); resource_tracker = 1"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {tracker!r}]); print('on', flush=True)\n"
    code += "time.sleep(600)"

    async def live() -> bytes:
        engine = Engine(code)
        await engine.until(lambda: b"on" in engine.seen.get("stdout", b""))
        os.kill(engine.process.pid, signal.SIGKILL)
        await engine.process.wait()
        await engine.process.clear()
        assert not process_group_members(engine.process.pid)
        return engine.passed()[0]

    assert asyncio.run(live()).endswith(b"unlinked")


def test_while_another_engine_lives_an_orphan_of_unknown_origin_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    monkeypatch.setattr("kvguard.engine.process._adopted", lambda: [orphan.pid])
    monkeypatch.setattr("kvguard.engine.process.reap_adopted", lambda: None)

    async def live() -> None:
        first, second = Engine(SLEEP), Engine(SLEEP)
        await first.process.stop(5)
        assert orphan.poll() is None, "it may be the second engine's"
        await second.process.stop(5)
        assert orphan.wait(10) == -signal.SIGKILL
        first.passed()
        second.passed()

    asyncio.run(live())


def test_what_is_cleared_is_not_cleared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours later, as when holding, the engine's process id may be somebody else's."""

    async def live() -> None:
        engine = Engine("pass")
        await engine.process.wait()
        await engine.process.clear()
        monkeypatch.setattr("kvguard.engine.process.process_group_members", lambda _: pytest.fail("looked again"))
        assert await engine.process.stop(1) == 0
        engine.passed()

    asyncio.run(live())


def test_an_engine_whose_parent_is_gone_does_not_start() -> None:
    code = (
        "import sys\n"
        "from kvguard.engine.process import _BECOME_ENGINE\n"
        "import subprocess\n"
        "sys.exit(subprocess.call([sys.executable, '-c', _BECOME_ENGINE, '1', sys.executable, '-c', 'print(1)']))\n"
    )

    async def live() -> Engine:
        engine = Engine(code)
        assert await engine.process.wait() == 1
        await engine.process.clear()
        return engine

    assert asyncio.run(live()).passed() == (b"", b"")


def test_a_command_that_cannot_be_started() -> None:
    with pytest.raises(EngineFailed, match=r"/x/vllm: could not be started: Argument list too long"):
        EngineProcess(["/x/vllm", "x" * (4 << 20)], {}, on_bytes=lambda *_: None, secrets=())


def test_other_children_are_not_ours_to_reap() -> None:
    child = os.fork()
    if child == 0:
        os._exit(3)
    while "Z" not in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]:
        pass
    assert child in children_of(os.getpid())
    reap_adopted()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (7, "exit code 7"), (-9, "signal SIGKILL"), (-63, "signal 63"), (-99, "signal 99")]
)
def test_how_it_ended_in_words(code: int, words: str) -> None:
    assert ending(code) == words
