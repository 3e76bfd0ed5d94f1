"""A process that answers as an engine would, and as fast as Python can: the far side of every proxy that is measured.

`python tests/bench/upstream.py SOCKET PORT GAP` listens on both. A body with `"stream":true` gets an event stream of 64 chunks,
one every GAP milliseconds; with `"burst"` in it without a pause, each by a write of its own; with `"idle"` the stream stops
after its first chunk until the client leaves. GET /stats tells what is running. Everything else gets the same 1 KB of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

CHUNKS = 64
_TOKEN = (
    'data: {"id":"chatcmpl-8f14e45fceea167a","object":"chat.completion.chunk","created":1764442800,"model":"bench",'
    '"choices":[{"index":0,"delta":{"content":" token %02d"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_LAST = b"data: [DONE]\n\n"
_EVENTS = [(_TOKEN % number).encode() for number in range(CHUNKS)]
_EVENTS[-1] += _LAST
WIRE = [b"%x\r\n%s\r\n" % (len(event), event) for event in _EVENTS]
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 29 Nov 2025 19:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CHOICE: dict[str, Any] = {
    "index": 0,
    "message": {"role": "assistant", "content": "x" * 560},
    "logprobs": None,
    "finish_reason": "stop",
}
_ANSWER: dict[str, Any] = {
    "id": "chatcmpl-8f14e45fceea167a",
    "object": "chat.completion",
    "created": 1764442800,
    "model": "bench",
    "choices": [_CHOICE],
    "usage": {"prompt_tokens": 20, "completion_tokens": 140, "total_tokens": 160},
}


def _response(body: bytes) -> bytes:
    head = (
        "HTTP/1.1 200 OK\r\ndate: Sat, 29 Nov 2025 19:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n"
    )
    return head.encode() + body


JSON = _response(json.dumps(_ANSWER).encode().ljust(1024))
_MODELS = _response(json.dumps({"object": "list", "data": [{"id": "bench", "object": "model"}]}).encode())


class Engine(asyncio.Protocol):
    """One connection."""

    running = 0
    requests = 0
    connections = 0
    gap_s = 0.002

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0
        self._gap = Engine.gap_s
        self._timer: asyncio.TimerHandle | None = None
        self._streaming = False
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        Engine.connections += 1

    def connection_lost(self, _: Exception | None) -> None:
        Engine.connections -= 1
        if self._timer is not None:
            self._timer.cancel()
        if self._streaming:
            self._streaming = False
            Engine.running -= 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        start = head.find(b"content-length:")
        length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
        if len(self._buffer) < end + 4 + length:
            return
        body, self._buffer = self._buffer[end + 4 :], b""
        if head.startswith(b"get "):
            self._transport.write(self._get(head))
            return
        Engine.requests += 1
        if b'"stream":true' not in body.replace(b" ", b""):
            self._transport.write(JSON)
            return
        Engine.running += 1
        self._streaming = True
        self._transport.write(_STREAM_HEAD + WIRE[0])
        self._left = 1
        self._gap = 0.0 if b'"burst"' in body else Engine.gap_s
        if b'"idle"' not in body:
            self._timer = self._loop.call_later(self._gap, self._next)

    def _next(self) -> None:
        if self._left < CHUNKS:
            self._transport.write(WIRE[self._left])
            self._left += 1
            self._timer = self._loop.call_later(self._gap, self._next)
        else:
            self._transport.write(b"0\r\n\r\n")
            self._timer = None
            self._streaming = False
            Engine.running -= 1

    def _get(self, head: bytes) -> bytes:
        if head.startswith(b"get /stats"):
            stats = {"running": Engine.running, "requests": Engine.requests, "connections": Engine.connections}
            return _response(json.dumps(stats).encode())
        return _MODELS


async def main(uds: str, port: int, gap_ms: float) -> None:
    """Serve until killed."""
    Engine.gap_s = gap_ms / 1000
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(Engine, uds, backlog=2048)
    await loop.create_server(Engine, "127.0.0.1", port, backlog=2048)
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
