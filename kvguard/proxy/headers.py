"""Which headers cross the proxy. Lists of pairs throughout, so that duplicates survive in their order."""

from __future__ import annotations

from collections.abc import Iterable

from kvguard.proxy.asgi import Headers

Pairs = Iterable[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers of one connection (RFC 9110 §7.6.1), stripped in both directions with all that Connection names."""

_BODILESS = frozenset({204, 304})


def one_value(headers: Pairs, name: bytes) -> bytes | None:
    """The first value of a header, by its lower-case name."""
    return next((value for key, value in headers if key.lower() == name), None)


def request_headers(headers: Pairs, body_length: int, host: str | None) -> list[tuple[str, str]]:
    """What the engine gets.

    `host` replaces the client's Host; None keeps it, so that redirects the engine builds lead back to the
    proxy. Expect was answered by our own server. Content-Length states the body that was read, and is absent
    where the client sent none. Raises UnicodeDecodeError for a value that is not UTF-8, which the HTTP client
    could not send unchanged.
    """
    pairs = [(name.lower(), value) for name, value in headers]
    dropped = HOP_BY_HOP | _named_by_connection(pairs) | {b"expect", b"content-length"}
    kept = [(name.decode(), value.decode()) for name, value in pairs if name not in dropped and name != b"host"]
    own_host = host or (one_value(pairs, b"host") or b"").decode()
    if own_host:
        kept.insert(0, ("host", own_host))
    if body_length or one_value(pairs, b"content-length") is not None:
        kept.append(("content-length", str(body_length)))
    return kept


def response_headers(headers: Pairs, status: int, guard_headers: Pairs) -> Headers:
    """What the client gets: the engine's headers as they came, and kvguard's four in place of any of that name.

    204 and 304 carry no body, so a Content-Length there would make the server wait for one (uvicorn 0.54 does).
    An event stream tells buffering proxies on the way to leave it alone.
    """
    pairs = [(name.lower(), value) for name, value in headers]
    guard = list(guard_headers)
    dropped = HOP_BY_HOP | _named_by_connection(pairs) | {name for name, _ in guard}
    if status in _BODILESS:
        dropped |= {b"content-length"}
    added = guard
    if is_event_stream(pairs):
        dropped |= {b"x-accel-buffering"}
        added = [*guard, (b"x-accel-buffering", b"no")]
    return [pair for pair in pairs if pair[0] not in dropped] + added


def is_event_stream(headers: Pairs) -> bool:
    """Whether the content is text/event-stream, whatever its parameters."""
    content_type = one_value(headers, b"content-type") or b""
    return content_type.split(b";", 1)[0].strip().lower() == b"text/event-stream"


def takes_plain_text(headers: Pairs) -> bool:
    """Whether an event can be appended to this event stream: not compressed, and no length promised."""
    pairs = list(headers)
    return (
        is_event_stream(pairs)
        and one_value(pairs, b"content-encoding") in (None, b"identity")
        and one_value(pairs, b"content-length") is None
    )


def _named_by_connection(pairs: Pairs) -> set[bytes]:
    return {
        token.strip().lower() for name, value in pairs if name == b"connection" for token in value.split(b",") if token.strip()
    }
