"""What one vLLM version makes of what was requested and what the checkpoint declares, by the facts alone."""

from __future__ import annotations

from kvguard.checkpoint.models import Declared
from kvguard.evidence.predicted_dtype import predicted_dtype
from kvguard.evidence.predicted_scales import predicted_scales
from kvguard.evidence.question import UNKNOWN, ask
from kvguard.facts.devices import Device
from kvguard.facts.versions import KNOWN, examined
from kvguard.vocabulary import Claim, Frozen, ScaleState, Source, Stage


class Prediction(Frozen):
    """The expected cache dtype (canonical, or "unknown") and scales, why, and the facts behind it.

    `explicit_honoured`: whether a typed value is what the engine runs; None when nothing was typed or nothing is known.
    `fails`: the facts say that the engine does not start like this. `echo` is what its banner and metrics will show,
    where that differs from what runs or is all that can be said. `sources` are places in vLLM's sources.
    """

    dtype: str
    scales: ScaleState
    explicit_honoured: bool | None
    reason: str
    sources: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    fails: bool = False
    echo: str | None = None


def predict(
    version: str,
    requested: str | None,
    declared: Declared,
    *,
    model_dtype: str | None = None,
    calculate_kv_scales: bool = False,
    platform: str | None = None,
    device: Device | None = None,
) -> Prediction:
    """What this vLLM version will run for a typed `--kv-cache-dtype` (None or "auto": nothing typed).

    `model_dtype` is `--dtype` when given; `platform` "cpu" or another name (default: read from a local version part
    such as 0.32.0+cpu); `device` the accelerator, when it is known. "unknown" is an answer: for versions not examined,
    for what depends on a GPU that is not named or on the attention backend, and for what is expected to fail.
    """
    if not examined(version):
        reason = f"vLLM {version or '(no version)'} was not examined; the facts cover {KNOWN}"
        return Prediction(
            dtype=UNKNOWN,
            scales=ScaleState.UNKNOWN,
            explicit_honoured=None,
            reason=reason,
            claims=_claims(version, UNKNOWN, ScaleState.UNKNOWN, (reason, reason)),
        )
    question = ask(
        version,
        requested,
        declared,
        model_dtype=model_dtype,
        calculate_kv_scales=calculate_kv_scales,
        platform=platform,
        device=device,
    )
    answer = predicted_dtype(question)
    scales, why = predicted_scales(question, answer.dtype)
    honoured = None
    if question.typed is not None:
        honoured = False if answer.fails else None if answer.dtype == UNKNOWN else answer.dtype == question.requested
    return Prediction(
        dtype=answer.dtype,
        scales=scales,
        explicit_honoured=honoured,
        reason="; ".join(filter(None, (answer.reason, why.reason))),
        sources=tuple(dict.fromkeys(filter(None, (*answer.sources, why.source)))),
        claims=_claims(version, answer.dtype, scales, (answer.reason, why.reason)),
        fails=answer.fails,
        echo=None if answer.fails else answer.echo,
    )


def _claims(version: str, dtype: str, scales: ScaleState, notes: tuple[str, str]) -> tuple[Claim, ...]:
    where = f"facts for vLLM {version}"
    fields = (("kv_cache_dtype", dtype, notes[0]), ("scales", scales.value, notes[1]))
    return tuple(
        Claim(stage=Stage.PREDICTED, source=Source.FACTS, field=field, value=value, where=where, note=note)
        for field, value, note in fields
    )
