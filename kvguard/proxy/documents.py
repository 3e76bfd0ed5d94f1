"""JSON documents as the management port gives them."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from pydantic_core import to_json

from kvguard.vocabulary import Frozen


class Problem(Frozen):
    """Why there is no such document."""

    detail: str


def document(found: dict[str, Any] | None, why_missing: str) -> Response:
    """What was found; 404 and why, where there is none."""
    return as_json(Problem(detail=why_missing), 404) if found is None else as_json(found)


def as_json(value: Any, status_code: int = 200) -> Response:
    """Models and plain data. NaN and infinity become strings: scales can be either, and FastAPI's own encoder refuses them."""
    return Response(to_json(value, inf_nan_mode="strings"), status_code, media_type="application/json")
