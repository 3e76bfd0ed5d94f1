"""Request paths: which one is private to kvguard, and the bounded names metrics use for the others."""

from __future__ import annotations

from urllib.parse import unquote

from kvguard.facts.changing_requests import changing_request

PRIVATE_SEGMENT = "_kvguard"
"""Path segments that begin with this belong to kvguard's reader inside the engine and are never proxied."""

ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/models",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/rerank",
        "/v1/score",
        "/pooling",
        "/classify",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
        "/version",
    }
)
"""Paths that get a metric label of their own. All others are relayed the same way and counted as `other`."""

_MAX_DECODINGS = 8


def route_label(path: str) -> str:
    """The path when it is one of `ROUTES`, the end of it when it changes the engine, else `other`: a client must not be
    able to create time series."""
    if path in ROUTES:
        return path
    changing = changing_request(path)
    return changing.path if changing is not None else "other"


def is_private(raw_path: str) -> bool:
    """Whether a path could reach the private prefix, however it is written.

    Any segment counts, not only the first: the engine may strip `--root-path`, and a later hop may resolve
    dot segments or double slashes. Percent-encoding is undone until nothing changes.
    """
    if "%" not in raw_path and PRIVATE_SEGMENT not in raw_path.lower():
        return False
    path = raw_path
    for _ in range(_MAX_DECODINGS):
        if _has_private_segment(path):
            return True
        decoded = unquote(path)
        if decoded == path:
            return False
        path = decoded
    return True


def _has_private_segment(path: str) -> bool:
    return any(segment.startswith(PRIVATE_SEGMENT) for segment in path.lower().replace("\\", "/").split("/"))
