"""The data plane's server: uvicorn on a thread and loop of its own, on sockets that are already bound."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn

from kvguard.guard.surface import Tap
from kvguard.proxy.ending import ResponseAborted
from kvguard.proxy.forward import Forwarder
from kvguard.proxy.protocol import Protocol
from kvguard.vocabulary import UsageError

_START_S = 10.0
_FORCED_S = 5.0


@dataclass(frozen=True, slots=True)
class TLS:
    """The TLS settings of the wrapped command, which move to kvguard. `cert_reqs` is one of ssl.VerifyMode's values."""

    keyfile: str | None
    certfile: str
    ca_certs: str | None = None
    cert_reqs: int = ssl.CERT_NONE
    ciphers: str | None = None
    keyfile_password: str | None = None


def bind(host: str | None, port: int) -> socket.socket:
    """A bound, not yet listening TCP socket; no host means every IPv4 interface, port 0 any free port.

    UsageError when the name has no address, or the port is taken or not allowed.
    """
    place = f"{host or '0.0.0.0'}:{port}"  # noqa: S104 - what vLLM itself does without --host
    if not 0 <= port <= 65535:
        raise UsageError(f"cannot listen on {place}: ports go from 0 to 65535; check --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0",  # noqa: S104
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {place}: the host has no address ({error}); check --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {place}: {_bind_problem(error)}") from error
    return listener


def _bind_problem(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "another process has this port; stop it or choose another port"
        case errno.EACCES:
            return "this user may not open that port; choose one above 1023"
        case errno.EADDRNOTAVAIL:
            return "no interface of this machine has that address; check --host"
        case _:
            return str(error)


class DataPlane:
    """Serves `app` until told to stop. Every method may be called from any thread but the data plane's own.

    Streams that are in flight continue after `stop_accepting`; `wait_idle` waits for them and `close` cuts them.
    """

    def __init__(
        self,
        app: Forwarder,
        sockets: Sequence[socket.socket],
        tls: TLS | None = None,
        keep_alive_s: int = 5,
    ) -> None:
        self._app = app
        self._sockets = list(sockets)
        self._tls = tls
        self._server = _Server(_config(app, tls, keep_alive_s))
        self._thread = threading.Thread(target=self._run, name="kvguard-data-plane", daemon=True)
        self._failure: BaseException | None = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs. False without `close` having been called means that it failed."""
        return self._thread.is_alive()

    @property
    def in_flight(self) -> int:
        """Requests in flight now."""
        return self._app.in_flight.count

    def start(self) -> None:
        """Returns when connections are accepted. UsageError for an unusable certificate or port."""
        try:
            self._server.config.load()
        except (OSError, ssl.SSLError, ValueError) as error:
            files = f"{self._tls.certfile}, {self._tls.keyfile}" if self._tls else "none"
            raise UsageError(f"cannot use the TLS files ({files}): {error}; check the --ssl-* flags") from error
        _quiet_aborts()
        self._thread.start()
        if not self._server.ready.wait(_START_S) or self._failure is not None:
            raise UsageError(f"cannot serve on the API port: {self._failure or 'the server did not start'}")

    def stop_accepting(self) -> None:
        """Close the listening sockets and idle connections, now. Running requests go on."""
        loop = self._server.loop
        if loop is None:
            return
        done = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(self._server.refuse_new, done)
            done.wait(_FORCED_S)

    def set_tap(self, tap: Tap | None) -> None:
        """Show each answered request to `tap` from now on (see `forward.Tap`)."""
        self._app.tap = tap

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False if some still are after `timeout_s`."""
        return self._app.in_flight.idle.wait(timeout_s)

    def close(self, flush_s: float = 1.0) -> None:
        """Stop for good: last bytes get `flush_s` to leave, then what still runs is cut and the thread ends."""
        self.stop_accepting()
        if self._thread.is_alive():
            self.wait_idle(flush_s)
            self._thread.join(flush_s)
            self._server.force_exit = True
            self._thread.join(_FORCED_S)
        for listener in self._sockets:
            listener.close()

    def _run(self) -> None:
        try:
            self._server.run(self._sockets)
        except (Exception, SystemExit) as error:  # handed to start(), or seen as `alive` False
            self._failure = error
        finally:
            self._server.ready.set()


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and stops in two steps."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError:
            await self.lifespan.shutdown()
            raise
        self.loop = asyncio.get_running_loop()
        self.ready.set()

    def refuse_new(self, done: threading.Event) -> None:
        """Do at once what uvicorn would do at its next tick."""
        self.should_exit = True
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        done.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if not self.force_exit:
            return
        # uvicorn leaves tasks and connections behind when forced; the app still has to close its client.
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        await self.lifespan.shutdown()


def _config(app: Forwarder, tls: TLS | None, keep_alive_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=cast(Any, partial(Protocol, limits=app.limits)),
        ws="none",
        interface="asgi3",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        # The engine's own Server and Date pass through; ours would double them.
        server_header=False,
        date_header=False,
        timeout_keep_alive=keep_alive_s,
        ssl_keyfile=tls.keyfile if tls else None,
        ssl_certfile=tls.certfile if tls else None,
        ssl_ca_certs=tls.ca_certs if tls else None,
        ssl_cert_reqs=tls.cert_reqs if tls else ssl.CERT_NONE,
        ssl_ciphers=tls.ciphers if tls else None,
        ssl_keyfile_password=tls.keyfile_password if tls else None,
    )


class _AbortFilter(logging.Filter):
    """Drops uvicorn's tracebacks for responses that were cut on purpose; the forwarder logs the cause in one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not isinstance(error, ResponseAborted | asyncio.CancelledError)


def _quiet_aborts() -> None:
    logger = logging.getLogger("uvicorn.error")
    if not any(isinstance(existing, _AbortFilter) for existing in logger.filters):
        logger.addFilter(_AbortFilter())
