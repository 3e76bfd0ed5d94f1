"""What the engine effectively runs: all evidence put together, the strongest first, and what contradicts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvguard.checkpoint.geometry import windowed_layers
from kvguard.checkpoint.models import Declared
from kvguard.evidence import tensors as inside
from kvguard.evidence.capacity import CapacityReading
from kvguard.evidence.replies import LayerReply, TensorReading
from kvguard.evidence.scales import classify_scales
from kvguard.evidence.warned_scales import lost_by_log
from kvguard.vocabulary import (
    Claim,
    Confidence,
    Effective,
    ScaleState,
    Source,
    Stage,
    canonical_dtype,
    is_quantized,
    width_bits,
)

_BARE_16 = "16-bit"


@dataclass(slots=True)
class _Dtype:
    """The dtype so far, and the sentences that speak against it."""

    name: str = "unknown"
    confidence: Confidence = Confidence.UNKNOWN
    sixteen_bit_layers: tuple[str, ...] = ()
    support: list[Claim] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)


def reconcile(
    *,
    tensors: TensorReading | None,
    capacity: CapacityReading | None,
    metrics_claims: Sequence[Claim],
    log_claims: Sequence[Claim],
    declared: Declared | None,
    predicted_dtype: str | None,
    predicted_scales: ScaleState | None,
    calculated: bool,
    allowed_sixteen_bit: tuple[str, ...],
    calibrated: bool = False,
) -> Effective:
    """The effective KV cache.

    Tensors prove a dtype when every expected rank answered; else capacity corroborates a width, which an echo or
    the prediction may name; else an explicit echo is all there is. `auto` never counts. `calculated`: the engine
    runs with --calculate-kv-scales. `calibrated`: the checkpoint's scales are a calibration of kvguard's.
    `allowed_sixteen_bit`: layer indices, or "sliding_window", that may stay 16-bit.
    """
    echoes = [c for c in (*metrics_claims, *log_claims) if _is_echo(c)]
    predicted = canonical_dtype(predicted_dtype) if predicted_dtype and width_bits(predicted_dtype) else None
    missing = inside.gaps(tensors) if tensors is not None else ()
    model_dtype = _model_dtype(tensors, declared, log_claims)
    if tensors is not None and not missing:
        found = _from_tensors(tensors, allowed_sixteen_bit)
    elif capacity is not None and capacity.width is not None:
        found = _from_capacity(capacity, echoes, predicted, model_dtype)
        _keep_layers(found, capacity, echoes, declared, allowed_sixteen_bit)
    else:
        found = _from_echoes(echoes)
    found.contradictions += _against(found.name, echoes, capacity if not missing else None, predicted)
    scales, scales_confidence, detail = _scales(found, tensors, missing, declared, calculated, calibrated)
    lost = lost_by_log(declared, log_claims) if scales is ScaleState.UNKNOWN and not calculated else ""
    if lost:
        scales, scales_confidence, detail = ScaleState.UNIT_DEFAULT, Confidence.ECHOED, lost
    if predicted_scales not in (None, ScaleState.UNKNOWN, scales) and scales is not ScaleState.UNKNOWN:
        found.contradictions.append(f"scales {predicted_scales} are predicted, the engine has {scales} ({detail})")
    kv_bytes, kv_tokens, per_token = _sizes(tensors if not missing else None, capacity)
    return Effective(
        dtype=found.name,
        confidence=found.confidence,
        scales=scales,
        scales_confidence=scales_confidence,
        scales_detail=detail,
        attention_backends=_backends(tensors, log_claims),
        sixteen_bit_layers=found.sixteen_bit_layers,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        bytes_per_token=per_token,
        supported_by=tuple(found.support),
        contradictions=tuple(dict.fromkeys(found.contradictions)),
    )


def _is_echo(claim: Claim) -> bool:
    """An explicit dtype for the whole cache, said by the engine about itself."""
    return (
        claim.stage is Stage.OBSERVED
        and claim.field == "kv_cache_dtype"
        and isinstance(claim.value, str)
        and claim.value != "auto"
    )


def _from_tensors(reading: TensorReading, allowed: tuple[str, ...]) -> _Dtype:
    layers = [layer for _, layer in reading.layers()]
    dtypes = {layer.dtype or "unknown" for layer in layers}
    wide = [layer for layer in layers if is_quantized(layer.dtype or "") is False]
    narrow = dtypes - {layer.dtype for layer in wide}
    if len(dtypes) == 1:
        name, kept = dtypes.pop(), []
    else:
        kept = wide if narrow else []
        excepted = all(_allowed(layer, allowed) for layer in wide)
        name = narrow.copy().pop() if len(narrow) == 1 and excepted else "mixed"
    differing = inside.disagreements(reading)
    return _Dtype(
        name=name,
        confidence=Confidence.CORROBORATED if differing else Confidence.PROVEN,
        sixteen_bit_layers=_by_number({layer.index for layer in kept}),
        support=list(inside.claims(reading)),
        contradictions=list(differing),
    )


def _from_capacity(capacity: CapacityReading, echoes: list[Claim], predicted: str | None, model_dtype: str | None) -> _Dtype:
    width = capacity.width
    fitting = [claim for claim in echoes if width_bits(claim.value) == width]
    named = {canonical_dtype(claim.value) for claim in fitting if not claim.value.endswith("-bit")}
    found = _Dtype(name=f"{width}-bit", confidence=Confidence.CORROBORATED, support=[capacity.claim, *fitting])
    if len(named) == 1:
        found.name = named.pop()
    elif len(named) > 1:
        found.contradictions.append(f"the engine's own echoes name {', '.join(sorted(named))}")
    elif predicted is not None and width_bits(predicted) == width:
        found.name = predicted
        where = "what this version makes of the command and the checkpoint"
        found.support.append(
            Claim(stage=Stage.PREDICTED, source=Source.FACTS, field="kv_cache_dtype", value=predicted, where=where)
        )
    elif width == 16 and model_dtype is not None and width_bits(model_dtype) == width:
        found.name = model_dtype
    return found


def _keep_layers(
    found: _Dtype,
    capacity: CapacityReading,
    echoes: list[Claim],
    declared: Declared | None,
    allowed: tuple[str, ...],
) -> None:
    """Add the layers at 16 bit that the capacity shows. Where it cannot show whether there are some, it proves no dtype."""
    choices = capacity.sixteen_bit_layers(found.name)
    windowed = windowed_layers(declared.geometry) if declared is not None else ()
    excepted = [all(_stays(index, allowed, windowed) for index in layers) for layers in choices]
    if len(choices) == 1:
        found.sixteen_bit_layers = tuple(str(index) for index in choices[0])
        found.name = found.name if excepted[0] else "mixed"
    elif not all(excepted):
        rest = _from_echoes(echoes)
        found.name, found.confidence, found.support = rest.name, rest.confidence, rest.support
        found.contradictions += rest.contradictions


def _stays(index: int, allowed: tuple[str, ...], windowed: tuple[int, ...]) -> bool:
    return str(index) in allowed or ("sliding_window" in allowed and index in windowed)


def _from_echoes(echoes: list[Claim]) -> _Dtype:
    values = {canonical_dtype(claim.value) for claim in echoes}
    exact = {value for value in values if not value.endswith("-bit")}
    widths = {width_bits(value) for value in values}
    if not values:
        return _Dtype()
    found = _Dtype(confidence=Confidence.ECHOED, support=list(echoes))
    if len(widths) == 1 and len(exact) == 1:
        found.name = exact.pop()
    elif len(widths) == 1 and (width := widths.pop()) is not None:
        found.name = f"{width}-bit"
    else:
        found.confidence = Confidence.UNKNOWN
    if len(exact) > 1 or found.name == "unknown":
        found.contradictions.append(f"the engine's own echoes name {', '.join(sorted(values))}")
    return found


def _against(name: str, echoes: list[Claim], capacity: CapacityReading | None, predicted: str | None) -> list[str]:
    """Statements that cannot be true of a cache of this dtype."""
    width = width_bits(name)
    if width is None:
        return []
    found = [
        f"{claim.where} says {claim.value}, the cache is {name}" for claim in echoes if _differ(str(claim.value), name, width)
    ]
    if capacity is not None and capacity.width not in (None, width):
        found.append(f"{capacity.reason}, the cache is {name}")
    if predicted is not None and _differ(predicted, name, width):
        found.append(f"{predicted} is predicted, the cache is {name}")
    return found


def _differ(said: str, name: str, width: int) -> bool:
    """Whether a statement excludes `name`: another width, or another name of the same width."""
    said = canonical_dtype(said)
    if said.endswith("-bit") or name.endswith("-bit"):
        return width_bits(said) not in (None, width)
    return said != name


def _scales(
    found: _Dtype,
    reading: TensorReading | None,
    missing: tuple[str, ...],
    declared: Declared | None,
    calculated: bool,
    calibrated: bool,
) -> tuple[ScaleState, Confidence, str]:
    if is_quantized(found.name) is False:
        return ScaleState.NOT_QUANTIZED, found.confidence, "the cache is not quantized"
    if reading is None:
        return (
            ScaleState.UNKNOWN,
            Confidence.UNKNOWN,
            "the scales were not read: that needs kvguard's reader in the engine",
        )
    state, detail = classify_scales(reading, declared, calculated, calibrated)
    if state is ScaleState.INVALID or not missing:
        confidence = Confidence.UNKNOWN if state is ScaleState.UNKNOWN else Confidence.PROVEN
        return state, confidence, detail
    return ScaleState.UNKNOWN, Confidence.UNKNOWN, f"not every rank's scales were read: {'; '.join(missing[:3])}"


def _allowed(layer: LayerReply, allowed: tuple[str, ...]) -> bool:
    return layer.index in allowed or ("sliding_window" in allowed and layer.sliding_window is not None)


def _by_number(indices: set[str]) -> tuple[str, ...]:
    return tuple(sorted(indices, key=lambda text: (not text.isdigit(), int(text) if text.isdigit() else 0, text)))


def _model_dtype(reading: TensorReading | None, declared: Declared | None, log: Sequence[Claim]) -> str | None:
    """What the engine says its model's dtype is, else the checkpoint's."""
    told = [reply.model_dtype for reply in reading.replies if reply.model_dtype] if reading is not None else []
    told += [str(claim.value) for claim in log if claim.field == "model_dtype" and claim.value]
    name = told[0] if told else (declared.model_dtype if declared is not None else None)
    return canonical_dtype(name) if name else None


def _backends(reading: TensorReading | None, log: Sequence[Claim]) -> tuple[str, ...]:
    if reading is not None and reading.backends:
        return reading.backends
    return tuple(dict.fromkeys(str(claim.value) for claim in log if claim.field == "attention_backend"))


def _sizes(reading: TensorReading | None, capacity: CapacityReading | None) -> tuple[int | None, int | None, float | None]:
    """Bytes, tokens and bytes per token: the caller's measurement, else the tensors' own."""
    if capacity is not None and capacity.bytes_per_token is not None:
        return capacity.kv_bytes, capacity.kv_tokens, capacity.bytes_per_token
    kv_bytes = reading.kv_bytes if reading is not None else capacity.kv_bytes if capacity is not None else None
    kv_tokens = capacity.kv_tokens if capacity is not None else reading.kv_tokens if reading is not None else None
    return kv_bytes, kv_tokens, kv_bytes / kv_tokens if kv_bytes and kv_tokens else None
