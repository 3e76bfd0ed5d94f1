"""Where the engine listens, the limits towards it, and the pool of connections that reach it."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvguard.proxy.connection import Connection


@dataclass(frozen=True, slots=True)
class Upstream:
    """The engine: over the Unix socket `uds`, else at `base_url`. With a socket, `base_url` only names a host."""

    uds: str | None
    base_url: str = "http://localhost"


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, sizes in bytes. There is no limit on the whole request: generations are long.

    `head_s` is for a request's head, from its first byte or the connection's beginning; `body_silence_s` is silence inside
    a request body. `first_byte_s` covers queueing and prefill; `between_chunks_s` is silence inside a response.
    `pool_idle_s` must stay under the engine's own keep-alive (vLLM: 5 s unless VLLM_HTTP_TIMEOUT_KEEP_ALIVE), or requests
    meet connections it just closed.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    between_chunks_s: float = 600.0
    head_s: float = 60.0
    head_bytes: int = 64 * 2**10
    body_silence_s: float = 60.0
    body_bytes: int = 100 * 2**20
    pool_idle_s: float = 4.0


class Unreachable(Exception):
    """No connection to the engine; the text is one line without addresses that mean nothing to a client."""


class Client:
    """The pool of one engine's connections, without a limit: that is the engine's. Lives on the loop that uses it.

    Nothing is read from the environment and nothing is kept between requests but connections. Raises ValueError for a base
    URL that is not http or https.
    """

    def __init__(self, upstream: Upstream, limits: Limits) -> None:
        base = urlsplit(upstream.base_url)
        if base.scheme not in ("http", "https") or not base.hostname:
            raise ValueError(f"{upstream.base_url!r} is not an http or https URL")
        self._uds = upstream.uds
        self._host_name = base.hostname
        self._port = base.port or (443 if base.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if base.scheme == "https" and not upstream.uds else None
        self._limits = limits
        self._idle: deque[Connection] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self.prefix = base.path.rstrip("/")
        # Over a Unix socket the client's own Host goes through: the engine builds redirects from it.
        self.host = None if upstream.uds else base.netloc.rpartition("@")[2].encode()

    def idle(self) -> Connection | None:
        """The connection that was used last, if one is open and young enough."""
        oldest = asyncio.get_running_loop().time() - self._limits.pool_idle_s
        while self._idle:
            connection = self._idle.pop()
            if not connection.closing and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """A new connection. One that fails is tried once more: not a byte was sent. Raises Unreachable."""
        try:
            try:
                return await self._connect()
            except TimeoutError:
                raise
            except OSError:
                return await self._connect()
        except OSError as error:
            raise Unreachable(_connect_problem(error)) from error

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.connect_s):
            if self._uds:
                _, connection = await loop.create_unix_connection(self._new, self._uds)
            else:
                _, connection = await loop.create_connection(
                    self._new,
                    self._host_name,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host_name if self._tls else None,
                )
        return connection

    def _new(self) -> Connection:
        return Connection(self._forget)

    def put_back(self, connection: Connection) -> None:
        """Keep a connection whose response is complete, or close it when it cannot be used again."""
        if self._closed or not connection.reusable:
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._limits.pool_idle_s, self._close_old)

    def _close_old(self) -> None:
        """One timer for the pool; it runs while there are idle connections."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._limits.pool_idle_s
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.popleft().abort()
        self._sweep = loop.call_at(self._idle[0].idle_since + self._limits.pool_idle_s, self._close_old) if self._idle else None

    def _forget(self, connection: Connection) -> None:
        """An idle connection was closed by the engine, or spoke without being asked."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the pool and every connection in it."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        while self._idle:
            self._idle.pop().abort()


def _connect_problem(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "cannot connect (no answer in time)"
    return f"cannot connect ({errno.errorcode.get(error.errno or 0, type(error).__name__)})"
