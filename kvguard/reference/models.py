"""What a primary generated and what a reference says of the same tokens. Token ids stay out of `repr`: they are a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Rounding = Literal["nearest", "truncate"]
LayerScale = float | Sequence[float]

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8")
"""Formats that a pass can put keys and values through: largest values 448, 57344 and 127."""

PER_TOKEN_HEAD = {"fp8_per_token_head": "fp8_e4m3", "int8_per_token_head": "int8"}
"""vLLM's names for caches whose scales are computed for each token and head, and the format of their values."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one reference pass does to keys and values before it attends.

    format         None: nothing, the pass is exact; else the cache format whose values they become, one of FORMATS
    rounding       to nearest (half to even), or toward zero
    scales         "engine": the layer's own; "unit": 1.0; "per_token_head": from each token's and head's largest value;
                   or {"k": […], "v": […]}, for each layer in order one value, or one for each KV head
    query          the query is quantized too, with the layer's query scale
    probabilities  the softmax's output is quantized too, to e4m3 at 1/448
    """

    label: str
    format: str | None = None
    rounding: Rounding = "nearest"
    scales: str | Mapping[str, Sequence[LayerScale]] = "engine"
    query: bool = False
    probabilities: bool = False

    def as_question(self) -> dict[str, Any]:
        """The choice as the pass inside the engine reads it."""
        return {
            "label": self.label,
            "format": self.format,
            "rounding": self.rounding,
            "scales": self.scales if isinstance(self.scales, str) else {name: _plain(v) for name, v in self.scales.items()},
            "query": self.query,
            "probabilities": self.probabilities,
        }


def _plain(scales: Sequence[LayerScale]) -> list[float | list[float]]:
    return [float(one) if isinstance(one, (int, float)) else [float(head) for head in one] for one in scales]


EXACT = Choice(label="16bit")
"""The 16-bit pass."""


@dataclass(frozen=True, slots=True)
class Decode:
    """What the primary generated for one request.

    prompt_ids     token ids of the prompt
    ids            the generated token ids
    logprobs       natural-log probability of each generated id, as the engine's decode gave it
    top            for each generated position the engine's most probable (id, logprob) pairs, at most 20, no id twice
    finish_reason  the engine's own word: "stop", "length", …
    adapter        the LoRA adapter that generated, "" for the base model
    """

    prompt_ids: tuple[int, ...] = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)
    top: tuple[tuple[tuple[int, float], ...], ...] = field(repr=False)
    finish_reason: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a reference is to the engine, as last asked.

    absent      nothing answers there (yet), in contrast to something that is no reference
    equality    how it is known to equal the engine but for the KV cache, in words
    adapters    LoRA adapters it can score, by name
    max_tokens  the longest sequence it can score; None: not said
    """

    absent: bool = False
    equality: str = ""
    adapters: frozenset[str] = frozenset()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """What one reference pass says of the same token ids, teacher forced.

    logprobs  of the generated ids
    top1      the pass's own most probable id at each generated position
    at        the pass's logprob of each id in `Decode.top`, in the same order; None where the reference does not say
    label     which pass: "16bit", "fp8_e4m3 nearest", …
    """

    logprobs: tuple[float, ...] = field(repr=False)
    top1: tuple[int, ...] = field(repr=False)
    at: tuple[tuple[float | None, ...], ...] = field(repr=False)
    label: str
