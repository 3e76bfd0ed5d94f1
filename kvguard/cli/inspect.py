"""`kvguard inspect`: what a checkpoint declares about its KV cache, and what a vLLM version will make of it."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console

from kvguard.checkpoint.cost import state_bytes
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.findings import UNIT_SCALE
from kvguard.checkpoint.json_config import MAX_NUMBER, parse_object
from kvguard.checkpoint.models import Declared
from kvguard.checkpoint.parallel import Ranks
from kvguard.checkpoint.quantization import OVERRIDES
from kvguard.cli.across import show_across
from kvguard.cli.inspect_sizes import Load, sizes, sizes_table
from kvguard.cli.sizes import parse_size
from kvguard.engine.accelerators import device_for
from kvguard.engine.find import installed_engine
from kvguard.engine.hub import locate
from kvguard.engine.preview import full_version
from kvguard.evidence.first_choice import first_choice
from kvguard.evidence.prediction import Prediction, predict
from kvguard.facts.cautions import cautions
from kvguard.facts.versions import KNOWN
from kvguard.files import printable
from kvguard.vocabulary import ScaleState, UsageError, is_quantized

_MAX_RANKS = 4096
_LONGEST = 1 << 20


def inspect(
    command: typer.Context,
    model: Annotated[str, typer.Argument(help="The model's directory, or ORG/NAME in the local hub cache or on a hub.")],
    engine_version: Annotated[
        str | None, typer.Option(help="Predict for this vLLM version (default: the installed one).")
    ] = None,
    memory: Annotated[str, typer.Option(help="Show how many tokens fit into this much KV memory (on each GPU).")] = "1GiB",
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Predict for this --kv-cache-dtype (default: nothing typed).")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Predict for this accelerator: h100, b200, rtx5090, a100, mi300x, cpu, sm90, gfx942, or none for no "
            "particular one (default: the one that is found here)."
        ),
    ] = None,
    hf_overrides: Annotated[str | None, typer.Option(help="vLLM's --hf-overrides, a JSON object.")] = None,
    revision: Annotated[str | None, typer.Option(help="The hub's branch, tag or commit to read (default: main).")] = None,
    across: Annotated[
        str | None, typer.Option(help="Compare versions, such as 0.12,0.16,0.32, for the command after `--`.")
    ] = None,
    context: Annotated[int, typer.Option(help="Show what a sequence of this many tokens takes.", min=1, max=MAX_NUMBER)] = 8192,
    batched_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens computed at once (vLLM's --max-num-batched-tokens); windows need room for them.", min=0, max=MAX_NUMBER
        ),
    ] = 0,
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share the heads.", min=1, max=_MAX_RANKS)] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(help="Stages that share the layers.", min=1, max=_MAX_RANKS)] = 1,
    data_parallel_size: Annotated[int, typer.Option(help="Replicas, each with a cache of its own.", min=1, max=_MAX_RANKS)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a checkpoint declares about its KV cache and what vLLM will make of it. Starts nothing.

    Example: kvguard inspect ./my-model --across 0.16,0.22,0.32 -- vllm serve ./my-model --kv-cache-dtype bfloat16
    """
    ranks = Ranks(tensor=tensor_parallel_size, pipeline=pipeline_parallel_size, data=data_parallel_size)
    load = Load(memory=parse_size(memory, "--memory"), context=context, in_flight=batched_tokens, ranks=ranks)
    engine = None if engine_version or across else installed_engine()
    found_device = device_for(device, engine, os.environ)
    where = found_device.device
    if across and engine_version:
        raise UsageError("inspect: --across names the versions; leave --engine-version out")
    engine_version = full_version(engine_version) if engine_version else None
    if across or command.args:
        given = {"--kv-cache-dtype": kv_cache_dtype, "--hf-overrides": hf_overrides}
        show_across(model, across or engine_version or "", tuple(command.args), given, where, revision, as_json=as_json)
        return
    overrides = parse_object(hf_overrides.encode(), OVERRIDES) if hf_overrides else None
    located = locate(model, os.environ, revision)
    declared = declare(located.files, overrides)
    version = engine_version or (engine.version if engine is not None else None) or None
    prediction = predict(version, kv_cache_dtype, declared, device=where) if version else None
    report = {
        **inspection(declared, version, kv_cache_dtype, prediction, load),
        "hub": located.published and located.published.model_dump(mode="json"),
        "device": where and where.model_dump(),
        "device_where": found_device.where,
        "cautions": [],
        "first_choice": None,
    }
    if prediction is not None and version is not None:
        report["first_choice"] = first_choice(version, declared, where).model_dump(mode="json")
        found = cautions(
            version,
            prediction.dtype,
            prediction.scales.value,
            architecture=declared.architecture,
            mla=declared.geometry.mla,
            device=where,
        )
        report["cautions"] = [caution.model_dump() for caution in found]
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report, load)


