"""`kvguard inspect`: what a checkpoint declares about its KV cache, and what a vLLM version will make of it."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.geometry import bytes_per_token
from kvguard.checkpoint.models import Declared
from kvguard.cli.sizes import parse_size
from kvguard.engine.checkpoint_files import read_checkpoint, resolve_model
from kvguard.engine.find import installed_version
from kvguard.evidence.prediction import Prediction, predict
from kvguard.facts.kv_dtypes import BYTES_DTYPES, accepted
from kvguard.facts.versions import KNOWN
from kvguard.vocabulary import ScaleState


def inspect(
    model: Annotated[str, typer.Argument(help="The model's directory, or its name in the local hub cache.")],
    engine_version: Annotated[
        str | None, typer.Option(help="Predict for this vLLM version (default: the installed one).")
    ] = None,
    memory: Annotated[str, typer.Option(help="Show how many tokens fit into this much KV memory.")] = "1GiB",
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="Predict for this --kv-cache-dtype (default: nothing typed).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a checkpoint declares about its KV cache and what vLLM will make of it. Starts nothing.

    Example: kvguard inspect ./my-model --engine-version 0.32.0 --memory 10GiB
    """
    size = parse_size(memory, "--memory")
    declared = declare(read_checkpoint(resolve_model(model, os.environ)))
    version = engine_version or installed_version()
    prediction = predict(version, kv_cache_dtype, declared) if version else None
    report = inspection(declared, version, kv_cache_dtype, prediction, size)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def inspection(
    declared: Declared, version: str | None, requested: str | None, prediction: Prediction | None, memory: int
) -> dict[str, Any]:
    """The report as JSON: declared settings with where each was read, sizes, prediction and findings.

    `memory` is bytes; token counts are plain arithmetic (an engine rounds down to whole blocks).
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
        "kv_scheme": None if declared.kv_scheme is None else declared.kv_scheme.model_dump(mode="json"),
        "scales": {
            "state": declared.scales.state.value,
            "tensors": declared.scales.tensors,
            "files": list(declared.scales.files),
            "where": declared.scales.where,
            "missing": list(declared.scales.missing_layers),
            "invalid": list(declared.scales.invalid_layers),
        },
        "geometry": geometry.model_dump(mode="json", exclude={"layer_indices", "layer_types"}),
        "memory_bytes": memory,
        "sizes": _sizes(declared, version, memory),
        "engine_version": version,
        "kv_cache_dtype": requested,
        "prediction": None if prediction is None else prediction.model_dump(mode="json", exclude={"claims"}),
        "claims": [claim.model_dump(mode="json") for claim in declared.claims],
        "findings": list(declared.findings),
    }


def _sizes(declared: Declared, version: str | None, memory: int) -> list[dict[str, Any]]:
    """Bytes per token and tokens by dtype: those this version accepts, and the model's own."""
    values = accepted(version) if version else None
    offered = None if values is None else {"fp8_e4m3" if value == "fp8" else value for value in values}
    own = declared.model_dtype or "bfloat16"
    sizes = []
    for dtype in BYTES_DTYPES:
        cost = bytes_per_token(declared.geometry, dtype)
        if cost is None or dtype == "float32" or not (offered is None or dtype in offered or dtype == own):
            continue
        sizes.append({"dtype": dtype, "bytes_per_token": cost, "tokens": int(memory // cost)})
    return sizes


def _print(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for topic, text in _topics(report):
        console.print(f"{topic + ':':<22}{text}")
    if report["sizes"]:
        table = Table("KV cache dtype", "bytes/token", f"tokens in {report['memory_bytes']:,} bytes", box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        for size in report["sizes"]:
            table.add_row(size["dtype"], f"{size['bytes_per_token']:,.0f}", f"{size['tokens']:,}")
        console.print()
        console.print(table)
    console.print()
    for topic, text in _predicted(report):
        console.print(f"{topic + ':':<22}{text}")
    for finding in report["findings"]:
        console.print(f"{'finding:':<22}{finding}")


def _topics(report: dict[str, Any]) -> list[tuple[str, str]]:
    where = {claim["field"]: claim["where"] for claim in report["claims"]}
    scheme, scales, geometry = report["kv_scheme"], report["scales"], report["geometry"]
    declared = "nothing" if scheme is None else f"{json.dumps(scheme['raw'])} for {scheme['producer']} ({scheme['where']})"
    dtype = f"{report['model_dtype']} ({where['model_dtype']})" if report["model_dtype"] else "not declared"
    tensors = f"{scales['state']}, {scales['tensors']} tensors ({scales['where']})" if scales["tensors"] else scales["where"]
    return [
        ("model", report["directory"]),
        ("architecture", report["architecture"] or "not declared"),
        ("model dtype", dtype),
        ("quantization", report["quant_method"] or "none"),
        ("declared KV cache", declared),
        ("declared KV scales", tensors),
        ("attention", _attention(geometry)),
    ]


def _attention(geometry: dict[str, Any]) -> str:
    parts = [
        f"{geometry[key]} {words}"
        for key, words in (("attention_layers", "layers"), ("kv_heads", "KV heads"), ("head_size", "head size"))
        if geometry[key] is not None
    ]
    if geometry["mla"]:
        parts.append("MLA")
    if geometry["sliding_window"]:
        parts.append(f"{geometry['sliding_layers']} layers with a window of {geometry['sliding_window']} tokens")
    return ", ".join(parts) or "unknown"


def _predicted(report: dict[str, Any]) -> list[tuple[str, str]]:
    prediction = report["prediction"]
    if prediction is None:
        reason = f"no vLLM was found, so its version is unknown; give --engine-version (facts cover {KNOWN})"
        return [("predicted", reason)]
    asked = report["kv_cache_dtype"]
    lines = [
        (f"vLLM {report['engine_version']}", f"--kv-cache-dtype {asked}" if asked else "no --kv-cache-dtype typed"),
        ("predicted KV cache", prediction["dtype"]),
        ("predicted scales", ScaleState(prediction["scales"]).value),
        ("because", prediction["reason"]),
    ]
    if prediction["explicit_honoured"] is False:
        lines.insert(2, ("warning", f"{asked} is not what runs"))
    return lines
