"""Headers, paths and error events, as plain functions."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.proxy.access_log import identity
from kvguard.proxy.headers import request_headers, response_headers, takes_plain_text
from kvguard.proxy.paths import ROUTES, is_private, route_label
from kvguard.proxy.refusal import engine_silent, error_event
from kvguard.proxy.step import Rest, begun
from kvguard.proxy.upstream import Client, Limits, Upstream

names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(str.encode)
values = st.text(st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), max_size=12).map(str.encode)
pairs = st.lists(st.tuples(names.map(lambda name: b"x-" + name), values), max_size=8)


@given(pairs)
def test_ordinary_headers_pass_in_order_both_ways(headers):
    assert request_headers(headers, 0, None) == headers
    assert response_headers(headers, 200, ()) == headers


@given(pairs, st.integers(min_value=0, max_value=3))
def test_whatever_connection_names_is_dropped(headers, position):
    named = {name for name, _ in headers[:position]}
    listed = [*headers, (b"Connection", b" , ".join(name.upper() for name in named) or b"close")]
    expected = [pair for pair in headers if pair[0] not in named]
    assert response_headers(listed, 200, ()) == expected
    assert request_headers(listed, 0, None) == expected


def test_host_is_the_clients_unless_the_upstream_has_one():
    assert request_headers([(b"host", b"a")], 0, None) == [(b"host", b"a")]
    assert request_headers([(b"x", b"1"), (b"host", b"a")], 0, b"engine:8000") == [(b"host", b"engine:8000"), (b"x", b"1")]
    assert request_headers([], 0, None) == []


def test_content_length_states_the_body_that_was_read():
    assert request_headers([(b"content-length", b"0")], 0, None) == [(b"content-length", b"0")]
    assert request_headers([(b"transfer-encoding", b"chunked")], 5, None) == [(b"content-length", b"5")]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"Content-Type", b"Text/Event-Stream; charset=utf-8")], True),
        ([(b"content-type", b"text/event-stream"), (b"content-encoding", b"identity")], True),
        ([(b"content-type", b"text/event-stream"), (b"content-encoding", b"br")], False),
        ([(b"content-type", b"text/event-stream"), (b"content-length", b"9")], False),
        ([(b"content-type", b"application/json")], False),
        ([], False),
    ],
)
def test_where_an_error_event_can_go(headers, expected):
    assert takes_plain_text(headers) is expected


@given(st.integers(min_value=0, max_value=6), st.text("/.x", max_size=6), st.text("/.x", max_size=6))
def test_private_segment_is_found_under_any_encoding(depth, before, after):
    path = f"/{before}/_kvguard{after}"
    for _ in range(depth):
        path = "".join(f"%{ord(letter):02x}" for letter in path[:4]) + quote(path[4:], safe="")
    assert is_private(path)


@given(st.text(st.characters(exclude_characters="_%\\", codec="ascii")))
def test_paths_without_the_name_are_not_private(path):
    assert not is_private("/" + path)


def test_route_labels_are_bounded():
    assert {route_label(path) for path in [*ROUTES, "/", "/v1/models/x", "/v1/chat/completions/", "/" + "a" * 9999]} == {
        *ROUTES,
        "other",
    }


@pytest.mark.parametrize(
    ("tail", "opening"),
    [
        (b"", b""),
        (b"}\n\n", b""),
        (b"\r\n\r\n", b""),
        (b"x}\n", b"\n"),
        (b"}\r\n", b"\n"),
        (b'{"cu', b"\n\n"),
    ],
)
def test_error_event_stands_alone(tail, opening):
    event = error_event(engine_silent(600), tail)
    assert event.startswith(opening + b"data: ")
    assert event.endswith(b"}\n\n")
    error = json.loads(event[len(opening) + 6 :])["error"]
    assert error == {
        "message": "the engine sent nothing for 600 seconds",
        "type": "upstream_timeout",
        "param": None,
        "code": 504,
    }


def test_an_upstream_has_a_host_and_a_prefix():
    client = Client(Upstream(None, "http://user@engine:8000/prefix/"), Limits())
    assert (client.host, client.prefix) == (b"engine:8000", "/prefix")
    assert Client(Upstream("/socket"), Limits()).host is None


@pytest.mark.parametrize("url", ["engine:8000", "ftp://engine", "http://", "unix:/x"])
def test_an_upstream_that_is_no_url(url):
    with pytest.raises(ValueError, match="is not an http or https URL"):
        Client(Upstream(None, url), Limits())


async def two_steps(loop_turns: int) -> int:
    for _ in range(loop_turns):
        await asyncio.sleep(0)
    return loop_turns


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_coroutine_that_began_is_finished_by_awaiting_it(turns):
    async def run() -> int:
        found = begun(two_steps(turns))
        return await found if isinstance(found, Rest) else found

    assert asyncio.run(run()) == turns


def test_what_a_coroutine_raises_and_cancels_goes_through():
    async def fails(late: bool) -> None:
        if late:
            await asyncio.sleep(0)
        raise KeyError

    async def waits(cancelled: list[bool]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run() -> None:
        with pytest.raises(KeyError):
            begun(fails(False))
        rest = begun(fails(True))
        assert isinstance(rest, Rest)
        with pytest.raises(KeyError):
            await rest
        cancelled: list[bool] = []
        waiting = begun(waits(cancelled))
        assert isinstance(waiting, Rest)
        task = asyncio.ensure_future(waiting)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled == [True]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [
        (b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}),
        (b"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", {}),
        (b"nonsense", {}),
    ],
)
def test_names_of_a_request(traceparent, expected):
    headers = [(b"traceparent", traceparent), (b"x-request-id", b"r" * 300), (b"authorization", b"Bearer k")]
    assert identity(headers) == {**expected, "request_id": "r" * 200}
