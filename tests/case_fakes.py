"""Inputs of the cases: a checkpoint, a command, a log and a metrics page in, kvguard's answer out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint_fakes import Tensors, f32, files
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.models import Declared
from kvguard.engine.resolve import resolve
from kvguard.evidence.cache_size import measure
from kvguard.evidence.log import read_log
from kvguard.evidence.metrics import claims as metrics_claims
from kvguard.evidence.metrics import parse_metrics
from kvguard.evidence.prediction import Prediction, predict
from kvguard.evidence.reconcile import reconcile
from kvguard.facts.devices import find_device
from kvguard.verdict.before_start import judge_before_start
from kvguard.verdict.checks import judge
from kvguard.vocabulary import Check, Claim, Effective
from launches import command, policy

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
}
CT_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
MODELOPT_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


def checkpoint(
    quantization: Mapping[str, Any] | None = None,
    tensors: Tensors | None = None,
    sidecar: Mapping[str, Any] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    **config: Any,
) -> Declared:
    """LLAMA with changes to its config, a quantization_config, tensors and a sidecar."""
    block = {} if quantization is None else {"quantization_config": quantization}
    return declare(files({**LLAMA, **config, **block}, tensors, sidecar), overrides)


def compressed_tensors(**scheme: Any) -> dict[str, Any]:
    """A compressed-tensors quantization_config; `scheme` changes its kv_cache_scheme."""
    return {"quant_method": "compressed-tensors", "kv_cache_scheme": {**CT_SCHEME, **scheme}}


def modelopt(**keys: Any) -> dict[str, Any]:
    """A ModelOpt quantization_config with these keys."""
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", **keys}


def named(*names: str, value: float = 0.04) -> Tensors:
    """Scalar float32 tensors of these names."""
    return {name: f32(value, shape=[]) for name in names}


def on(version: str, declared: Declared, typed: str | None = None, device: str | None = None) -> Prediction:
    """The prediction for a version, on a device when one is named."""
    return predict(version, typed, declared, device=find_device(device) if device else None)


def before(text: str | None, declared: Declared, *argv: str, version: str = "0.32.0") -> dict[str, Check]:
    """The checks before the start, by name, of `vllm serve m ARGV…` under a policy given as YAML."""
    typed, required = command(*argv, version=version), None if text is None else policy(text)
    found = resolve(typed, version, declared, required, {})
    checks = judge_before_start(
        required,
        prediction=found.prediction,
        target=found.target,
        typed=found.typed,
        typed_by=found.typed_by,
        problem=found.problem,
        declared=declared,
        model_dtype=found.model_dtype,
        engine_version=version,
        typed_skip_layers=typed.values("--kv-cache-dtype-skip-layers"),
        calculate_kv_scales=typed.present("--calculate-kv-scales"),
    )
    return {check.name: check for check in checks}


def said(log: str = "", page: str = "", version: str | None = None) -> dict[str, list[Claim]]:
    """What a start-up log and a metrics page claim, by field."""
    found: dict[str, list[Claim]] = {}
    for claim in (*read_log(log.encode()).claims(version), *metrics_claims(parse_metrics(page))):
        found.setdefault(claim.field, []).append(claim)
    return found


def seen(
    log: str = "",
    page: str = "",
    *,
    declared: Declared | None = None,
    version: str,
    typed: str | None = None,
    ranks: int = 1,
) -> Effective:
    """What log, metrics and capacity together say of an engine from whose inside nothing was read."""
    ours, theirs = read_log(log.encode()).claims(version), metrics_claims(parse_metrics(page))
    geometry = declared.geometry if declared else None
    reading = measure(tensors=None, metrics_claims=theirs, log_claims=ours, geometry=geometry, ranks=ranks)
    expected = predict(version, typed, declared) if declared else None
    return reconcile(
        tensors=None,
        capacity=reading,
        metrics_claims=theirs,
        log_claims=ours,
        declared=declared,
        predicted_dtype=expected.dtype if expected else None,
        predicted_scales=expected.scales if expected else None,
        calculated=False,
        allowed_sixteen_bit=(),
    )


def after(text: str | None, effective: Effective, declared: Declared | None = None) -> dict[str, Check]:
    """The checks of a running engine, by name."""
    required = None if text is None else policy(text)
    checks = judge(required, effective, model_dtype="bfloat16", engine_version="0.32.0", declared=declared)
    return {check.name: check for check in checks}
