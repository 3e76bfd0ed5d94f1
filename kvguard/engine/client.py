"""kvguard's own requests to the engine, over its Unix socket or TCP. Errors are values: nothing here raises them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from kvguard.evidence.metrics import MAX_PAGE
from kvguard.evidence.replies import MAX_REPLY, NonceMismatch, TensorReading, parse_replies
from kvguard.files import printable
from kvguard.vocabulary import Json, UsageError

INSIDE_PATH = "/_kvguard/inside/"
EVIDENCE_PATH = INSIDE_PATH + "evidence"

EVIDENCE_DEADLINE = 60.0
"""Seconds to wait for the workers: the call waits for the step in progress, which a long prefill makes long."""

_DEADLINE = 10.0
_COMPLETION_DEADLINE = 120.0
_MAX_BODY = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `status` None means none came; `error` says why, or that the body could not be read. `nobody`: nobody
    listens there."""

    status: int | None = None
    body: Json = None
    error: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    nobody: bool = False

    @property
    def ok(self) -> bool:
        """Whether the engine answered 200 with a readable body."""
        return self.status == 200 and not self.error

    @property
    def problem(self) -> str:
        """What went wrong in words, "" when nothing did."""
        if self.ok:
            return ""
        return self.error or f"HTTP {self.status}: {_message(self.body)}"


