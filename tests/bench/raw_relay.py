"""The least that anything on uvloop can cost: bytes pass both ways, and nobody looks at them.

It reads no HTTP and keeps one connection to the engine for each of the client's, so it is no proxy that could be used. What it
takes is what no proxy in Python with one loop gets below: to wait, to read and to write, for each chunk.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop


class Side(asyncio.Protocol):
    """One end; what comes before there is another one waits."""

    def __init__(self, other: Side | None = None) -> None:
        self.other = other
        self.waiting = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
        else:
            self.waiting += data

    def connection_lost(self, _: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


class Client(Side):
    """The client's end, which asks for the engine's."""

    def __init__(self, uds: str) -> None:
        super().__init__()
        self._uds = uds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        _, engine = await asyncio.get_running_loop().create_unix_connection(lambda: Side(self), self._uds)
        engine.transport.write(self.waiting)
        self.other = engine


async def main(uds: str, port: int) -> None:
    """Serve until killed."""
    await asyncio.get_running_loop().create_server(lambda: Client(uds), "127.0.0.1", port, backlog=2048)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
