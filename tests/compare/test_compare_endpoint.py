"""The endpoint for another program: what passes, what does not, and what it sees of truncation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kvguard.compare.endpoint import Endpoint, endpoint
from kvguard.engine.client import Answer


class FakeClient:
    """An engine client that answers with what it was asked."""

    def __init__(self, finish: str = "stop", status: int | None = 200) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._finish, self._status = finish, status

    async def post(self, path: str, body: dict[str, Any], deadline: float = 0) -> Answer:
        self.asked.append((path, body))
        if self._status is None:
            return Answer(error="connection lost")
        return Answer(status=self._status, body={"choices": [{"text": "é", "finish_reason": self._finish}]})


def at(client: FakeClient, do: Callable[[Endpoint, httpx.AsyncClient], Awaitable[None]]) -> Endpoint:
    async def run() -> Endpoint:
        async with endpoint(client) as one, httpx.AsyncClient(base_url=one.url, trust_env=False, timeout=60) as http:  # type: ignore[arg-type]
            await do(one, http)
        with pytest.raises(OSError, match=r"."):
            await asyncio.open_connection("127.0.0.1", one.port)
        return one

    return asyncio.run(run())


def key(one: Endpoint) -> dict[str, str]:
    return {"authorization": f"Bearer {one.key}"}


def test_completions_pass_cold_and_are_counted() -> None:
    client = FakeClient("length")

    async def do(one: Endpoint, http: httpx.AsyncClient) -> None:
        bodies = [
            {"prompt": "x", "max_tokens": 5},
            {"prompt": "y", "max_tokens": 1},
            {"prompt": "z", "echo": True, "max_tokens": 9},
        ]
        for body in bodies:  # over one connection
            found = await http.post("/v1/completions", json=body, headers=key(one))
            assert (found.status_code, found.json()["choices"][0]["text"]) == (200, "é")
        assert (await http.post("/v1/chat/completions", json={"cache_salt": "s"}, headers=key(one))).status_code == 200

    one = at(client, do)
    assert [path for path, _ in client.asked] == ["/v1/completions"] * 3 + ["/v1/chat/completions"]
    salts = [body["cache_salt"] for _, body in client.asked]
    assert len({*salts}) == 4
    assert salts[3] == "s"
    assert (one.generated, one.cut) == (2, 2)


def test_only_who_knows_the_key_may_ask_and_only_for_completions() -> None:
    client = FakeClient()

    async def do(one: Endpoint, http: httpx.AsyncClient) -> None:
        assert (await http.post("/v1/completions", json={})).status_code == 401
        assert (
            await http.post("/v1/completions", json={}, headers={"authorization": "Bearer é".encode("latin-1")})
        ).status_code == 401
        for path in ("/_kvguard/inside/evidence", "/v1/models", "/wake_up"):
            assert (await http.post(path, json={}, headers=key(one))).status_code == 404
        assert (await http.get("/v1/completions", headers=key(one))).status_code == 404
        assert (await http.post("/v1/completions", json={"stream": True}, headers=key(one))).status_code == 400
        for content in (b"", b"[]", b"{", b'"x"', b"[" * 100_000):
            assert (await http.post("/v1/completions", content=content, headers=key(one))).status_code == 400

    at(client, do)
    assert client.asked == []


@pytest.mark.parametrize(("status", "found"), [(400, 400), (None, 502)])
def test_what_the_engine_refuses_is_passed_on(status: int | None, found: int) -> None:
    async def do(one: Endpoint, http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/completions", json={"prompt": "x"}, headers=key(one))
        assert answer.status_code == found

    at(FakeClient(status=status), do)


@pytest.mark.parametrize(
    "said",
    [
        b"\r\n\r\n",
        b"x" * (1 << 17) + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http_ends_its_connection_alone(said: bytes) -> None:
    async def do(one: Endpoint, http: httpx.AsyncClient) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(said)
        with contextlib.suppress(ConnectionError):  # what was not read makes it a reset
            assert await reader.read() == b""
        writer.close()
        answer = await http.post("/v1/completions", content=json.dumps({"prompt": "x"}), headers=key(one))
        assert answer.status_code == 200

    at(FakeClient(), do)


def test_a_client_that_hangs_does_not_hold_up_the_end() -> None:
    async def do(one: Endpoint, http: httpx.AsyncClient) -> None:
        hanging.connect(("127.0.0.1", one.port))
        hanging.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert (await http.post("/v1/completions", json={}, headers=key(one))).status_code == 200

    with socket.socket() as hanging:
        at(FakeClient(), do)