@dataclass(frozen=True, slots=True)
class EvidenceAnswer:
    """What the reader inside the engine said, or why there is nothing."""

    reading: TensorReading | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When a stream's events with text came, in seconds from the request's start, and the usage at its end."""

    times: tuple[float, ...] = ()
    usage: Mapping[str, int] | None = None
    problem: str = ""


class EngineClient:
    """Requests to one engine.

    `target` is a URL ("http://127.0.0.1:8000") or the path of a Unix socket, with or without "unix:". `key` is the
    engine's API key. Proxies and other environment settings are not used.
    """

    def __init__(self, target: str, key: str | None = None) -> None:
        check_target(target)
        socket = socket_path(target)
        self.target = target
        self._http = httpx.AsyncClient(
            base_url="http://engine" if socket else target,
            transport=httpx.AsyncHTTPTransport(
                uds=socket,
                trust_env=False,
                # No cap: httpcore keeps the slot of a request that is cancelled before its headers (httpcore#1093).
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
            ),
            headers={"authorization": f"Bearer {key}"} if key else {},
            trust_env=False,
            timeout=httpx.Timeout(None),  # each request has a deadline of its own
        )
        self._pending: asyncio.Task[Answer] | None = None
        self._closed = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connections, and the evidence call that may still be waiting."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
        await self._http.aclose()

    async def health(self) -> Answer:
        """/health. 200 says that processes live, not that tokens come out."""
        return await self._request("GET", "/health", deadline=_DEADLINE)

    async def metrics_text(self) -> Answer:
        """/metrics, its page as bytes in `body`."""
        return await self._request("GET", "/metrics", deadline=_DEADLINE, limit=MAX_PAGE)

    async def version(self) -> str | None:
        """The version that /version names; None when it does not answer with one."""
        return version_of(await self.get_json("/version"))

    async def models(self) -> Answer:
        """/v1/models, the engine's JSON."""
        return await self.get_json("/v1/models")

    async def get_json(self, path: str) -> Answer:
        """GET a JSON document."""
        return _as_json(await self._request("GET", path, deadline=_DEADLINE))

    async def post(self, path: str, body: dict[str, Any], deadline: float = _COMPLETION_DEADLINE) -> Answer:
        """POST a JSON document and read the JSON answer, within `deadline` seconds in all."""
        return _as_json(await self._request("POST", path, deadline=deadline, content=json.dumps(body).encode()))

    async def arrivals(self, path: str, body: dict[str, Any], deadline: float = _COMPLETION_DEADLINE) -> Arrivals:
        """POST a JSON document that asks for a stream of events, and note when each comes."""
        times: list[float] = []
        usage: Mapping[str, int] | None = None
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            async with asyncio.timeout(deadline), self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    return Arrivals(problem=_as_json(Answer(response.status_code, await response.aread())).problem)
                async for line in response.aiter_lines():
                    event = _event(line)
                    if event.get("choices"):
                        times.append(clock() - begun)
                    usage = _usage(event) or usage
        except TimeoutError:
            return Arrivals(tuple(times), usage, f"{path}: no end within {deadline:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return Arrivals(tuple(times), usage, f"{path}: {type(error).__name__}: {str(error) or 'connection lost'}")
        return Arrivals(tuple(times), usage)

    async def evidence(self, secret: str, nonce: str, deadline: float = EVIDENCE_DEADLINE) -> EvidenceAnswer:
        """Ask the reader inside every worker what its KV cache is."""
        answer = await self.ask("evidence", secret, nonce, deadline=deadline)
        if not answer.ok:
            return EvidenceAnswer(problem=answer.problem)
        try:
            return EvidenceAnswer(reading=parse_replies(answer.body, nonce))
        except NonceMismatch as error:
            return EvidenceAnswer(problem=self.close_channel(str(error)))
        except UsageError as error:
            return EvidenceAnswer(problem=str(error))

    async def ask(
        self, topic: str, secret: str, nonce: str, question: dict[str, Any] | None = None, *, deadline: float
    ) -> Answer:
        """Put a question to every worker through the reader inside; the reply document is in `body`, as bytes.

        One question at a time: this one is sent when the earlier one is answered, or not at all when that takes longer
        than `deadline`. An answer that comes after the deadline is discarded. Whoever reads an answer to another question
        calls `close_channel`, because the engine's replies have lost step.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline
        while self._pending is not None and not self._pending.done():
            if not (await asyncio.wait({self._pending}, timeout=max(0.0, until - loop.time())))[0]:
                return Answer(error="an earlier question to the workers is still unanswered")
        if self._closed:
            return Answer(error=self._closed)
        # Waited for without cancelling it: a collective_rpc that is given up leaves replies behind.
        mine = self._pending = asyncio.create_task(
            self._request(
                "GET" if question is None else "POST",
                INSIDE_PATH + topic,
                deadline=None,
                headers={"x-kvguard-secret": secret, "x-kvguard-nonce": nonce},
                content=None if question is None else json.dumps(question).encode(),
                limit=MAX_REPLY,
            )
        )
        done, _ = await asyncio.wait({mine}, timeout=deadline)
        if not done:
            return Answer(error=f"the workers did not answer within {deadline:g} s")
        answer = mine.result()  # `_pending` may already be the next question
        if answer.status == 404:
            return Answer(status=404, error="the engine has no reader of kvguard's, or another start's secret")
        if answer.status == 500:
            # The call raised inside the engine, which may have left other ranks' replies for the next question.
            reason = self.close_channel(f"the workers could not be read: {_as_json(answer).problem}")
            return Answer(status=answer.status, error=reason)
        if not answer.ok:
            return Answer(status=answer.status, error=f"the workers could not be read: {_as_json(answer).problem}")
        return answer

    def close_channel(self, reason: str) -> str:
        """Ask the workers nothing more in this client's life; returns the reason as later questions will see it."""
        self._closed = f"{reason}; the channel to the workers stays closed until the engine is restarted"
        return self._closed

    async def _request(
        self,
        method: str,
        path: str,
        *,
        deadline: float | None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        limit: int = _MAX_BODY,
    ) -> Answer:
        sent = {"content-type": "application/json"} if content is not None else {}
        body = bytearray()
        status: int | None = None
        found: dict[str, str] = {}
        try:
            async with (
                asyncio.timeout(deadline),
                self._http.stream(method, path, content=content, headers={**sent, **(headers or {})}) as response,
            ):
                status = response.status_code
                found = {name.lower(): value for name, value in response.headers.items()}
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > limit:
                        return Answer(status=status, error=f"{path}: more than {limit} bytes")
        except TimeoutError:
            return Answer(status=status, error=f"{path}: no answer within {deadline:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            words = f"{path}: {type(error).__name__}: {str(error) or 'connection lost'}"
            return Answer(status=status, error=words, nobody=isinstance(error, httpx.ConnectError))
        return Answer(status=status, body=bytes(body), headers=found)


def check_target(target: str) -> None:
    """Raise UsageError for what is neither a URL nor a socket's path."""
    if socket_path(target) is not None:
        return
    try:
        parts = urlsplit(target)
        host = httpx.URL(target).host and parts.hostname and (parts.port is None or parts.port)
    except (httpx.InvalidURL, ValueError) as error:
        raise UsageError(f"{target!r}: not a URL ({error}); required is http://HOST:PORT or a socket's path") from error
    if not host:
        raise UsageError(f"{target!r}: not a URL (no host); required is http://HOST:PORT or a socket's path")


_ENGINE = "http://HOST:PORT, https://HOST:PORT or a Unix socket's path"


def check_engine(target: str) -> None:
    """`check_target`, and that a path is a socket's, or that of a socket to come: a path with a directory that is there.

    UsageError for other schemes, bare words, directories and files.
    """
    check_target(target)
    path = socket_path(target)
    if path is None:
        return
    name = printable(target)
    if not path or "://" in path or "\0" in path:
        raise UsageError(f"--engine {name!r}: required is {_ENGINE}")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if "/" not in path and not target.startswith("unix:"):
            raise UsageError(f"--engine {name!r}: no such socket; required is {_ENGINE}") from None
        return
    except OSError as error:
        raise UsageError(f"--engine {name}: {error.strerror}; required is {_ENGINE}") from None
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"--engine {name}: not a Unix socket; required is {_ENGINE}")


def socket_path(target: str) -> str | None:
    """The path of a Unix socket, or None for a URL."""
    if target.startswith(("http://", "https://")):
        return None
    return target.removeprefix("unix://").removeprefix("unix:")


def version_of(answer: Answer) -> str | None:
    """The version in a /version answer; None when it has none."""
    value = answer.body.get("version") if answer.ok and isinstance(answer.body, dict) else None
    return value if isinstance(value, str) and value else None


def model_cards(answer: Answer) -> tuple[dict[str, Any], ...]:
    """The entries of a /v1/models answer that have a name."""
    data = answer.body.get("data") if answer.ok and isinstance(answer.body, dict) else None
    cards = data if isinstance(data, list) else []
    return tuple(card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str))


def _as_json(answer: Answer) -> Answer:
    if answer.error or answer.status is None:
        return answer
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        if answer.status == 200:
            return Answer(status=answer.status, error=f"HTTP 200 with a body that is not JSON: {_message(answer.body)}")
        return answer
    return Answer(status=answer.status, body=body, headers=answer.headers)


def _event(line: str) -> dict[str, Any]:
    """The JSON object of a server-sent event's line; empty for any other line."""
    try:
        found = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _usage(event: Mapping[str, Any]) -> Mapping[str, int] | None:
    """The usage of an event whose counts are whole numbers."""
    usage = event.get("usage")
    counts = ("prompt_tokens", "completion_tokens")
    return usage if isinstance(usage, dict) and all(isinstance(usage.get(name), int) for name in counts) else None


def _message(body: Json) -> str:
    """The engine's own words in an error body, on one line."""
    if isinstance(body, bytes):
        body = body[:400].decode("utf-8", "replace")
    if isinstance(body, dict):
        error = body.get("error", body.get("message", body.get("detail")))
        body = error.get("message") if isinstance(error, dict) else error
    text = " ".join(str(body or "no message").split())[:300]
    return "an HTML page" if text.startswith("<") else text
