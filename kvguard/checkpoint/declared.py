"""What a checkpoint's files declare, put together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvguard.checkpoint.findings import (
    ignored_keys,
    not_taken,
    quantization_findings,
    scale_state_findings,
    weight_findings,
)
from kvguard.checkpoint.geometry import read_geometry, text_section
from kvguard.checkpoint.json_config import Section, parse_object
from kvguard.checkpoint.mistral import PARAMS, adapt, origins
from kvguard.checkpoint.models import CheckpointFiles, Declared, DeclaredScales, KVScheme
from kvguard.checkpoint.quantization import (
    BLOCKS,
    CONFIG,
    OVERRIDES,
    SIDECAR,
    apply_overrides,
    effective_method,
    find_quantization,
    find_scheme,
    other_schemes,
)
from kvguard.checkpoint.scales import declared_scales
from kvguard.facts.versions import NEWEST
from kvguard.vocabulary import Claim, Source, Stage, UsageError, canonical_dtype


def declare(files: CheckpointFiles, hf_overrides: Mapping[str, Any] | None = None) -> Declared:
    """What the files ask for, after `--hf-overrides` (a JSON object) if there are any.

    UsageError, naming file and key, when config.json is missing or holds what vLLM cannot start with.
    """
    if files.config_json is None and files.params_json is None:
        raise UsageError(f"{files.directory}: no config.json; a Hugging Face model directory is needed")
    overrides = parse_object(json.dumps(hf_overrides).encode(), OVERRIDES) if hf_overrides else {}
    name, written = written_config(files)
    config = apply_overrides(written, overrides)
    sidecar_bytes = files.hf_quant_config_json
    sidecar = None if sidecar_bytes is None else parse_object(sidecar_bytes, SIDECAR)
    section = Section(config, name, origins=_origins(files, overrides))
    text = text_section(section)
    geometry = read_geometry(section)
    block = find_quantization(section, sidecar, overrides)
    quantization = block[0] if block else None
    scheme = find_scheme(*block) if block else None
    others = other_schemes(config, sidecar, quantization)
    dtype, dtype_where, dtype_findings = _model_dtype(section, text)
    if dtype is None and name == PARAMS:
        dtype, dtype_where, dtype_findings = *_stored_dtype(files), ()
    inferred = dtype is None and name == CONFIG
    if inferred:
        dtype, dtype_where = _inferred_dtype(section, files)
        dtype_findings = dtype_findings if dtype is None else ()
    scales, scale_findings = declared_scales(files, geometry)
    architectures = section.words("architectures") or ()
    model_type = section.text("model_type")
    return Declared(
        directory=files.directory,
        architecture=architectures[0] if architectures else None,
        model_type=model_type,
        model_dtype=dtype,
        model_dtype_inferred=inferred and dtype is not None,
        quant_method=effective_method(quantization, NEWEST),
        quantization=quantization,
        kv_scheme=scheme,
        other_schemes=others,
        geometry=geometry,
        scales=scales,
        has_chat_template=files.has_chat_template,
        max_position_embeddings=text.number("max_position_embeddings", "n_positions", "seq_length"),
        traits=_traits(architectures, text),
        claims=_claims(dtype, dtype_where, scheme, scales),
        findings=(
            *ignored_keys(section),
            *quantization_findings(quantization, scheme, sidecar),
            *dtype_findings,
            *scale_findings,
            *(not_taken(other, quantization) for other in others),
            *scale_state_findings(scales, scheme, quantization),
            *weight_findings(files, geometry),
        ),
    )


def written_config(files: CheckpointFiles) -> tuple[str, dict[str, Any]]:
    """The config vLLM takes, before overrides, and its file's name: config.json, or params.json filled in by it."""
    written = {} if files.config_json is None else parse_object(files.config_json, CONFIG)
    if files.params_json is None:
        return CONFIG, written
    return PARAMS, adapt(parse_object(files.params_json, PARAMS), written)


