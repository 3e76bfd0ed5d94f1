"""The engine's output passes unchanged, whatever becomes of ours, and secrets do not."""

from __future__ import annotations

import itertools
import os

from hypothesis import given
from hypothesis import strategies as st

from kvguard.engine.relay import MASK, Prefixer, Redactor, Relay


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_without_secrets_every_byte_passes_at_once(data: bytes, cuts: list[int]) -> None:
    redactor = Redactor([])
    for piece in _pieces(data, cuts):
        assert redactor.feed(piece) == piece


@given(
    st.lists(st.sampled_from([b"secret-key", b"secret", b"-key", b"x", b"s", b"\r\n"]), max_size=12),
    st.lists(st.integers(0, 90), max_size=8),
)
def test_secrets_are_masked_however_the_stream_is_cut(words: list[bytes], cuts: list[int]) -> None:
    data = b"".join(words)
    redactor = Redactor(["secret-key"])
    out = b"".join(redactor.feed(piece) for piece in _pieces(data, cuts)) + redactor.flush()
    assert out == data.replace(b"secret-key", MASK)


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(at)]


def test_a_relay_passes_bytes_and_shows_them_to_the_reader() -> None:
    source, feed = os.pipe()
    sink, output = os.pipe()
    seen: list[bytes] = []
    relay = Relay("stdout", os.fdopen(source, "rb", buffering=0), output, lambda _, data: seen.append(data), ["hidden!"])
    os.write(feed, b"progress 1%\rprogress 2%\r key=hidden! done\n")
    os.close(feed)
    relay.finish(5)
    os.close(output)
    with os.fdopen(sink, "rb") as reader:
        assert reader.read() == b"progress 1%\rprogress 2%\r key=[redacted] done\n"
    assert b"".join(seen) == b"progress 1%\rprogress 2%\r key=[redacted] done\n"


@given(st.lists(st.sampled_from([b"a line", b"\n", b"\r", b"x"]), max_size=12), st.lists(st.integers(0, 90), max_size=8))
def test_lines_are_prefixed_however_the_stream_is_cut(words: list[bytes], cuts: list[int]) -> None:
    data = b"".join(words)
    prefixer = Prefixer(b"two | ")
    out = b"".join(prefixer.feed(piece) for piece in _pieces(data, cuts)) + prefixer.flush()
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    assert out == b"".join(b"two | " + line + b"\n" for line in lines)


def test_a_prefixed_line_without_an_end_is_not_held_for_ever() -> None:
    prefixer = Prefixer(b"two | ")
    assert prefixer.feed(b"x" * 70_000) == b"two | " + b"x" * 70_000 + b"\n"


def test_the_reader_sees_lines_without_the_prefix() -> None:
    source, feed = os.pipe()
    sink, output = os.pipe()
    seen: list[bytes] = []
    relay = Relay("stdout", os.fdopen(source, "rb", buffering=0), output, lambda _, data: seen.append(data), ["hidden!"], b"2|")
    os.write(feed, b"one hidden!\ntwo")
    os.close(feed)
    relay.finish(5)
    os.close(output)
    with os.fdopen(sink, "rb") as reader:
        assert reader.read() == b"2|one [redacted]\n2|two\n"
    assert b"".join(seen) == b"one [redacted]\ntwo"


def test_a_blocked_output_does_not_block_the_engine() -> None:
    source, feed = os.pipe()
    sink, output = os.pipe()  # nobody reads this end until the engine has written everything
    relay = Relay("stderr", os.fdopen(source, "rb", buffering=0), output, lambda *_: None, [])
    line = b"x" * 1023 + b"\n"
    for _ in range(12 * 1024):  # 12 MiB: more than the pipe and the backlog hold
        os.write(feed, line)
    os.close(feed)
    with os.fdopen(sink, "rb") as reader:
        got = b""
        while b"output was blocked" not in got:
            got += reader.read(1 << 16)
        os.set_blocking(reader.fileno(), False)
    relay.finish(5)
    os.close(output)
    assert b"bytes of engine output dropped" in got
