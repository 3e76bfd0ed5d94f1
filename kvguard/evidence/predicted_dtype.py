"""The cache dtype one vLLM version makes of a question, by the facts alone."""

from __future__ import annotations

from collections.abc import Mapping

from kvguard.checkpoint.quantization import SIDECAR
from kvguard.evidence.question import AUTO, UNKNOWN, Question
from kvguard.facts.devices import device_rule
from kvguard.facts.kv_dtypes import (
    FP8_E5M2,
    Fact,
    accepted,
    calculate_kv_scales_versions,
    nvfp4_unusable,
    runtime_scales,
    sixteen_bit_not_honoured,
    versions_accepting,
)
from kvguard.facts.kv_resolution import (
    COMPRESSED_TENSORS,
    compressed_tensors_refusal,
    compressed_tensors_scheme,
    cpu_rule,
    e5m2_refusal,
    model_rule,
    modelopt_dtype,
    modelopt_method,
    never_resolves,
)
from kvguard.vocabulary import Frozen, canonical_dtype, is_quantized

FP8 = "fp8_e4m3"
_SIXTEEN_BIT = ("bfloat16", "float16")
_NOTHING = Fact(reason="", source="")


class Answer(Frozen):
    """A cache dtype (canonical, or "unknown"), why, and where vLLM's sources say so.

    `fails`: the engine is expected not to start. `echo`: what its front end says, a canonical dtype or "auto".
    """

    dtype: str
    reason: str
    sources: tuple[str, ...] = ()
    fails: bool = False
    echo: str | None = None

    def because(self, reason: str, source: str) -> Answer:
        """The same answer with an earlier reason in front."""
        text = "; ".join(filter(None, (reason, self.reason)))
        return self.model_copy(update={"reason": text, "sources": (source, *self.sources)})


def predicted_dtype(question: Question) -> Answer:
    """The order is vLLM's: parser and config refusals, ModelOpt's resolver, the model's hooks, attention layers."""
    refusal = _refused(question)
    if refusal is not None:
        return refusal
    if question.device is not None and not question.device.examined(question.version):
        reason = f"what vLLM {question.version} does on {question.device.name} was not examined"
        return Answer(dtype=UNKNOWN, reason=reason, sources=("facts: examined devices",))
    scheme = _by_compressed_tensors(question)
    if scheme is not None:
        return scheme
    modelopt = _by_modelopt(question)
    if modelopt is None:
        return _by_model(question, question.requested)
    value, fact = modelopt
    return _by_model(question, value).because(fact.reason, fact.source)


def _by_device(question: Question, value: str) -> Answer | None:
    """What the accelerator makes of a value: an expected failure, or "unknown"; None when it runs it or is not known."""
    if question.device is None:
        return None
    mla, traits = question.declared.geometry.mla, question.declared.traits
    rule = device_rule(question.version, question.device, value, mla=mla, traits=traits)
    if rule is None or rule.result == "as_is":
        return None
    reason = f"{value} on {question.device.name}: {rule.reason}" + (f" (instead: {rule.do})" if rule.do else "")
    if rule.result == "fails":
        return _fails(reason, rule.source)
    return Answer(dtype=UNKNOWN, reason=reason, sources=(rule.source,), echo=value)


def _fails(reason: str, source: str) -> Answer:
    return Answer(dtype=UNKNOWN, reason=f"expected not to start: {reason}", sources=(source,), fails=True)


