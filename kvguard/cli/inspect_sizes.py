"""The part of `kvguard inspect` about sizes: bytes for a token and a sequence by dtype, on one GPU and in all."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvguard.checkpoint.cost import sequence_bytes
from kvguard.checkpoint.geometry import bytes_per_token
from kvguard.checkpoint.models import Declared
from kvguard.checkpoint.parallel import Ranks, per_gpu
from kvguard.facts.kv_dtypes import BYTES_DTYPES, accepted
from kvguard.vocabulary import Frozen


class Load(Frozen):
    """What is asked about: bytes of KV memory on each GPU, tokens of a sequence, tokens computed at once, and the ranks."""

    memory: int
    context: int = 8192
    in_flight: int = 0
    ranks: Ranks = Ranks()


def sizes(declared: Declared, version: str | None, load: Load) -> list[dict[str, Any]]:
    """One entry for each dtype this version accepts, and the model's own; None where the arithmetic is not modelled.

    `bytes_per_token` and `sequence_bytes` count each head once, in one replica; with `_per_gpu` they are what the GPU holds
    that holds most. `tokens` and `batch` are what all replicas hold, each GPU with `memory` bytes; the tokens are those of
    sequences of `context` tokens, which is no matter without windows and recurrent layers.
    """
    values = accepted(version) if version else None
    offered = None if values is None else {"fp8_e4m3" if value == "fp8" else value for value in values}
    own = declared.model_dtype or "bfloat16"
    return [
        found
        for dtype in BYTES_DTYPES
        if dtype != "float32" and (offered is None or dtype in offered or dtype == own)
        if (found := _size(declared, dtype, load)) is not None
    ]


def _size(declared: Declared, dtype: str, load: Load) -> dict[str, Any] | None:
    geometry, ranks = declared.geometry, load.ranks
    token = bytes_per_token(geometry, dtype)
    if token is None:
        return None
    sequence = sequence_bytes(geometry, dtype, load.context, declared.model_dtype, load.in_flight)
    token_each = per_gpu(geometry, dtype, ranks, lambda part: bytes_per_token(part, dtype))
    sequence_each = per_gpu(
        geometry, dtype, ranks, lambda part: sequence_bytes(part, dtype, load.context, declared.model_dtype, load.in_flight)
    )
    return {
        "dtype": dtype,
        "bytes_per_token": token,
        "bytes_per_token_per_gpu": token_each,
        "tokens": int(load.memory * load.context // sequence_each) * ranks.data if sequence_each else None,
        "sequence_bytes": sequence,
        "sequence_bytes_per_gpu": sequence_each,
        "batch": int(load.memory // sequence_each) * ranks.data if sequence_each else None,
    }


def sizes_table(found: list[dict[str, Any]], load: Load, *, by_length: bool) -> Table:
    """The sizes for a person. With several GPUs, what one of them holds stands beside the whole.

    `by_length`: how many tokens fit depends on how long the sequences are.
    """
    many, memory = load.ranks.gpus > 1, f"{load.memory:,} bytes"
    tokens = f"tokens in {memory}" + " a GPU" * many + f", in sequences of {load.context:,}" * by_length
    names = ["KV cache dtype", "bytes/token", *(["on one GPU"] * many), tokens]
    names += [f"GB for {load.context:,} tokens", *(["on one GPU"] * many), "such sequences"]
    table = Table(*names, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for size in found:
        each = [_number(size["bytes_per_token_per_gpu"])] * many
        part = [_gigabytes(size["sequence_bytes_per_gpu"])] * many
        row = [size["dtype"], _number(size["bytes_per_token"]), *each, _number(size["tokens"])]
        table.add_row(*row, _gigabytes(size["sequence_bytes"]), *part, _number(size["batch"]))
    return table


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _gigabytes(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1e9:.3f}"
