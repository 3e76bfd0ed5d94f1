"""What a span says of a request: OpenTelemetry's names for HTTP servers and generative AI, and never what was asked.

Names as in OpenTelemetry's semantic conventions 1.41 (`opentelemetry.semconv`); those of kvguard's own begin with `kvguard.`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvguard.proxy.asgi import Headers, Scope
from kvguard.proxy.ending import CLIENT_LEFT, Outcome
from kvguard.proxy.exchange import Exchange
from kvguard.proxy.headers import REQUEST_ID, one_value

Attributes = dict[str, str | int | float | bool | list[str]]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_NUMBERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
_INTEGERS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "top_k", "seed", "n"})
_MOST_CHARACTERS = 200
_MOST_BODY = 256 * 2**10  # to parse it holds the interpreter, and with it every stream
_GUARD = "x-kvguard-"


def span_name(method: str, route: str) -> str:
    """`POST /v1/completions`; the method alone where the path is none that is known."""
    known = method if method in _METHODS else "HTTP"
    return known if route == "other" else f"{known} {route}"


def request_attributes(scope: Scope, route: str) -> Attributes:
    """What is known when the headers are there. No query, which can hold keys, and no header but the request's id and agent."""
    method = scope["method"]
    found: Attributes = {
        "http.request.method": method if method in _METHODS else "_OTHER",
        "url.path": scope["path"][:_MOST_CHARACTERS],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    if method not in _METHODS:
        found["http.request.method_original"] = method[:_MOST_CHARACTERS]
    if route != "other":
        found["http.route"] = route
    if route in _OPERATIONS:
        found |= {"gen_ai.operation.name": _OPERATIONS[route], "gen_ai.provider.name": "vllm"}
    for name, end in (("server", scope.get("server")), ("client", scope.get("client"))):
        if end:
            found[f"{name}.address"] = end[0]
            if end[1] is not None:
                found[f"{name}.port"] = end[1]
    if agent := one_value(scope["headers"], b"user-agent"):
        found["user_agent.original"] = _text(agent)
    if request_id := one_value(scope["headers"], REQUEST_ID):
        found["http.request.header.x-request-id"] = [_text(request_id)]
    return found


def asked_attributes(route: str, body: bytes) -> Attributes:
    """What a generation request asks for besides its content: the model, and how to sample. Nothing of other requests."""
    if route not in _OPERATIONS or not body or len(body) > _MOST_BODY:
        return {}
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(asked, dict):
        return {}
    found: Attributes = {}
    if isinstance(asked.get("model"), str):
        found["gen_ai.request.model"] = asked["model"][:_MOST_CHARACTERS]
    for key, name in _NUMBERS.items():
        value = _number(asked, key)
        if value is not None and not (key == "n" and value == 1):
            found[name] = value
    if asked.get("stream") is True:
        found["gen_ai.request.stream"] = True
    return found


def answer_attributes(exchange: Exchange, guard_headers: Iterable[tuple[bytes, bytes]]) -> Attributes:
    """What became of it, and the KV cache that it was answered with."""
    found: Attributes = {
        "kvguard.outcome": str(exchange.outcome),
        "http.request.body.size": len(exchange.body),
        "http.response.body.size": exchange.received,
    }
    if exchange.status != CLIENT_LEFT:
        found["http.response.status_code"] = exchange.status
    if exchange.first_byte is not None:
        found["gen_ai.response.time_to_first_chunk"] = exchange.first_byte
    for name, value in guard_headers:
        found["kvguard." + name.decode().removeprefix(_GUARD).replace("-", "_")] = _text(value)
    if error := error_type(exchange):
        found["error.type"] = error
    return found


def error_type(exchange: Exchange) -> str:
    """Why the server failed this request, "" where it did not: a client that leaves is no failure of the server's."""
    if exchange.outcome is Outcome.UPSTREAM_ERROR:
        return str(exchange.outcome)
    return str(exchange.status) if exchange.status >= 500 else ""


def trace_context(headers: Headers) -> dict[str, str]:
    """The request's `traceparent` and `tracestate`; several of the latter are one list (W3C Trace Context §3.3.1)."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name in (b"traceparent", b"tracestate"):
            key, text = name.decode(), value.decode("latin-1")
            # A second traceparent makes both invalid, as the comma does.
            found[key] = f"{found[key]},{text}" if key in found else text
    return found


def _number(asked: Mapping[str, Any], key: str) -> int | float | None:
    value = asked.get(key)
    wanted = int if key in _INTEGERS else (int, float)
    return value if isinstance(value, wanted) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _text(value: bytes) -> str:
    return value.decode("latin-1")[:_MOST_CHARACTERS]