def inspection(
    declared: Declared,
    version: str | None,
    requested: str | None,
    prediction: Prediction | None,
    load: Load,
) -> dict[str, Any]:
    """The report as JSON: declared settings with where each was read, sizes, prediction and findings.

    Counts are plain arithmetic (an engine rounds down to whole blocks).
    """
    geometry = declared.geometry
    return {
        "directory": declared.directory,
        "architecture": declared.architecture,
        "model_type": declared.model_type,
        "model_dtype": declared.model_dtype,
        "quant_method": declared.quant_method,
        "max_position_embeddings": declared.max_position_embeddings,
        "has_chat_template": declared.has_chat_template,
        "producer": _producer(declared),
        "other_schemes": [scheme.model_dump(mode="json") for scheme in declared.other_schemes],
        "kv_scheme": None if declared.kv_scheme is None else declared.kv_scheme.model_dump(mode="json"),
        "scales": {
            "state": declared.scales.state.value,
            "tensors": declared.scales.tensors,
            "files": list(declared.scales.files),
            "where": declared.scales.where,
            "forms": list(declared.scales.forms),
            "per_head": declared.scales.per_head,
            "missing": list(declared.scales.missing_layers),
            "invalid": list(declared.scales.invalid_layers),
            "ambiguous": list(declared.scales.ambiguous),
        },
        "geometry": geometry.model_dump(mode="json", exclude={"layer_indices", "layer_types"}),
        "memory_bytes": load.memory,
        "context": load.context,
        "batched_tokens": load.in_flight,
        "ranks": {**load.ranks.model_dump(), "gpus": load.ranks.gpus},
        "state_bytes": state_bytes(geometry, declared.model_dtype),
        "sizes": sizes(declared, version, load),
        "engine_version": version,
        "kv_cache_dtype": requested,
        "prediction": None if prediction is None else prediction.model_dump(mode="json", exclude={"claims"}),
        "claims": [claim.model_dump(mode="json") for claim in declared.claims],
        "findings": [text for text in declared.findings if UNIT_SCALE not in text or _runs_unit(prediction)],
    }


def _runs_unit(prediction: Prediction | None) -> bool:
    """Whether scale 1.0 may be what runs: not on a cache that has no stored scales, as far as is known."""
    return prediction is None or prediction.scales in (ScaleState.UNIT_DEFAULT, ScaleState.UNKNOWN)


def _producer(declared: Declared) -> str | None:
    """The tool that quantized the checkpoint, with its version, as the files name it."""
    quantization = declared.quantization
    if quantization is None or not quantization.producer:
        return None
    return " ".join(filter(None, (quantization.producer, quantization.producer_version)))


def _print(report: dict[str, Any], load: Load) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False, width=160)
    for topic, text in _topics(report):
        _line(console, topic, text)
    if report["sizes"]:
        console.print()
        by_length = bool(report["geometry"]["sliding_layers"] or report["geometry"]["hybrid"])
        console.print(sizes_table(report["sizes"], load, by_length=by_length))
    console.print()
    for topic, text in _predicted(report):
        _line(console, topic, text)
    choice = report["first_choice"]
    if choice is not None and report["device"]:
        _line(console, "8-bit cache to try", f"{choice['dtype'] or 'unknown'}: {'; '.join(choice['reasons'])}")
    for caution in report["cautions"]:
        _line(console, "caution", f"{caution['text']} ({caution['source']})")
    for finding in report["findings"]:
        _line(console, "finding", finding)


def _line(console: Console, topic: str, text: str) -> None:
    """One line of the report; what checkpoints say in it cannot move the cursor, colour the terminal or begin a line."""
    console.print(f"{topic + ':':<22}{printable(text, _LONGEST)}")


def _topics(report: dict[str, Any]) -> list[tuple[str, str]]:
    where = {claim["field"]: claim["where"] for claim in report["claims"]}
    scheme, scales, geometry = report["kv_scheme"], report["scales"], report["geometry"]
    declared = "nothing" if scheme is None else f"{json.dumps(scheme['raw'])} for {scheme['producer']} ({scheme['where']})"
    dtype = f"{report['model_dtype']} ({where['model_dtype']})" if report["model_dtype"] else "not declared"
    tensors = f"{scales['state']}, {scales['tensors']} tensors ({scales['where']})" if scales["tensors"] else scales["where"]
    if scales["tensors"] and scales["per_head"]:
        tensors += ", one scale for each head"
    method = report["quant_method"] or "none"
    return [
        ("model", report["directory"]),
        ("architecture", report["architecture"] or "not declared"),
        ("model dtype", dtype),
        ("quantization", f"{method}, by {report['producer']}" if report["producer"] else method),
        ("declared KV cache", declared),
        ("declared KV scales", tensors),
        ("attention", _attention(geometry)),
        ("device", f"{report['device']['name'] if report['device'] else 'unknown'} ({report['device_where']})"),
    ]


def _attention(geometry: dict[str, Any]) -> str:
    parts = [
        f"{geometry[key]} {words}"
        for key, words in (("attention_layers", "layers"), ("kv_heads", "KV heads"), ("head_size", "head size"))
        if geometry[key] is not None
    ]
    if geometry["mla"]:
        parts.append("MLA")
    if geometry["state"]:
        parts.append(f"{geometry['state']['layers']} recurrent layers beside them")
    if geometry["sliding_window"]:
        parts.append(f"{geometry['sliding_layers']} layers with a window of {geometry['sliding_window']} tokens")
    return ", ".join(parts) or "unknown"


def _predicted(report: dict[str, Any]) -> list[tuple[str, str]]:
    prediction = report["prediction"]
    if prediction is None:
        reason = f"no vLLM was found, so its version is unknown; give --engine-version (facts cover {KNOWN})"
        return [("predicted", reason)]
    asked = report["kv_cache_dtype"]
    on = f" on {report['device']['name']}" if report["device"] else ""
    lines = [
        (f"vLLM {report['engine_version']}{on}", f"--kv-cache-dtype {asked}" if asked else "no --kv-cache-dtype typed"),
        ("predicted KV cache", prediction["dtype"]),
        ("predicted scales", ScaleState(prediction["scales"]).value),
        ("because", prediction["reason"]),
    ]
    if prediction["echo"] not in (None, "auto", prediction["dtype"]) or (
        prediction["echo"] == "auto" and is_quantized(prediction["dtype"])
    ):
        lines.insert(2, ("its log will say", f"{prediction['echo']}, as will its metrics"))
    if prediction["explicit_honoured"] is False:
        lines.insert(2, ("warning", f"{asked} is not what runs"))
    return lines
