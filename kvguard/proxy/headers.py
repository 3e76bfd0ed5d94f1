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

REQUEST_ID = b"x-request-id"

_NOT_ASKED = HOP_BY_HOP | {b"host", b"expect", b"content-length"}
_BODILESS = frozenset({204, 304})
_UPGRADE: Headers = [(b"connection", b"upgrade"), (b"upgrade", b"websocket")]


def one_value(headers: Pairs, name: bytes) -> bytes | None:
    """The first value of a header, by its lower-case name."""
    for key, value in headers:
        if key == name or key.lower() == name:
            return value
    return None


def asks_for_websocket(headers: Pairs) -> bool:
    """Whether this request wants its connection to become a WebSocket."""
    named: set[bytes] = set()
    upgrade = b""
    for name, value in headers:
        if name == b"upgrade":
            upgrade = value.strip().lower()
        elif name == b"connection":
            named |= _tokens(value)
    return upgrade == b"websocket" and b"upgrade" in named


def request_headers(headers: Pairs, body_length: int, host: bytes | None, *, websocket: bool = False) -> Headers:
    """What the engine gets.

    `host` replaces the client's Host; None keeps it, so that redirects the engine builds lead back to the
    proxy. Expect was answered by our own server. Content-Length states the body that was read, and is absent
    where the client sent none. `websocket` asks the engine for the upgrade, which is otherwise dropped.
    """
    kept: Headers = []
    named: set[bytes] = set()
    length = False
    for name, value in headers:
        lower = name.lower()
        if lower not in _NOT_ASKED:
            kept.append((lower, value))
        elif lower == b"host":
            host = host or value
        elif lower == b"content-length":
            length = True
        elif lower == b"connection":
            named |= _tokens(value)
    if named:
        kept = [pair for pair in kept if pair[0] not in named]
    if host:
        kept.insert(0, (b"host", host))
    if websocket:
        return kept + _UPGRADE
    if body_length or length:
        kept.append((b"content-length", b"%d" % body_length))
    return kept


def request_head(method: str, target: bytes, headers: Headers) -> bytes:
    """The request as it goes over the wire, up to the body."""
    lines = [b"%s: %s\r\n" % pair for pair in headers]
    return b"%s %s HTTP/1.1\r\n%s\r\n" % (method.encode("ascii"), target, b"".join(lines))


def response_headers(headers: Pairs, status: int, guard_headers: Pairs, request_id: bytes | None = None) -> Headers:
    """What the client gets: the engine's headers as they came, and kvguard's four in place of any of that name.

    204 and 304 carry no body, so a Content-Length there would make the server wait for one (uvicorn 0.54 does).
    An event stream tells buffering proxies on the way to leave it alone. The client's own request id comes back where the
    engine names none.
    """
    guard = list(guard_headers)
    dropped = {name for name, _ in guard}
    if status in _BODILESS:
        dropped.add(b"content-length")
    kept: Headers = []
    named: set[bytes] = set()
    events = False
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-type" and _is_event_stream(value):
            events = True
        elif lower == b"connection":
            named |= _tokens(value)
        elif lower == REQUEST_ID:
            request_id = None
        if lower not in HOP_BY_HOP and lower not in dropped:
            kept.append((lower, value))
    if named:
        kept = [pair for pair in kept if pair[0] not in named]
    if events:
        kept = [pair for pair in kept if pair[0] != b"x-accel-buffering"]
        guard.append((b"x-accel-buffering", b"no"))
    if request_id is not None:
        guard.append((REQUEST_ID, request_id))
    return kept + guard


def upgrade_head(headers: Headers) -> bytes:
    """The answer that makes a WebSocket of the connection."""
    lines = [b"%s: %s\r\n" % pair for pair in _UPGRADE + headers]
    return b"HTTP/1.1 101 Switching Protocols\r\n%s\r\n" % b"".join(lines)


def is_event_stream(headers: Pairs) -> bool:
    """Whether the content is text/event-stream, whatever its parameters."""
    return _is_event_stream(one_value(headers, b"content-type") or b"")


def takes_plain_text(headers: Pairs) -> bool:
    """Whether an event can be appended to this event stream: not compressed, and no length promised."""
    pairs = list(headers)
    return (
        is_event_stream(pairs)
        and one_value(pairs, b"content-encoding") in (None, b"identity")
        and one_value(pairs, b"content-length") is None
    )


def _is_event_stream(content_type: bytes) -> bool:
    return content_type.split(b";", 1)[0].strip().lower() == b"text/event-stream"


def _tokens(value: bytes) -> set[bytes]:
    return {token for part in value.split(b",") if (token := part.strip().lower())}
