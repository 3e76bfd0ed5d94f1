"""Where the engine listens, the limits towards it, and the HTTP client that reaches it."""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from yarl import URL

UPSTREAM_FAILURES = (aiohttp.ClientError, OSError)
"""What the client raises when the engine goes away or speaks no HTTP. asyncio.TimeoutError is an OSError."""

# The client would add these four by itself; what the client of the proxy did not send must not appear.
_NEVER_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

# aiohttp warns above 1 MiB of plain bytes, because it writes those in one go.
_ONE_WRITE = 2**20


@dataclass(frozen=True, slots=True)
class Upstream:
    """The engine: over the Unix socket `uds`, else at `base_url`. With a socket, `base_url` only names a host."""

    uds: str | None
    base_url: str = "http://localhost"


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, sizes in bytes. There is no limit on the whole request: generations are long.

    `first_byte_s` covers queueing and prefill; `between_chunks_s` is silence inside a response;
    `body_silence_s` is silence inside a request body. `pool_idle_s` must stay under the engine's own
    keep-alive (vLLM: 5 s unless VLLM_HTTP_TIMEOUT_KEEP_ALIVE), or requests meet connections it just closed.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    between_chunks_s: float = 600.0
    body_silence_s: float = 60.0
    body_bytes: int = 100 * 2**20
    pool_idle_s: float = 4.0


class Client:
    """The pooled client of one engine. Create and close it on the loop that uses it."""

    def __init__(self, upstream: Upstream, limits: Limits) -> None:
        base = URL(upstream.base_url)
        self._base = base
        self._prefix = base.raw_path.rstrip("/")
        # Over a Unix socket the client's own Host goes through: the engine builds redirects from it.
        self.host = None if upstream.uds else base.raw_authority
        connector: aiohttp.BaseConnector
        if upstream.uds:
            connector = aiohttp.UnixConnector(upstream.uds, limit=0, keepalive_timeout=limits.pool_idle_s)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=limits.pool_idle_s)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=limits.connect_s, sock_read=None),
            skip_auto_headers=_NEVER_ADDED,
            max_field_size=2**16,
            max_headers=1000,
        )

    def url(self, raw_path: str, query: str) -> URL:
        """The target with path and query exactly as the client wrote them. ValueError if there is no such URL."""
        return URL.build(
            scheme=self._base.scheme,
            host=self._base.raw_host or "localhost",
            port=self._base.explicit_port,
            path=self._prefix + raw_path,
            query_string=query,
            encoded=True,
        )

    async def request(self, method: str, url: URL, headers: list[tuple[str, str]], body: bytes) -> aiohttp.ClientResponse:
        """The response once its headers are there; the caller owns and closes it.

        A refused connection is tried once more: not a byte was sent. A pooled connection that turns out closed
        is tried once more by aiohttp itself, for idempotent methods only. Raises UPSTREAM_FAILURES.
        """
        try:
            return await self._send(method, url, headers, body)
        except aiohttp.ClientConnectorError:
            return await self._send(method, url, headers, body)

    async def _send(self, method: str, url: URL, headers: list[tuple[str, str]], body: bytes) -> aiohttp.ClientResponse:
        data = (io.BytesIO(body) if len(body) > _ONE_WRITE else body) if body else None
        return await self._session.request(method, url, headers=headers, data=data, allow_redirects=False)

    async def close(self) -> None:
        """Close the pool and every connection in it."""
        await self._session.close()


def tie_body_to_connection(response: aiohttp.ClientResponse) -> Callable[[], None]:
    """Make reading the body fail when its connection is lost; the returned function undoes it.

    After a malformed chunk aiohttp 3.14 closes the connection and leaves the reader of the body waiting for ever.
    """
    connection = response.connection
    # Compared with None throughout: aiohttp's Connection is false on purpose.
    closed = None if connection is None or connection.protocol is None else connection.protocol.closed
    if closed is None:  # the whole body is here, or the connection was lost with an error that reading shows
        return _nothing
    content = response.content

    def lost(_: asyncio.Future[None]) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was lost inside the body"))

    # The future belongs to the pooled connection and may fail after this response: somebody must look at it.
    closed.remove_done_callback(_look_at)
    closed.add_done_callback(_look_at)
    closed.add_done_callback(lost)

    def untie() -> None:
        closed.remove_done_callback(lost)

    return untie


def _nothing() -> None:
    pass


def _look_at(closed: asyncio.Future[None]) -> None:
    if not closed.cancelled():
        closed.exception()


def failure_text(error: BaseException) -> str:
    """One line on what failed, without addresses that mean nothing to a client."""
    if isinstance(error, aiohttp.ClientConnectorError):
        reason = errno.errorcode.get(error.os_error.errno or 0, type(error.os_error).__name__)
        return f"cannot connect ({reason})"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection before answering"
    return f"{type(error).__name__}"
