"""What answered requests are shown to, and that it is never a client's concern."""

from __future__ import annotations

from typing import Any

import pytest
from proxy_fakes import Call, eventually
from structlog.testing import capture_logs

BODY = b'{"prompt": "quixotic-bandicoot-58213"}'
Shown = list[tuple[str, dict[bytes, bytes], bytes]]


async def ok(call: Call) -> None:
    await call.json(b'{"ok": true}')


async def missing(call: Call) -> None:
    await call.json(b"{}", status=b"404 Not Found")


async def breaks_off(call: Call) -> None:
    await call.start_stream()
    await call.chunk(b"data: 1\n\n")
    call.abort()


def tapped(proxy: Any) -> Shown:
    shown: Shown = []
    proxy.plane.set_tap(lambda path, headers, body: shown.append((path, dict(headers), body)))
    return shown


def test_an_answered_request_is_shown_whole(serve: Any) -> None:
    proxy, _ = serve(ok)
    shown = tapped(proxy)
    with proxy.client() as client:
        client.ask("POST", "/v1/completions?x=1", ("x-kvguard-shadow: off",), BODY)
        proxy.observer.next_end()
    [(path, headers, body)] = shown
    assert (path, headers[b"x-kvguard-shadow"], body) == ("/v1/completions", b"off", BODY)


@pytest.mark.parametrize("script", [missing, breaks_off])
def test_a_request_without_a_whole_answer_is_not_shown(serve: Any, script: Any) -> None:
    proxy, _ = serve(script)
    shown = tapped(proxy)
    with proxy.client() as client:
        client.ask("POST", "/v1/completions", body=BODY)
        proxy.observer.next_end()
    assert shown == []


def test_a_tap_that_raises_breaks_no_request(serve: Any) -> None:
    proxy, _ = serve(ok)

    def broken(*_: object) -> None:
        raise RuntimeError(BODY.decode())

    proxy.plane.set_tap(broken)
    with capture_logs() as logs, proxy.client() as client:
        for _ in range(2):  # the connection lives on
            assert client.ask("POST", "/v1/completions", body=BODY).body == b'{"ok": true}'
            assert proxy.observer.next_end() == ("/v1/completions", "POST", 200, "ok")
        assert eventually(lambda: len(logs) == 2)
    assert [entry["error"] for entry in logs] == ["RuntimeError"] * 2
    assert "quixotic" not in str(logs)


def test_a_tap_can_be_taken_away(serve: Any) -> None:
    proxy, _ = serve(ok)
    shown = tapped(proxy)
    proxy.plane.set_tap(None)
    with proxy.client() as client:
        assert client.ask("POST", "/v1/completions", body=BODY).status == 200
        proxy.observer.next_end()
    assert shown == []
