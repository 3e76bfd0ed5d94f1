"""The least a relay on uvicorn and aiohttp can be, with none of kvguard's duties: what the cost of those is measured against.

It notices no client that leaves, has no timeouts, no metrics and no gate, and adds no header.
"""

from __future__ import annotations

import sys
from typing import Any

import aiohttp
import uvicorn
from yarl import URL

_DROPPED = {b"connection", b"keep-alive", b"transfer-encoding", b"host", b"content-length"}
_STAY = _DROPPED - {b"content-length"}


class Relay:
    """The ASGI app."""

    def __init__(self, uds: str) -> None:
        self._uds = uds

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            connector = aiohttp.UnixConnector(self._uds, limit=0)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._session.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"] if name not in _DROPPED]
        url = URL.build(scheme="http", host="localhost", path=scope["path"], encoded=True)
        async with self._session.request(scope["method"], url, headers=headers, data=body or None) as response:
            passed = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in _STAY]
            await send({"type": "http.response.start", "status": response.status, "headers": passed})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


if __name__ == "__main__":
    uvicorn.run(
        Relay(sys.argv[1]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
    )