def _refused(question: Question) -> Answer | None:
    version, typed, scheme = question.version, question.typed, question.scheme
    values = accepted(version) or ()
    if typed is not None and typed not in values:
        known = versions_accepting(typed)
        text = f"versions that do: {known}" if known else "no examined version does"
        return _fails(f"vLLM {version} does not accept --kv-cache-dtype {typed} ({text})", "facts: accepted values")
    if question.calculate_kv_scales and runtime_scales(version, None) is None:
        versions = calculate_kv_scales_versions()
        return _fails(f"vLLM {version} has no --calculate-kv-scales (only {versions} have)", "0.28.0 engine/arg_utils.py")
    quantization = question.quantization
    if quantization is not None:
        inferred = modelopt_method(
            version,
            producer=quantization.producer,
            legacy_key=quantization.legacy_modelopt,
            quant_algo=quantization.quant_algo,
        )
        if inferred and inferred.refused:
            return _fails(f"{quantization.where}: {inferred.refused}", inferred.source)
    if scheme and question.compressed_tensors_scheme and isinstance(scheme.raw, Mapping):
        refusal = compressed_tensors_refusal(version, scheme.raw)
        if refusal:
            return _fails(f"{scheme.where}: {refusal.reason}", refusal.source)
    return None


def _by_compressed_tensors(question: Question) -> Answer | None:
    """What a compressed-tensors scheme turns the cache into, None when it changes nothing."""
    scheme, rule = question.scheme, compressed_tensors_scheme(question.version)
    if scheme is None or rule is None or not question.compressed_tensors_scheme:
        return None
    if rule.effect == "ignored" or (rule.effect == "if_auto" and question.requested != AUTO):
        return None
    if _on_cpu(question, FP8) is not None:
        return _fails(f"{scheme.where}: {rule.reason}, which this version's CPU backend cannot run", rule.source)
    answer = _by_device(question, FP8) or Answer(dtype=FP8, reason="", sources=())
    unchecked = "" if scheme.type in (None, "float") else f"; its type {scheme.type!r} is not looked at in this version"
    return answer.because(f"{scheme.where}: {rule.reason}{unchecked}", rule.source).model_copy(
        update={"echo": question.requested}
    )


def _by_modelopt(question: Question) -> tuple[str, Fact] | None:
    """What ModelOpt's declaration resolves auto to, None when it leaves auto."""
    scheme, quantization = question.scheme, question.quantization
    if scheme is None or quantization is None or question.requested != AUTO:
        return None
    if not (question.method or "").startswith("modelopt") or quantization.block not in ("", "quantization_config"):
        return None
    resolved = modelopt_dtype(question.version, scheme.raw)
    if resolved is None or resolved[0] == AUTO:
        return None
    return resolved[0], Fact(reason=f"{scheme.where}: {resolved[1].reason}", source=resolved[1].source)


def _by_model(question: Question, value: str) -> Answer:
    """The model's own rules for a value, then what the version and platform do with it."""
    rule = model_rule(question.version, question.declared.traits, value, question.device)
    if rule is None:
        answer = _by_value(question, value)
        return answer if answer.echo or answer.fails else answer.model_copy(update={"echo": value})
    if rule.effect != AUTO or value == AUTO:
        known = None if rule.effect == UNKNOWN else rule.effect
        return Answer(dtype=rule.effect, reason=rule.reason, sources=(rule.source,), echo=known if rule.front_end else value)
    return _by_model(question, AUTO).because(rule.reason, rule.source)


def _by_value(question: Question, value: str) -> Answer:
    """What a value (typed, or resolved from ModelOpt) becomes by the version's and platform's own limits."""
    if value == AUTO:
        return _model_dtype(question, _why_auto(question))
    version = question.version
    limited = _on_cpu(question, value) or _by_device(question, value)
    if limited is not None:
        return limited
    limit = sixteen_bit_not_honoured(version, value, compressed_tensors_scheme=False)
    if limit is None and value == "nvfp4":
        limit = nvfp4_unusable(version)
    if limit is None and value == FP8_E5M2 and question.owns_scales:
        bare = question.method == COMPRESSED_TENSORS and question.scheme is None
        limit = e5m2_refusal(version, compressed_tensors_without_scheme=bare)
    if limit is not None:
        return _fails(f"{value}: {limit.reason}", limit.source)
    note = "explicit value" if question.typed else ""
    if value in _SIXTEEN_BIT and question.model_dtype in _SIXTEEN_BIT and value != question.model_dtype:
        note += f", unlike the model's {question.model_dtype}: vLLM does not convert, so answers are nonsense"
    if value.endswith("_ds_mla") and not question.declared.geometry.mla:
        return _fails(f"{value} is a layout of MLA layers, which this model has not", "0.32.0 mla_attention.py:1365")
    if is_quantized(value) and question.declared.geometry.mla and value not in (FP8, "fp8_ds_mla", "nvfp4_ds_mla"):
        return Answer(dtype=UNKNOWN, reason=f"{value} on MLA layers depends on the attention backend")
    return Answer(dtype=value, reason=note)


