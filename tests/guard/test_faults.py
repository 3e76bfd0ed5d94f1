"""`kvguard serve` on an engine that fails in every way it can: exit codes, gate, records, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_engine import Faulty
from guarded import Reader

PROVEN = "kv_cache: {dtype: fp8_e4m3, scales: unit, min_confidence: proven}\n"
NOW = ("--settle", "0")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Faulty]]:
    """Starts kvguard on the fake engine, several times if need be; all are ended with the test."""
    started: list[Faulty] = []

    def one(*flags: str, policy: str = PROVEN, options: tuple[str, ...] = NOW, **more: Any) -> Faulty:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(Faulty(directory, *flags, policy=policy, options=options, **more))
        return started[-1]

    yield one
    for each in started:
        each.close()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Starts that fail: exit 4


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "exits",
            "ended before it was ready, with exit code 1; it said: ValueError: No available memory for the cache blocks.",
        ),
        ("dies_of_a_request", "ended before it was ready, with signal SIGKILL"),
        ("hangs", "not healthy within 1 s of its start"),
        ("fails", "completion: HTTP 500: EngineCore encountered an issue"),
        ("nan", "completion: invalid log probability nan"),
    ],
)
def test_an_engine_that_does_not_come_up(start: Callable[..., Faulty], fault: str, says: str) -> None:
    run = start(faults=[fault], options=("--start-timeout", "1") if fault == "hangs" else NOW)
    assert run.wait_exit() == 4
    assert run.termination_log.read_text().startswith("engine failed to start: ")
    assert says in run.termination_log.read_text()
    assert "engine failed to start" in run.err
    assert "Traceback" not in run.err
    if "completion" in says:  # it came up, so there is evidence to keep
        assert run.record()["predicate"]["verdict"] == "refuse"
        assert run.check("canaries").result == "fail"
        assert run.effective().confidence == "proven"
    run.assert_nothing_left()


def test_garbage_is_not_excused_by_a_policy_that_warns(start: Callable[..., Faulty]) -> None:
    assert start(faults=["nan"], policy=PROVEN + "on_violation: warn\n").wait_exit() == 4


def test_dummy_weights_may_repeat_themselves(start: Callable[..., Faulty]) -> None:
    run = start("--load-format", "dummy", faults=["repeats"]).wait_ready()
    assert run.check("canaries").result == "warn"


# Verdicts: exit 3, hold, warn


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [
        ("sixteen_bit", "kv_cache_dtype", "found bfloat16, proven (cache tensors of 30 layers on 1 rank)"),
        ("rank_missing", "confidence", "at least proven"),
        ("worker_error", "confidence", "at least proven"),
    ],
)
def test_an_engine_that_runs_something_else_is_refused(start: Callable[..., Faulty], fault: str, check: str, says: str) -> None:
    run = start(faults=[fault])
    assert run.wait_exit() == 3
    assert run.check(check).result in ("fail", "unverified")
    said = run.termination_log.read_text()
    assert said.startswith("refused by policy: ")
    assert says in said
    assert run.record()["predicate"]["verdict"] == "refuse"
    run.assert_nothing_left()


def test_what_could_not_be_read_is_reported(start: Callable[..., Faulty]) -> None:
    run = start(faults=["other_nonce", "no_metrics"], policy="kv_cache: {dtype: fp8_e4m3}\n")
    assert run.wait_exit() == 3
    problems = run.record()["predicate"]["undigested"]["problems"]
    assert [text.partition(":")[0] for text in sorted(problems)] == ["metrics", "tensors"]
    assert all(text in run.err for text in problems)


def test_broken_scales_explain_garbage(start: Callable[..., Faulty]) -> None:
    run = start(faults=["broken_scales", "nan"])
    assert run.wait_exit() == 3
    assert "kv_scales fail: required exactly 1.0; found invalid" in run.termination_log.read_text()
    assert "canaries fail" in run.termination_log.read_text()


def test_hold_stops_the_engine_and_stays_up(start: Callable[..., Faulty]) -> None:
    run = start(faults=["sixteen_bit"], policy=PROVEN + "on_violation: hold\n").wait_state("refused")
    assert run.engine_processes() == []
    for answer in (run.management("/readyz"), run.api("/v1/models"), run.api("/health")):
        assert answer.status_code == 503
        assert "found bfloat16" in answer.text
    assert run.management("/livez").status_code == 200
    assert run.management("/record").json()["predicate"]["verdict"] == "hold"
    assert 'kvguard_state{state="refused"} 1.0' in run.management("/metrics").text
    assert run.stop() == 3
    run.assert_nothing_left()


def test_warn_serves_and_says_so(start: Callable[..., Faulty]) -> None:
    run = start(faults=["sixteen_bit"], policy=PROVEN + "on_violation: warn\n").wait_ready()
    assert run.chat().headers["x-kvguard-kv-cache-dtype"] == "bfloat16"
    assert run.record()["predicate"]["verdict"] == "warn"
    assert "policy violated, serving all the same" in run.err
    assert not run.termination_log.exists()
    assert run.stop() == 0
    run.assert_nothing_left()


def test_refused_before_the_start(start: Callable[..., Faulty]) -> None:
    run = start("--kv-cache-dtype", "fp8_e5m2")
    assert run.wait_exit() == 3
    assert not (run.notes / "started").exists()
    assert run.record()["predicate"]["plan"]["refusal"] == run.termination_log.read_text().strip().removeprefix(
        "refused by policy: "
    )
    assert not run.run_base.exists()


def test_held_before_the_start(start: Callable[..., Faulty]) -> None:
    run = start("--kv-cache-dtype", "fp8_e5m2", policy=PROVEN + "on_violation: hold\n").wait_state("refused")
    assert "fp8_e5m2" in run.api("/v1/models").text
    assert run.management("/record").json()["predicate"]["verdict"] == "hold"
    assert not (run.notes / "started").exists()
    assert run.stop() == 3


# Engines that die while they serve: exit 5


def test_a_killed_engine_takes_its_orphans_with_it(start: Callable[..., Faulty]) -> None:
    run = start(faults=["orphan"]).wait_ready()
    engine, parent = run.note("started")
    [orphan] = run.note("orphan")
    assert parent == run.process.pid
    assert lives(orphan)
    reader = Reader(run)
    assert reader.began.wait(120)
    os.kill(engine, signal.SIGKILL)
    assert run.wait_exit() == 5
    assert not lives(orphan)
    reader.join(120)
    events = reader.events()
    assert events[-1] != "[DONE]"
    assert "error" in events[-1]
    assert run.termination_log.read_text() == "the engine ended with signal SIGKILL while serving\n"
    run.assert_nothing_left()


def test_an_engine_that_ends_by_itself_while_draining(start: Callable[..., Faulty]) -> None:
    run = start(options=("--settle", "20")).wait_ready()
    run.process.send_signal(signal.SIGTERM)
    run.wait_state("draining")
    os.kill(run.note("started")[0], signal.SIGKILL)
    assert run.wait_exit() == 5


# Signals


@pytest.mark.parametrize(
    ("fault", "state", "number"),
    [
        ("hangs", "starting", signal.SIGTERM),
        ("never_healthy", "starting", signal.SIGINT),
        ("evidence_hangs", "verifying", signal.SIGTERM),
    ],
)
def test_stopped_before_it_served(start: Callable[..., Faulty], fault: str, state: str, number: signal.Signals) -> None:
    run = start(faults=[fault]).wait_state(state)
    run.wait_note("started")
    assert run.api("/v1/models").status_code == 503
    assert run.stop(number) == 0
    run.assert_nothing_left()


def test_streams_finish_within_the_grace(start: Callable[..., Faulty]) -> None:
    run = start().wait_ready()
    readers = [Reader(run) for _ in range(4)]
    assert all(reader.began.wait(120) for reader in readers)
    assert run.stop() == 0
    for reader in readers:
        reader.join(120)
        assert reader.events()[-1] == "[DONE]"
        assert len(reader.events()) == 13
    run.assert_nothing_left()


def test_a_second_signal_ends_the_waiting(start: Callable[..., Faulty]) -> None:
    run = start(options=("--settle", "200", "--grace", "240")).wait_ready()
    reader = Reader(run)
    assert reader.began.wait(120)
    run.process.send_signal(signal.SIGTERM)
    run.wait_state("draining")
    assert run.stop() == 0
    assert "a second signal" in run.err
    reader.join(120)
    run.assert_nothing_left()


def test_an_engine_that_ignores_sigterm_ends_within_the_grace(start: Callable[..., Faulty]) -> None:
    run = start(faults=["stubborn"], options=("--settle", "5", "--grace", "2")).wait_ready()
    assert run.stop() == 0
    assert "cut off" not in run.err
    run.assert_nothing_left()


def test_what_a_killed_kvguard_leaves_is_swept_by_the_next(start: Callable[..., Faulty]) -> None:
    first = start(faults=["stubborn", "orphan"]).wait_ready()
    engine, _ = first.note("started")
    first.process.kill()
    first.process.wait()
    assert lives(engine)
    second = start(KVGUARD_RUN_DIR=str(first.run_base)).wait_ready()
    assert not lives(engine)
    assert len(list(first.run_base.iterdir())) == 1
    assert second.stop() == 0
    assert not first.run_base.exists()
    for orphan in first.note("orphan"):  # of another session: beyond a sweep's sight
        os.kill(orphan, signal.SIGKILL)


# The log


def test_a_loud_log_passes_without_the_key(start: Callable[..., Faulty]) -> None:
    run = start("--api-key", "key-4711-of-tests", faults=["loud"]).wait_ready()
    assert run.stop() == 0
    out = (run.directory / "out").read_bytes()
    garbage = bytes(range(256)) * 40
    assert b"[redacted]\n" + garbage + b"\r" + b"x" * (3 << 20) in out
    assert b"key-4711" not in out + (run.directory / "err").read_bytes()
    for record in run.records.iterdir():
        assert "key-4711" not in record.read_text()
    assert b"the fake engine starts" in out


def test_a_blocked_output_stops_nothing(tmp_path: Path, start: Callable[..., Faulty]) -> None:
    fifo = tmp_path / "out"
    os.mkfifo(fifo)
    unread = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        run = start(faults=["flood"], out=fifo).wait_ready()
        assert run.chat().status_code == 200
        assert run.stop() == 0
        run.assert_nothing_left()
    finally:
        os.close(unread)


def test_readers_of_our_output_may_go(tmp_path: Path, start: Callable[..., Faulty]) -> None:
    fifo = tmp_path / "out"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    run = start(faults=["flood"], out=fifo, err=fifo)
    os.close(reader)
    run.wait_ready()
    assert run.chat().status_code == 200
    assert run.stop() in (0, 120)  # 120: Python's own word for output that could not be flushed at the end
    run.assert_nothing_left()


# Places that cannot be had


def test_a_record_that_cannot_be_written_is_reported_and_serving_goes_on(start: Callable[..., Faulty]) -> None:
    run = start(faults=["no_metrics"], options=(*NOW, "--record-dir", "/dev/null/records")).wait_ready()
    assert "run record could not be written" in run.err
    assert run.management("/record").json()["predicate"]["verdict"] == "serve"
    assert run.chat().headers["x-kvguard-record"].startswith("sha256:")
    assert run.chat().headers["x-kvguard-confidence"] == "proven"  # the tensors need no metrics


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_known_before_the_start(start: Callable[..., Faulty], taken: int) -> None:
    for run in (start("--port", str(taken)), start(options=("--management-port", str(taken)))):
        assert run.wait_exit() == 2
        assert f"cannot listen on 127.0.0.1:{taken}: another process has this port" in run.err
        assert not (run.notes / "started").exists()
        assert not run.run_base.exists()
        assert not run.records.exists()


def test_certificates_that_cannot_be_read_are_known_before_the_start(start: Callable[..., Faulty]) -> None:
    run = start("--ssl-certfile", "/none/c.pem", "--ssl-keyfile", "/none/k.pem")
    assert run.wait_exit() == 2
    assert "/none/c.pem" in run.err
    assert not (run.notes / "started").exists()


@pytest.fixture
def socket_path() -> Iterator[Path]:
    path = Path(f"/tmp/kvgt-api-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def test_a_unix_socket_is_taken_over_from_the_dead_only(start: Callable[..., Faulty], socket_path: Path) -> None:
    path = socket_path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as theirs:
        theirs.bind(str(path))
        theirs.listen()
        run = start("--uds", str(path))
        assert run.wait_exit() == 2
        assert f"cannot listen on the Unix socket {path}: Address already in use" in run.err
        assert path.exists()
    run = start("--uds", str(path)).wait_ready()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        assert client.get("http://engine/v1/models").headers["x-kvguard-confidence"] == "proven"
    assert run.stop() == 0
    assert not path.exists()


def test_a_command_that_is_not_run_is_one_line_and_exit_2(start: Callable[..., Faulty]) -> None:
    run = start("--headless")
    assert run.wait_exit() == 2
    assert run.err.startswith("kvguard: launch mode headless: not guarded")
    assert run.err.count("\n") == 1
    assert not (run.notes / "started").exists()


def test_two_starts_on_one_management_port(start: Callable[..., Faulty]) -> None:
    first = start()
    second = start(options=(*NOW, "--management-port", str(first.management_port)))
    second.management_port = first.management_port
    deadline = time.monotonic() + 90
    while first.process.poll() is None and second.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    winner, loser = (first, second) if second.process.poll() is not None else (second, first)
    winner.wait_ready()
    assert loser.process.returncode == 2
    assert "--management-port" in loser.err or "another process has this port" in loser.err
