"""An arm's engine for another program on this machine: completions over loopback, cold, and only for who knows the key."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvguard.engine.client import EngineClient

PATHS = ("/v1/completions", "/v1/chat/completions")
_HEAD, _BODY = 1 << 16, 64 << 20
_DEADLINE = 3600.0


@dataclass(slots=True)
class Endpoint:
    """`url` without a path. `generated` answers of more than one token came, `cut` of them ended by their length."""

    client: EngineClient
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    port: int = 0
    generated: int = 0
    cut: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, method: str, path: str, key: str, body: bytes) -> tuple[int, Any]:
        """The status and JSON of one request."""
        if not hmac.compare_digest(key.encode(), f"Bearer {self.key}".encode()):
            return 401, _error("required is the key of this endpoint")
        if method != "POST" or path not in PATHS:
            return 404, _error(f"only POST to {' and '.join(PATHS)}")
        try:
            asked = json.loads(body)
            question = {"cache_salt": secrets.token_hex(16), **asked}
        except (ValueError, TypeError, RecursionError):
            return 400, _error("the body is no JSON object")
        if question.get("stream"):
            return 400, _error("streams are not passed on")
        found = await self.client.post(path, question, deadline=_DEADLINE)
        if found.status is None or found.body is None:
            return 502, _error(found.problem)
        self._count(question, found.body)
        return found.status, found.body

    def _count(self, question: dict[str, Any], body: Any) -> None:
        """Whether the length ended an answer. One token, and an echo, are how a given text is scored."""
        if question.get("echo") or question.get("max_tokens") in (0, 1):
            return
        for choice in body.get("choices") or () if isinstance(body, dict) else ():
            self.generated += 1
            self.cut += isinstance(choice, dict) and choice.get("finish_reason") == "length"


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": f"kvguard: {message}", "type": "invalid_request_error"}}


@asynccontextmanager
async def endpoint(client: EngineClient) -> AsyncIterator[Endpoint]:
    """The endpoint on a free port of 127.0.0.1, until the context is left; its connections end with it."""
    one = Endpoint(client)
    open_: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (a callback of start_server runs as a task)
        open_.add(task)
        try:
            while await _exchange(one, reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # not HTTP, or gone: its own affair
        except asyncio.CancelledError:
            pass  # by us, below; Python 3.11 logs a handler that ends as cancelled
        finally:
            open_.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=_HEAD)
    one.port = int(server.sockets[0].getsockname()[1])
    try:
        yield one
    finally:
        server.close()
        for task in [*open_]:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)


async def _exchange(one: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """One request and its answer; False when there is no other to come. Raises ValueError for what is not HTTP/1.1."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    length = int(headers.get("content-length") or 0)
    if not 0 <= length <= _BODY or "transfer-encoding" in headers:
        raise ValueError("no length, or one beyond the limit")
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(length)
    status, document = await one.answer(method, path.partition("?")[0], headers.get("authorization", ""), body)
    content = json.dumps(document).encode()
    last = headers.get("connection", "").lower() == "close"
    writer.write(
        f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n{'connection: close' + chr(13) + chr(10) if last else ''}\r\n".encode()
        + content
    )
    await writer.drain()
    return not last
