"""Answers that kvguard gives itself: OpenAI-shaped errors, as a whole response or as the last event of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from kvguard.guard.gate import Snapshot
from kvguard.proxy.asgi import Headers
from kvguard.proxy.headers import REQUEST_ID

RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error response. `type` is OpenAI's error type; `retry_after` is in seconds.

    `close` ends the connection afterwards: the rest of the request was not read.
    """

    status: int
    type: str
    message: str
    retry_after: int | None = None
    close: bool = False


def gate_closed(snapshot: Snapshot) -> Refusal:
    """503 with the gate's own reason."""
    return Refusal(503, "service_unavailable", snapshot.reason, snapshot.retry_after)


NOT_FOUND = Refusal(404, "not_found_error", "there is nothing at this path")
BAD_REQUEST = Refusal(400, "invalid_request_error", "the request's path is not valid UTF-8")
TWO_HOSTS = Refusal(400, "invalid_request_error", "the request names more than one host", close=True)
NO_TUNNELS = Refusal(501, "invalid_request_error", "this is no forward proxy: nothing answers CONNECT", close=True)
MALFORMED = Refusal(400, "invalid_request_error", "the request is not HTTP/1.1", close=True)
SLOW_HEAD = Refusal(408, "invalid_request_error", "the request's headers did not arrive in time", close=True)
SLOW_BODY = Refusal(408, "invalid_request_error", "the request body did not arrive in time", close=True)


def head_too_large(limit_bytes: int) -> Refusal:
    """431 that names the limit."""
    message = f"the request's line and headers are larger than {limit_bytes} bytes"
    return Refusal(431, "invalid_request_error", message, close=True)


def too_large(limit_bytes: int) -> Refusal:
    """413 that names the limit."""
    return Refusal(413, "invalid_request_error", f"the request body is larger than {limit_bytes} bytes", close=True)


def engine_unreachable(detail: str) -> Refusal:
    """502: no answer came, and none will on this connection."""
    return Refusal(502, "upstream_error", f"the engine did not answer: {detail}", RETRY_AFTER_S)


def engine_silent(limit_s: float) -> Refusal:
    """504: the engine is connected and says nothing."""
    return Refusal(504, "upstream_timeout", f"the engine sent nothing for {limit_s:g} seconds", RETRY_AFTER_S)


def error_json(refusal: Refusal) -> bytes:
    """The OpenAI error object."""
    error = {"message": refusal.message, "type": refusal.type, "param": None, "code": refusal.status}
    return json.dumps({"error": error}, ensure_ascii=False).encode()


def error_event(refusal: Refusal, tail: bytes) -> bytes:
    """The error as a server-sent event of its own after a stream that ended in `tail` (its last bytes).

    A line or event that was cut off is closed first, so that the error does not become part of it.
    """
    if not tail or tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
        opening = b""
    else:
        opening = b"\n" if tail.endswith((b"\n", b"\r")) else b"\n\n"
    return opening + b"data: " + error_json(refusal) + b"\n\n"


def refusal_headers(
    refusal: Refusal, body_length: int, guard_headers: Iterable[tuple[bytes, bytes]], request_id: bytes | None = None
) -> Headers:
    """Headers of a refusal. Date is ours to set here; on relayed responses it is the engine's."""
    headers: Headers = [
        (b"date", formatdate(usegmt=True).encode()),
        (b"content-type", b"application/json"),
        (b"content-length", str(body_length).encode()),
        *guard_headers,
    ]
    if request_id is not None:
        headers.append((REQUEST_ID, request_id))
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.close:
        headers.append((b"connection", b"close"))
    return headers


def refusal_wire(refusal: Refusal) -> bytes:
    """A whole response, for a connection on which no request could be read."""
    body = error_json(refusal)
    lines = b"".join(b"%s: %s\r\n" % pair for pair in refusal_headers(refusal, len(body), ()))
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (refusal.status, HTTPStatus(refusal.status).phrase.encode(), lines, body)
