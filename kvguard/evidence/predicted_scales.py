"""The KV scales one vLLM version uses for a question, once the cache dtype is known."""

from __future__ import annotations

from kvguard.evidence.question import AUTO, Question
from kvguard.facts.devices import doubled_scales
from kvguard.facts.kv_dtypes import Fact, runtime_scales, runtime_scales_disabled
from kvguard.facts.scale_names import (
    dropped_by_model,
    form_is_recognised,
    host_copy_stays_one,
    owners_source,
    per_head_refusal,
    unexpected_without_quant_config,
)
from kvguard.vocabulary import DYNAMIC_SCALE_DTYPES, ScaleState, is_quantized


def predicted_scales(question: Question, dtype: str) -> tuple[ScaleState, Fact]:
    """The scales such a cache gets, and why. A 16-bit cache has none, whatever the files hold."""
    unexpected = _loader_refusal(question)
    quantized = is_quantized(dtype)
    if quantized is None:
        return ScaleState.UNKNOWN, unexpected
    if not quantized:
        return ScaleState.NOT_QUANTIZED, unexpected
    if dtype in DYNAMIC_SCALE_DTYPES:
        return ScaleState.RUNTIME_DYNAMIC, Fact(reason="its scales are computed as it is written", source="")
    if question.calculate_kv_scales:
        runtime = _runtime(question)
        if runtime is not None:
            return runtime
    return _from_files(question, unexpected)


def _loader_refusal(question: Question) -> Fact:
    """Why scale tensors stop the loader of a checkpoint without quantization_config, or nothing."""
    tensors = question.declared.scales.tensors
    fact = unexpected_without_quant_config(question.version) if tensors and not question.method else None
    return fact if fact and question.declared.quantization is None else Fact(reason="", source="")


def _runtime(question: Question) -> tuple[ScaleState, Fact] | None:
    """What `--calculate-kv-scales` gives, None when vLLM switches it off."""
    scheme = question.compressed_tensors_scheme
    hybrid = question.declared.geometry.hybrid
    version, automatic = question.version, question.requested == AUTO
    if runtime_scales_disabled(version, scheme=scheme, automatic=automatic, hybrid=hybrid):
        return None
    fact = runtime_scales(version, question.platform)
    if fact is None:
        return None
    if fact.input == "startup_error":
        return ScaleState.UNKNOWN, fact
    if question.declared.scales.query and question.owns_scales:
        reason = "with a query scale in the checkpoint --calculate-kv-scales leaves keys and values at 1.0"
        return ScaleState.UNIT_DEFAULT, Fact(reason=reason, source="0.8.5 model_executor/layers/quantization/kv_cache.py:54")
    return ScaleState.RUNTIME_ONCE, fact


def _from_files(question: Question, unexpected: Fact) -> tuple[ScaleState, Fact]:
    scales = question.declared.scales
    if scales.state is ScaleState.UNKNOWN and question.owns_scales:
        return ScaleState.UNKNOWN, Fact(reason=scales.where, source="")
    if not scales.tensors:
        return ScaleState.UNIT_DEFAULT, Fact(reason="no scale tensors in the files, so scale 1.0", source="")
    if not question.owns_scales:
        reason = unexpected.reason or (
            f"{question.method or 'a checkpoint without quantization_config'} loads no KV scales, so scale 1.0"
        )
        return ScaleState.UNIT_DEFAULT, Fact(reason=reason, source=unexpected.source or owners_source())
    known = {form: form_is_recognised(question.version, form, question.method or "") for form in scales.forms}
    unread = [form for form, answer in known.items() if answer is None]
    if unread:
        reason = f"whether vLLM {question.version} recognises scale names of form {', '.join(unread)} was not read"
        return ScaleState.UNKNOWN, Fact(reason=reason, source="")
    recognised = [form for form, answer in known.items() if answer]
    if len(recognised) < len(scales.forms):
        state = ScaleState.PARTIAL if recognised else ScaleState.UNIT_DEFAULT
        names = ", ".join(form for form in scales.forms if form not in recognised)
        return state, Fact(reason=f"vLLM {question.version} does not recognise scale names of form {names}", source="")
    doubtful = _doubtful(question)
    if doubtful is not None:
        return ScaleState.UNKNOWN, doubtful
    doubled = doubled_scales(question.device)
    if doubled is not None:
        return scales.state, Fact(reason=f"scales from the files; {doubled.reason}", source=doubled.source)
    host = host_copy_stays_one(question.version, question.method)
    if host is not None:
        return scales.state, Fact(reason=f"scales from the files; {host.reason}", source=host.source)
    return scales.state, Fact(reason="scales from the files", source=owners_source())


def _doubtful(question: Question) -> Fact | None:
    """Why only the engine can tell which scales it runs, though it loads those of the files."""
    scales, declared = question.declared.scales, question.declared
    dropped = dropped_by_model(question.version, declared.architecture)
    if dropped is not None or scales.state is ScaleState.INVALID:
        return dropped
    if scales.ambiguous:
        reason = f"the files have two values for {scales.ambiguous[0]}; the engine keeps whichever it loads last"
        return Fact(reason=reason, source="")
    if declared.geometry.layer_indices is None and scales.state is not ScaleState.PARTIAL:
        return Fact(reason="which layers need scales cannot be told from the config", source="")
    strategy = question.scheme.strategy if question.scheme is not None else None
    return per_head_refusal(question.version, question.method, strategy) if scales.per_head else None
