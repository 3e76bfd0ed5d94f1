"""The policy: which KV cache an engine must run, as frozen models, and what of a running cache it allows."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from kvguard.canonical import sha256_of
from kvguard.vocabulary import KV_DTYPES, Confidence, Frozen, ScaleState, canonical_dtype, is_quantized

MODEL_DTYPE = "16bit"
"""A policy's name for "the model's own dtype, not quantized"."""

POLICY_DTYPES = (*KV_DTYPES, "fp8", MODEL_DTYPE)
"""Every name that `kv_cache.dtype` accepts."""


class OnViolation(StrEnum):
    """What happens to an engine that does not run what the policy says."""

    REFUSE = "refuse"
    HOLD = "hold"
    WARN = "warn"


class ScalesRule(StrEnum):
    """Where a policy lets KV scales come from."""

    RUNTIME = "runtime"
    CHECKPOINT = "checkpoint"
    UNIT = "unit"
    ANY = "any"


def _items(value: Any) -> Any:
    """One string or integer is a list of one."""
    return (value,) if isinstance(value, str | int) and not isinstance(value, bool) else value


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Without repeats, each name in its first place."""
    return tuple(dict.fromkeys(names))


def _dtype(name: Any) -> Any:
    if not isinstance(name, str):
        raise ValueError("must be text, a dtype's name")
    if name not in POLICY_DTYPES:
        raise ValueError("not a KV cache dtype")
    return canonical_dtype(name)


def _layer(entry: Any) -> Any:
    if isinstance(entry, int) and not isinstance(entry, bool):
        entry = str(entry)
    if not isinstance(entry, str) or not re.fullmatch(r"0|[1-9][0-9]{0,4}|sliding_window", entry):
        raise ValueError("not a layer's index or sliding_window; several go in a list, [0, 1]")
    return entry


def _specifier(text: str) -> str:
    try:
        return str(SpecifierSet(text))
    except InvalidSpecifier:
        raise ValueError('not a version specifier; write one like ">=0.27,<0.34"') from None


_DTYPE_SCHEMA = {"type": "string", "enum": list(POLICY_DTYPES)}
_LAYER_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 99999},
        {"type": "string", "pattern": "^(0|[1-9][0-9]{0,4}|sliding_window)$"},
    ]
}
_BACKEND_SCHEMA = {"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_]{0,63}$"}


def _one_or_many(item: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item}]})


DtypeName = Annotated[str, BeforeValidator(_dtype)]
LayerName = Annotated[str, BeforeValidator(_layer)]
BackendName = Annotated[str, Field(pattern=_BACKEND_SCHEMA["pattern"])]


class KVCachePolicy(Frozen):
    """What the KV cache must be."""

    dtype: Annotated[
        tuple[DtypeName, ...],
        BeforeValidator(_items),
        AfterValidator(_unique),
        _one_or_many(_DTYPE_SCHEMA),
    ] = Field(
        default=(),
        description="The effective KV cache dtype must be one of these: one name, or a list. `fp8` is `fp8_e4m3`; "
        "`16bit` is the model's own dtype. Default: empty, any dtype, because without a stated wish only "
        "integrity is checked. When the command names none, the engine is started with the predicted dtype "
        "if it is listed, else with the first.",
    )
    scales: ScalesRule = Field(
        default=ScalesRule.ANY,
        description="Where the scales of a quantized cache must come from. `checkpoint`: calibrated values loaded from "
        "the model's files. `unit`: exactly 1.0. `runtime`: computed by the running engine. Default: `any`, "
        "which still refuses scales that some layers lack, that are not finite and positive, or that could "
        "not be read, because no setup means those.",
    )
    skip_layers: Annotated[
        tuple[LayerName, ...], BeforeValidator(_items), AfterValidator(_unique), _one_or_many(_LAYER_SCHEMA)
    ] = Field(
        default=(),
        description="Layers that stay in the model's dtype, and no others: layer indices counted from 0, or "
        "`sliding_window` for every layer with a window. Default: empty, no layer, because a layer left out "
        "by accident is memory or quality lost unseen.",
    )
    min_confidence: Literal[Confidence.PROVEN, Confidence.CORROBORATED, Confidence.ECHOED] = Field(
        default=Confidence.CORROBORATED,
        description="The weakest evidence that may open the gate. `proven`: read from the cache tensors. "
        "`corroborated`: the memory arithmetic agrees. `echoed`: only the engine's log or metrics say so. "
        "Default: `corroborated`, because an engine's log and metrics can repeat its settings while it runs "
        "something else.",
    )


class EnginePolicy(Frozen):
    """What engine may run it."""

    version: Annotated[str, Field(max_length=200), AfterValidator(_specifier)] = Field(
        default="",
        description='vLLM versions allowed, a PEP 440 specifier in quotes such as ">=0.27,<0.34"; a local part '
        "(+cpu) is not compared. Default: empty, any version.",
    )
    attention_backend: Annotated[
        tuple[BackendName, ...], BeforeValidator(_items), AfterValidator(_unique), _one_or_many(_BACKEND_SCHEMA)
    ] = Field(
        default=(),
        description="Attention backends allowed, by the name the engine's layers report (`FLASH_ATTN`, `TRITON_ATTN`, "
        "`CPU_ATTN`): one name, or a list. Default: empty, any backend, because the engine chooses by "
        "hardware.",
    )


class OnRegression(StrEnum):
    """What a proven quality regression does to a serving engine."""

    ALERT = "alert"
    UNREADY = "unready"


class ShadowPolicy(Frozen):
    """What follows from shadow probes, where they are on."""

    on_regression: OnRegression = Field(
        default=OnRegression.ALERT,
        description="What happens when the sequential test shows that answers changed by more than the cache format explains. "
        "`alert`: the metrics and the log say so. `unready`: readiness fails as well, so that routers send requests elsewhere. "
        "Default: `alert`, because a measurement must not be what takes a fleet down.",
    )
    baseline: float | None = Field(
        default=None,
        ge=0,
        le=10,
        allow_inf_nan=False,
        description="Accepted mean |Δ logprob| of a request, in nats by token, that the cache's format does not explain, for "
        "this model and configuration: what `/shadow` showed as `measured_baseline` when its quality was accepted. The alarm "
        "is held against it, and a start whose self-check is above it is a regression at once. Default: each start's own "
        "self-check, which cannot see what was wrong from the start.",
    )
    require_opt_in: bool = Field(
        default=False,
        description="Whether only requests with the header `x-kvguard-shadow: on` may be probed. Default: false; a request "
        "that says `off` never is, prompts stay in memory, and no output has them.",
    )
    measure_ranges: bool = Field(
        default=False,
        description="Whether probes may also measure what keys and values of clients' requests span, for `kvguard calibrate "
        "--from-traffic`: the largest value of each layer and head, and counts. No text leaves memory. Default: false, because "
        "it is made of users' requests.",
    )
    tolerance: float | None = Field(
        default=None,
        gt=0,
        le=10,
        allow_inf_nan=False,
        description="How much above the baseline is accepted, in nats by token. Default: half of it, and at least 0.02.",
    )


class OnDrift(StrEnum):
    """What a cache that is no longer what was established does to a serving engine."""

    ALERT = "alert"
    UNREADY = "unready"


class DriftPolicy(Frozen):
    """What follows when the engine stops running what its record says."""

    action: OnDrift = Field(
        default=OnDrift.ALERT,
        description="What happens when a later verification finds another KV cache than the first. `alert`: the state, the "
        "metrics, the log and a new record say so. `unready`: readiness fails as well, once two verifications in a row found "
        "it. Default: `alert`, because a reading that is wrong everywhere at once must not take a fleet down.",
    )
    min_confidence: Literal[Confidence.PROVEN, Confidence.CORROBORATED] = Field(
        default=Confidence.PROVEN,
        description="The weakest evidence of drift that `unready` acts on. An engine that `kvguard attach` guards is never "
        "`proven`: there it takes `corroborated`. Default: `proven`, the cache tensors themselves.",
    )


class Policy(Frozen):
    """One policy file. Every section may be left out."""

    kv_cache: KVCachePolicy = Field(
        default=KVCachePolicy(), description="What the KV cache must be. Default: no requirement beyond integrity."
    )
    engine: EnginePolicy = Field(default=EnginePolicy(), description="What engine may run it. Default: any.")
    shadow: ShadowPolicy = Field(default=ShadowPolicy(), description="What follows from shadow probes. Default: an alert.")
    drift: DriftPolicy = Field(default=DriftPolicy(), description="What follows from drift while serving. Default: an alert.")
    on_violation: OnViolation = Field(
        default=OnViolation.REFUSE,
        description="What happens when the engine does not run what is required. `refuse`: stop it and exit 3. `hold`: "
        "stop it and stay up, unready, so that the record can be read. `warn`: serve and say so. Default: "
        "`refuse`, because answers from a cache that nobody asked for look like any others.",
    )


def allows_dtype(policy: Policy, dtype: str, model_dtype: str | None) -> bool:
    """Whether a cache of `dtype` is one the policy allows; an empty list allows every dtype.

    `16bit` means `model_dtype` and nothing else: float16 KV on a bfloat16 model is not it, and while the
    model's dtype is unknown (None) nothing is. A bare width ("8-bit"), `mixed` and `unknown` name no dtype,
    so a list never contains them.
    """
    allowed = policy.kv_cache.dtype
    if not allowed:
        return True
    name = canonical_dtype(dtype)
    return name in allowed or (MODEL_DTYPE in allowed and model_dtype is not None and name == canonical_dtype(model_dtype))


_MET_BY: dict[ScalesRule, frozenset[ScaleState]] = {
    ScalesRule.CHECKPOINT: frozenset({ScaleState.CHECKPOINT}),
    ScalesRule.UNIT: frozenset({ScaleState.UNIT_DECLARED, ScaleState.UNIT_DEFAULT}),
    ScalesRule.RUNTIME: frozenset({ScaleState.RUNTIME_ONCE, ScaleState.RUNTIME_DYNAMIC}),
    ScalesRule.ANY: frozenset(ScaleState) - {ScaleState.PARTIAL, ScaleState.INVALID, ScaleState.UNKNOWN},
}


def allows_scales(policy: Policy, state: ScaleState) -> bool:
    """Whether scales in this state meet the policy; a checkpoint's own 1.0 (`unit_declared`) is not `checkpoint`."""
    return state in _MET_BY[policy.kv_cache.scales]