def _origins(files: CheckpointFiles, overrides: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The file and the key of values that config.json does not have under the name of vLLM's config."""
    found: dict[str, tuple[str, str]] = {}
    if files.params_json is not None:
        written = {} if files.config_json is None else parse_object(files.config_json, CONFIG)
        found = origins(parse_object(files.params_json, PARAMS), written)
    replaced = {key: (OVERRIDES, key) for key in overrides if not key.endswith("_config") or key in BLOCKS}
    return {**found, **replaced}


def _model_dtype(config: Section, text: Section) -> tuple[str | None, str, tuple[str, ...]]:
    """The model's dtype, where it was read, and findings."""
    findings: tuple[str, ...] = ()
    for section in (config, text):
        new, old = section.text("dtype"), section.text("torch_dtype")
        if new and old and canonical_dtype(new) != canonical_dtype(old):
            findings = (f"{section.place('dtype')} = {new!r} and torch_dtype = {old!r} differ; dtype is used",)
        if new or old:
            return canonical_dtype(new or old or ""), section.place("dtype" if new else "torch_dtype"), findings
    return None, "", (f"{CONFIG}: no dtype; what a 16-bit cache would hold is decided by the engine, or said with --dtype",)


def _inferred_dtype(config: Section, files: CheckpointFiles) -> tuple[str | None, str]:
    """Where vLLM looks when neither config.json nor its text config has a dtype, in its order.

    Source: 0.32.0 transformers_utils/model_arch_config_convertor.py:223 (get_torch_dtype).
    """
    for key in ("vision_config", "encoder_config"):
        nested = config.value.get(key)
        if not isinstance(nested, Mapping):
            continue
        part = Section(nested, config.where, f"{key}.")
        name = part.has("dtype", "torch_dtype")
        if name is not None:
            return canonical_dtype(part.text(name) or ""), part.place(name)
    stored = {tensor.dtype for header in files.safetensors for tensor in header.tensors.values()}
    if "F32" in stored and "F64" not in stored:
        return "float32", f"{files.safetensors[0].file}: the tensors' dtype"
    return _stored_dtype(files)


def _stored_dtype(files: CheckpointFiles) -> tuple[str | None, str]:
    """The one 16-bit dtype of the stored tensors, as vLLM infers it; None when it is not one."""
    names = {"BF16": "bfloat16", "F16": "float16"}
    stored = {tensor.dtype for header in files.safetensors for tensor in header.tensors.values()}
    found = [names[dtype] for dtype in names if dtype in stored]
    alone = len(found) == 1 and not stored & {"F32", "F64"}
    return (found[0], f"{files.safetensors[0].file}: the tensors' dtype") if alone else (None, "")


def _traits(architectures: tuple[str, ...], text: Section) -> frozenset[str]:
    """Architecture features that facts.kv_resolution.model_rule has rules for."""
    model_type = text.text("model_type") or ""
    checks = {
        "deepseek_v32": "DeepseekV32ForCausalLM" in architectures,
        "glm_moe_dsa": "GlmMoeDsaForCausalLM" in architectures,
        "sparse_mla": text.has("index_topk") is not None and text.has("kv_lora_rank") is not None,
        "deepseek_v4": model_type.startswith("deepseek_v4")
        or text.has("compress_ratios") is not None
        or any(name.startswith("DeepseekV4") for name in architectures),
        "deepseek_v41": model_type.startswith("deepseek_v41") or any(name.startswith("DeepseekV41") for name in architectures),
        "mixed_head_sizes": _mixes_head_sizes(architectures, text),
        "dots3_note": model_type == "dots3_note",
    }
    return frozenset(name for name, holds in checks.items() if holds)


def _mixes_head_sizes(architectures: tuple[str, ...], text: Section) -> bool:
    """Whether layers without a window have heads of another size, as Gemma 4's do unless its config says otherwise."""
    if text.has("global_head_dim") is None:
        return any(name.startswith("Gemma4") for name in architectures)
    return bool(text.value.get("global_head_dim") != text.value.get("head_dim"))


def _claims(dtype: str | None, where: str, scheme: KVScheme | None, scales: DeclaredScales) -> tuple[Claim, ...]:
    claims = []
    if dtype:
        claims.append(Claim(stage=Stage.DECLARED, source=Source.CONFIG_JSON, field="model_dtype", value=dtype, where=where))
    if scheme:
        source = Source.HF_QUANT_CONFIG if scheme.where.startswith(SIDECAR) else Source.CONFIG_JSON
        claims.append(
            Claim(
                stage=Stage.DECLARED,
                source=source,
                field="kv_cache_scheme",
                value=scheme.raw,
                where=scheme.where,
                note=f"belongs to quantization method {scheme.producer}",
            )
        )
    claims.append(
        Claim(
            stage=Stage.DECLARED,
            source=Source.SCALE_TENSORS,
            field="scales",
            value=scales.state.value,
            where=scales.where,
            note=f"{scales.tensors} KV scale tensors",
        )
    )
    return tuple(claims)
