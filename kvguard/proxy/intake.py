"""What happens to a request before the engine is asked: refuse it, or read its body and write the head of ours."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import quote

from kvguard.guard.gate import Snapshot
from kvguard.proxy.asgi import Receive, Scope, Send
from kvguard.proxy.headers import one_value, request_head, request_headers
from kvguard.proxy.paths import is_private
from kvguard.proxy.refusal import (
    BAD_REQUEST,
    NOT_FOUND,
    SLOW_BODY,
    TWO_HOSTS,
    Refusal,
    error_json,
    gate_closed,
    refusal_headers,
    too_large,
)
from kvguard.proxy.step import Rest, begun
from kvguard.proxy.upstream import Client, Limits

_LINGER_S = 2.0


def raw_path(scope: Scope) -> str:
    """The path as the client wrote it, percent-encoding included. Raises UnicodeDecodeError."""
    raw: bytes | None = scope.get("raw_path")
    return raw.decode() if raw else quote(scope["path"])


def refusal_before_body(scope: Scope, snapshot: Snapshot) -> Refusal | None:
    """Why this request goes no further, or None. GET /metrics passes a closed gate: scrapers expect the engine's."""
    try:
        path = raw_path(scope)
    except UnicodeDecodeError:
        return BAD_REQUEST
    if is_private(path) or is_private(scope["path"]):
        return NOT_FOUND
    if [name for name, _ in scope["headers"]].count(b"host") > 1:
        return TWO_HOSTS
    if not snapshot.open and not (scope["method"] == "GET" and path == "/metrics"):
        return gate_closed(snapshot)
    return None


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes | Refusal | None:
    """The whole body; a refusal as soon as it is too large or stalls; None if the client left."""
    declared = one_value(scope["headers"], b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limits.body_bytes:
        return too_large(limits.body_bytes)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        try:
            message = begun(receive())
            if isinstance(message, Rest):  # most bodies are here with their head, and need no timer
                async with asyncio.timeout(limits.body_silence_s):
                    message = await message
        except TimeoutError:
            return SLOW_BODY
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size > limits.body_bytes:
            return too_large(limits.body_bytes)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def engine_request_head(scope: Scope, body_length: int, client: Client, *, websocket: bool) -> bytes:
    """The request's head as the engine gets it."""
    headers = request_headers(scope["headers"], body_length, client.host, websocket=websocket)
    target = (client.prefix + raw_path(scope)).encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    return request_head(scope["method"], target, headers)


async def send_refusal(
    refusal: Refusal, snapshot: Snapshot, receive: Receive, send: Send, request_id: bytes | None = None
) -> None:
    """The refusal as a whole response."""
    body = error_json(refusal)
    headers = refusal_headers(refusal, len(body), snapshot.headers, request_id)
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": refusal.close})
    if refusal.close:
        # Closing while the client still sends would reset the connection under the answer it has not read yet.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive())["type"] != "http.disconnect":
                    continue
        await send({"type": "http.response.body", "body": b"", "more_body": False})
