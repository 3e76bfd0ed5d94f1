"""How an exchange between a client and the engine can end."""

from __future__ import annotations

from enum import Enum, StrEnum

from kvguard.proxy.refusal import Refusal

CLIENT_LEFT = 499
"""Reported as the status when the client left before an answer began (nginx's number)."""


class Outcome(StrEnum):
    """How a request ended. `refused` is kvguard's own answer: gate closed, private path, body too large."""

    OK = "ok"
    CLIENT_DISCONNECTED = "client_disconnected"
    UPSTREAM_ERROR = "upstream_error"
    REFUSED = "refused"


class ResponseAborted(Exception):
    """Raised out of the app so that the server cuts the connection: what was sent is not a whole response."""


class End(Enum):
    """The endings that need no answer of ours."""

    COMPLETE = "complete"
    CLIENT_LEFT = "client left"
    UNTOUCHED = "the connection was closed before it took the request"


Ending = End | Refusal
