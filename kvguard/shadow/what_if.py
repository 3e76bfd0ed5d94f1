"""What-if: which fake-quantized passes a person asks for, as a question over HTTP and as the reference's choices."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvguard.reference.models import FORMATS, PER_TOKEN_HEAD, Choice, LayerScale
from kvguard.vocabulary import Frozen

MOST = 8
"""Passes that one question may ask for."""

_MOST_LAYERS = 1024

Scale = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Layers = Annotated[
    tuple[Scale | Annotated[tuple[Scale, ...], Field(min_length=1, max_length=1024)], ...],
    Field(min_length=1, max_length=_MOST_LAYERS),
]


class GivenScales(Frozen):
    """Scales of keys and values: for each attention layer in order one number, or one for each KV head."""

    k: Layers
    v: Layers

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if len(self.k) != len(self.v):
            raise ValueError(f"k scales for {len(self.k)} layers, v scales for {len(self.v)}")
        return self


class WhatIf(Frozen):
    """One fake-quantized pass: a cache format, how it rounds, and its scales.

    `scales` is "engine" (the layers' own), "unit" (1.0), or given. The `*_per_token_head` formats compute theirs.
    """

    format: Literal["fp8_e4m3", "fp8_e5m2", "int8", "fp8_per_token_head", "int8_per_token_head"]
    rounding: Literal["nearest", "truncate"] = "nearest"
    scales: Literal["engine", "unit"] | GivenScales = "engine"

    @property
    def label(self) -> str:
        """The name of its estimates."""
        if self.format in PER_TOKEN_HEAD:
            return f"{self.format} {self.rounding}"
        return f"{self.format} {self.rounding}, scales {self.scales if isinstance(self.scales, str) else 'given'}"

    def choice(self) -> Choice:
        """The pass to ask the reference for."""
        if self.format in PER_TOKEN_HEAD:
            return Choice(self.label, PER_TOKEN_HEAD[self.format], self.rounding, "per_token_head")
        if isinstance(self.scales, str):
            return Choice(self.label, self.format, self.rounding, self.scales)
        given: dict[str, tuple[LayerScale, ...]] = {"k": self.scales.k, "v": self.scales.v}
        return Choice(self.label, self.format, self.rounding, given)


NAMES = (*FORMATS, *PER_TOKEN_HEAD)
"""What `format` may be."""