def allows_version(policy: Policy, version: str) -> bool:
    """Whether this vLLM version is in the policy's range; its local part is ignored, pre-releases count by their order.

    A version that cannot be parsed is allowed only where the policy names no range.
    """
    if not policy.engine.version:
        return True
    try:
        return SpecifierSet(policy.engine.version).contains(Version(version).public, prereleases=True)
    except ValueError:
        return False


def contradiction(policy: Policy) -> str | None:
    """Why no cache at all can meet the policy, or None: a 16-bit cache has no scales to demand."""
    kv_cache = policy.kv_cache
    if kv_cache.scales is ScalesRule.ANY or not kv_cache.dtype:
        return None
    if all(name == MODEL_DTYPE or is_quantized(name) is False for name in kv_cache.dtype):
        names = ", ".join(kv_cache.dtype)
        cure = "leave scales out, or add a quantized dtype"
        return f"'{kv_cache.scales}' can never hold with dtype {names}: such a cache has no scales; {cure}"
    return None


def policy_digest(policy: Policy) -> str:
    """`sha256:…` over the policy's meaning: defaults filled in, aliases resolved, lists without an order sorted."""
    meaning = policy.model_dump(mode="json")
    meaning["kv_cache"]["skip_layers"].sort()
    meaning["engine"]["attention_backend"].sort()
    return sha256_of(meaning)
