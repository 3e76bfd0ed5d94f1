"""The words kvguard speaks, as types. Code, docs, metrics and JSON use exactly these.

requested -> declared -> predicted -> observed -> effective: what was asked for, what the checkpoint's
files ask for, what this vLLM version makes of both, what the running engine shows, and what the
strongest observation supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

Json = Any
"""A JSON value: str, int, float, bool, None, list or dict of the same."""


class Frozen(BaseModel):
    """An immutable record; unknown fields are errors, floats keep NaN and infinity in JSON as strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Stage(StrEnum):
    """Which of the four accounts of the KV cache a claim belongs to."""

    REQUESTED = "requested"
    DECLARED = "declared"
    PREDICTED = "predicted"
    OBSERVED = "observed"


class Source(StrEnum):
    """Who says so. The first three are requested, the next three declared, `facts` predicted, the rest observed."""

    COMMAND_LINE = "command_line"
    CONFIG_YAML = "config_yaml"
    ENVIRONMENT = "environment"
    CONFIG_JSON = "config_json"
    HF_QUANT_CONFIG = "hf_quant_config"
    SCALE_TENSORS = "scale_tensors"
    FACTS = "facts"
    TENSORS = "tensors"
    CAPACITY = "capacity"
    METRICS = "metrics"
    LOG = "log"


class Confidence(StrEnum):
    """How strongly the effective value is supported: tensors > capacity > log or metrics > nothing."""

    PROVEN = "proven"
    CORROBORATED = "corroborated"
    ECHOED = "echoed"
    UNKNOWN = "unknown"

    @property
    def rank(self) -> int:
        """0 for unknown to 3 for proven."""
        return ["unknown", "echoed", "corroborated", "proven"].index(self.value)

    def reaches(self, required: Confidence) -> bool:
        """Whether this confidence is at least `required`."""
        return self.rank >= required.rank


class ScaleState(StrEnum):
    """Where the KV scales come from. A 16-bit cache is `not_quantized` whatever its scale attributes hold."""

    NOT_QUANTIZED = "not_quantized"
    CHECKPOINT = "checkpoint"
    RUNTIME_ONCE = "runtime_once"
    RUNTIME_DYNAMIC = "runtime_dynamic"
    UNIT_DECLARED = "unit_declared"
    UNIT_DEFAULT = "unit_default"
    PARTIAL = "partial"
    INVALID = "invalid"
    UNKNOWN = "unknown"


class CheckResult(StrEnum):
    """`unverified` is never `pass`."""

    PASS = "pass"
    FAIL = "fail"
    WARN = "warn"
    UNVERIFIED = "unverified"


class ExitCode:
    """Exit codes of every kvguard command, distinct so that an orchestrator can stop a useless restart loop."""

    CLEAN = 0
    USAGE = 2
    POLICY_VIOLATION = 3
    ENGINE_FAILED_TO_START = 4
    ENGINE_DIED = 5


class Claim(Frozen):
    """One statement by one source about one field.

    `where` is precise enough to look it up: "config.json: quantization_config.kv_cache_scheme",
    "engine log line 57", "metric vllm:cache_config_info label cache_dtype", "rank 0 layer model.layers.3".
    `value` None with a note means: this source was read and gives no information.
    """

    stage: Stage
    source: Source
    field: str
    value: Any = None
    where: str
    note: str = ""


class KvguardError(Exception):
    """An error a person must act on. Its text is one line: what was required, found, where, what to do.

    UsageError      input that vLLM's parser or our schema would reject (exit 2)
    PolicyRefusal   a valid command that the policy does not allow (exit 3)
    EngineFailed    the engine did not come up (exit 4)
    EngineDied      the engine ended by itself while serving (exit 5)
    """

    exit_code = ExitCode.USAGE


class UsageError(KvguardError):
    """Bad command, policy, checkpoint file or other input."""


class PolicyRefusal(KvguardError):
    """What the policy requires cannot hold for this command and checkpoint."""

    exit_code = ExitCode.POLICY_VIOLATION


class EngineFailed(KvguardError):
    """The engine ended, or produced no token, before it could be verified."""

    exit_code = ExitCode.ENGINE_FAILED_TO_START


class EngineDied(KvguardError):
    """The engine ended while it was serving."""

    exit_code = ExitCode.ENGINE_DIED


# Storage width in bits of one cache element. Names as vLLM's --kv-cache-dtype spells them.
_WIDTHS: Mapping[str, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "fp8_inc": 8,
    "fp8_ds_mla": 8,
    "fp8_per_token_head": 8,
    "int8_per_token_head": 8,
    "int4_per_token_head": 4,
    "nvfp4": 4,
    "nvfp4_4over6": 4,
    "nvfp4_ds_mla": 4,
    "turboquant_k8v4": 6,
    "turboquant_4bit_nc": 4,
    "turboquant_k3v4_nc": 4,
    "turboquant_3bit_nc": 3,
    "ultraquant_4bit": 4,
}

_ALIASES: Mapping[str, str] = {
    "fp8": "fp8_e4m3",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
}

DYNAMIC_SCALE_DTYPES = frozenset(
    name
    for name in _WIDTHS
    if name.endswith("_per_token_head") or name.startswith(("nvfp4", "turboquant", "ultraquant", "fp8_ds_mla"))
)
"""Formats whose scales are computed for each token or block as it is written."""

KV_DTYPES = tuple(_WIDTHS)
"""Every KV cache dtype kvguard has a name for."""


def canonical_dtype(name: str) -> str:
    """One name for one dtype: `fp8` is `fp8_e4m3`, `torch.bfloat16` is `bfloat16`; others unchanged."""
    bare = name.strip().removeprefix("torch.")
    return _ALIASES.get(bare, bare)


def width_bits(dtype: str) -> int | None:
    """Bits stored for each element, or None for a name (or `auto`, `mixed`, `8-bit`) without a known width."""
    if dtype.endswith("-bit") and dtype[:-4].isdigit():
        return int(dtype[:-4])
    return _WIDTHS.get(canonical_dtype(dtype))


def is_quantized(dtype: str) -> bool | None:
    """Whether a cache of this dtype is narrower than 16 bit; None when the name says nothing."""
    width = width_bits(dtype)
    return None if width is None else width < 16


class Effective(Frozen):
    """What the strongest observed evidence supports.

    `dtype` is a canonical dtype, a bare width ("8-bit") when only capacity speaks and nothing names the
    format, "mixed" when layers differ beyond what was allowed, or "unknown". `bytes_per_token` counts all
    layers of one replica. `contradictions` are statements of sources that disagree with each other.
    """

    dtype: str = "unknown"
    confidence: Confidence = Confidence.UNKNOWN
    scales: ScaleState = ScaleState.UNKNOWN
    scales_confidence: Confidence = Confidence.UNKNOWN
    scales_detail: str = ""
    attention_backends: tuple[str, ...] = ()
    sixteen_bit_layers: tuple[str, ...] = ()
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    bytes_per_token: float | None = None
    supported_by: tuple[Claim, ...] = ()
    contradictions: tuple[str, ...] = ()


class Check(Frozen):
    """One comparison of policy with evidence, worded for the person on call.

    `enforced` False marks a check the policy did not ask for: it is shown, and does not close the gate.
    """

    name: str
    result: CheckResult
    required: str
    found: str
    where: str
    action: str = ""
    enforced: bool = True
