"""What a hub's answers mean when they are no answers, each in one sentence without addresses, which may be signed."""

from __future__ import annotations

import re
from typing import Any

import httpx

from kvguard.files import printable

_GATED = "ask for access on the hub, and give your token there (HF_TOKEN)"
_MEANINGS = {
    401: ": the token is not accepted",
    403: ": not allowed, with this token or without one",
    404: ": no hub answers so; is HF_ENDPOINT the address of one?",
    429: ": too many requests, try later",
}


def hub_error(error: Exception, errors: Any, revision: str, *, token: bool) -> str:
    """The meaning of an error that huggingface-hub raised. `errors` is its module of them; `token`: whether one was sent."""
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "the hub is not asked, because HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set"
    if isinstance(error, errors.GatedRepoError):
        return f"gated, {'and not open to this token: ask for access on the hub' if token else _GATED}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no revision {printable(revision)!r}; name a branch, tag or commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return _not_found(_status(error), token=token)
    if isinstance(error, errors.EntryNotFoundError):
        return "listed, and not found"
    if isinstance(error, errors.HFValidationError):
        return "not a name that a hub has; required is ORG/NAME, or a local directory"
    return f"{unanswered(error)}; no directory here has that name, nor has the local cache"


def unanswered(error: Exception) -> str:
    """Why a hub did not answer, or with what."""
    status = _status(error)
    if status is not None:
        return f"HTTP {status}{_MEANINGS.get(status, '')}"
    text = re.sub(r"\S+://\S+", "", " ".join(str(error).split()))
    if isinstance(error, ValueError | TypeError | LookupError | AttributeError):
        return f"the answer is not a hub's ({printable(text, 120)}); is HF_ENDPOINT the address of one?"
    return f"no answer ({type(error).__name__}{f': {printable(text, 120)}' if text else ''})"


def _not_found(status: int | None, *, token: bool) -> str:
    """What a hub means that shows nobody what is private: no such model, or not for this token."""
    if status == httpx.codes.UNAUTHORIZED and token:
        return "HTTP 401 with this token: it is not accepted, or may not read this model; give another HF_TOKEN, or none"
    if token:
        return "not found there with this token, nor in the local cache: a misspelt name, or a token that may not read it"
    return "not found there, nor in the local cache, nor a directory here; if it is private, give HF_TOKEN"


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