def _on_cpu(question: Question, value: str) -> Answer | None:
    """The CPU platform's answer for a value other than auto, None on other platforms and for values it runs."""
    rule = cpu_rule(question.version) if question.platform == "cpu" else None
    if rule is None:
        return None
    quantized = is_quantized(value)
    if rule.effect == "all_to_auto" or (rule.effect == "quantized_to_auto" and quantized):
        return _model_dtype(question, Fact(reason=rule.reason, source=rule.source)).model_copy(update={"echo": AUTO})
    if rule.effect == "e4m3_to_e5m2" and quantized:
        return Answer(dtype=FP8_E5M2, reason=rule.reason, sources=(rule.source,), echo=FP8_E5M2)
    if rule.effect == "none" and value not in {canonical_dtype(name) for name in rule.runs}:
        reason = f"{value} is not among what the CPU attention backend runs ({', '.join(rule.runs)})"
        return Answer(dtype=UNKNOWN, reason=reason, sources=(rule.source,))
    return None


def _why_auto(question: Question) -> Fact:
    """Why a declaration did not change auto, or nothing to say."""
    scheme, version = question.scheme, question.version
    if scheme is None:
        if question.declared.kv_scheme is not None:
            return Fact(reason=f"{SIDECAR} is not read by this version", source="0.9.2 transformers_utils/config.py")
        return _NOTHING
    if question.compressed_tensors_scheme:
        rule = compressed_tensors_scheme(version)
        return Fact(reason=f"{scheme.where}: {rule.reason}", source=rule.source) if rule else _NOTHING
    if question.method == COMPRESSED_TENSORS:
        return Fact(reason=f"{scheme.where}: not applied to MLA layers", source="0.32.0 mla_attention.py")
    if question.method is None:
        reason = f"{scheme.where}: without quant_method vLLM does not look at it"
        return Fact(reason=reason, source="0.32.0 utils/torch_utils.py:468")
    if question.method.startswith("modelopt"):
        resolved = modelopt_dtype(version, scheme.raw)
        if resolved is None:
            reason = "this version reads ModelOpt's KV algorithm for weights only"
            return Fact(reason=f"{scheme.where}: {reason}", source="0.13.0 utils/torch_utils.py")
        return Fact(reason=f"{scheme.where}: {resolved[1].reason}", source=resolved[1].source)
    never = never_resolves(question.method)
    if never is not None:
        return Fact(reason=f"{scheme.where}: {never.reason}", source=never.source)
    reason = f"{scheme.where}: no known rule applies it for quantization method {question.method}"
    return Fact(reason=reason, source="0.32.0 utils/torch_utils.py:457")


def _model_dtype(question: Question, why: Fact) -> Answer:
    dtype = question.model_dtype
    if dtype in _SIXTEEN_BIT or (dtype == "float32" and question.model_dtype_typed):
        answer = Answer(dtype=dtype, reason="auto is the model's dtype")
    elif dtype == "float32":
        answer = Answer(dtype=UNKNOWN, reason="the model is float32, for which the platform picks a 16-bit dtype")
    else:
        answer = Answer(dtype=UNKNOWN, reason=f"the model's dtype ({dtype or 'not declared'}) does not say what runs")
    if question.cast is not None:
        answer = answer.because(question.cast.reason, question.cast.source)
    return answer.because(why.reason, why.source) if why.reason else answer
