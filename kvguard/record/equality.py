"""Whether two engines are the same but for their KV cache, by their run records.

What may differ is what the cache is made of (its dtype, scales, attention kernels and sizes) and where an engine listens.
Everything else that differs is named: the engine's version, the checkpoint's files, the other flags, ranks, layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvguard.record.diff import Difference, diff_records

_CONSEQUENCES = ("effective", "checks", "declared", "predicted", "observed", "plan", "policy", "calibration", "layers", "drift")
"""Parts that follow from the cache, the policy, or from files that are compared as subjects. Of the layers, their number
and names must be equal: that difference's path is `layers` itself."""

_PLAIN = ("verdict", "policy_digest", "scales_digest", "kvguard_version")

_CACHE = (
    "kv-cache-dtype",
    "kv-cache-dtype-skip-layers",
    "calculate-kv-scales",
    "attention-backend",
    "block-size",
    "enable-prefix-caching",
    "prefix-caching-hash-algo",
)
_SIZES = (
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "num-gpu-blocks-override",
    "swap-space",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "max-logprobs",
)
_ADDRESSES = (
    "host",
    "port",
    "uds",
    "root-path",
    "api-key",
    "ssl-keyfile",
    "ssl-certfile",
    "ssl-ca-certs",
    "ssl-cert-reqs",
    "ssl-ciphers",
    "enable-ssl-refresh",
    "served-model-name",
    "lora-modules",
    "enable-log-requests",
    "kv-events-config",
    "disable-log-stats",
)
_FLAGS = frozenset(f"argv.--{prefix}{name}" for name in (*_CACHE, *_SIZES, *_ADDRESSES) for prefix in ("", "no-"))
_REQUESTED = frozenset(
    (
        "kv_cache_dtype",
        "calculate_kv_scales",
        "skip_layers",
        "attention_backend",
        "block_size",
        "max_model_len",
        "max_num_seqs",
    )
)


def beyond_the_cache(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    """What differs between two starts besides their KV cache, its sizes, and where they listen; empty when nothing does.

    Raises pydantic's ValidationError for what `read_record` would not have returned.
    """
    return tuple(found for found in diff_records(a, b) if not _may_differ(found.path))


def describe_differences(differences: tuple[Difference, ...], most: int = 4) -> str:
    """The differences on one line, the first `most` of them."""
    shown = [f"{found.path} ({_short(found.a)}, there {_short(found.b)})" for found in differences[:most]]
    rest = len(differences) - len(shown)
    return "; ".join(shown) + (f"; and {rest} more" if rest else "")


def _may_differ(path: str) -> bool:
    part, dot, rest = path.partition(".")
    if part == "requested":
        return rest.rpartition(".")[2] in _REQUESTED
    return path in _FLAGS or path in _PLAIN or path == "content_digest" or bool(dot and part in _CONSEQUENCES)


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
