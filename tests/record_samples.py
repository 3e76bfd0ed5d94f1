"""One start as a record is made of it, with everything that differs from start to start as a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvguard.record.build import RecordInput, Subject
from kvguard.record.statement import Change, Plan
from kvguard.vocabulary import Check, CheckResult, Claim, Confidence, Effective, ScaleState, Source, Stage, width_bits


def claim(stage: Stage, source: Source, field: str, value: Any, where: str, *, note: str = "") -> Claim:
    return Claim(stage=stage, source=source, field=field, value=value, where=where, note=note)


def layer(
    number: int, k_scale: float | str = 0.05, rank: int = 0, dtype: str = "fp8_e4m3", blocks: int = 728
) -> dict[str, Any]:
    return {
        "rank": rank,
        "name": f"model.layers.{number}.self_attn.attn",
        "kv_cache_dtype": dtype,
        "backend": "CPU_ATTN",
        "k_scale": [k_scale],
        "v_scale": [0.02],
        "shape": [blocks, 3, 128, 128],
    }


def sample(
    *,
    directory: str = "/data/models/trap",
    line: int = 57,
    pid: int = 4242,
    port: int = 8000,
    run: str = "/run/kvguard/a1",
    dtype: str = "fp8_e4m3",
    scales: ScaleState = ScaleState.CHECKPOINT,
    layers: Sequence[dict[str, Any]] | None = None,
    result: CheckResult = CheckResult.PASS,
    undigested: dict[str, Any] | None = None,
    version: str = "0.32.0",
    extra_argv: tuple[str, ...] = (),
    size: int = 1073741824,
    tokens: int = 93184,
) -> RecordInput:
    """`size` bytes and `tokens` are what memory profiling left for the cache."""
    capacity = claim(
        Stage.OBSERVED,
        Source.CAPACITY,
        "kv_cache_dtype",
        f"{width_bits(dtype)}-bit",
        f"capacity: {size} bytes ÷ {tokens} tokens",
        note=f"{size / tokens:,.0f} bytes per token are {width_bits(dtype)}-bit for this architecture",
    )
    memory = claim(Stage.OBSERVED, Source.TENSORS, "kv_memory_bytes", size, "rank 0", note="each storage counted once")
    support = claim(Stage.OBSERVED, Source.TENSORS, "kv_cache_dtype", dtype, "rank 0 layer model.layers.0.self_attn.attn")
    return RecordInput(
        subjects=(
            Subject(name="config.json", sha256="a" * 64, kind="checkpoint"),
            Subject(name=f"{directory}/model.safetensors", sha256="sha256:" + "b" * 64, kind="checkpoint"),
        ),
        engine={"package": "vllm", "version": version, "python": "3.11.9", "interpreter": f"{directory}/bin/python"},
        kvguard_version="0.1.0",
        requested=(
            claim(Stage.REQUESTED, Source.COMMAND_LINE, "kv_cache_dtype", None, "command line", note="not typed"),
            claim(Stage.REQUESTED, Source.COMMAND_LINE, "model", directory, "command line: MODEL"),
        ),
        declared=(
            claim(
                Stage.DECLARED,
                Source.CONFIG_JSON,
                "kv_cache_scheme",
                {"num_bits": 8, "type": "float"},
                f"{directory}/config.json: quantization_config.kv_cache_scheme",
            ),
        ),
        predicted=(claim(Stage.PREDICTED, Source.FACTS, "kv_cache_dtype", dtype, "facts for vLLM 0.32.0"),),
        observed=(
            support,
            capacity,
            memory,
            claim(
                Stage.OBSERVED,
                Source.LOG,
                "kv_cache_dtype",
                None,
                f"engine log line {line}",
                note="auto: no information",
            ),
            claim(Stage.OBSERVED, Source.LOG, "kv_tokens", tokens, f"engine log line {line + 3} (EngineCore pid={pid})"),
            claim(
                Stage.OBSERVED,
                Source.METRICS,
                "kv_tokens",
                tokens,
                f"http://127.0.0.1:{port}/metrics kv_cache_size_tokens",
            ),
        ),
        effective=Effective(
            dtype=dtype,
            confidence=Confidence.PROVEN,
            scales=scales,
            scales_confidence=Confidence.PROVEN,
            scales_detail="k 0.05, v 0.02",
            attention_backends=("CPU_ATTN",),
            kv_bytes=size,
            kv_tokens=tokens,
            bytes_per_token=size / tokens,
            supported_by=(memory, support, capacity),
            contradictions=(f"engine log line {line} says auto", f"{capacity.note}, the cache is another"),
        ),
        checks=(
            Check(
                name="dtype",
                result=result,
                required="fp8_e4m3",
                found=dtype,
                where="tensors of 30 layers",
            ),
            Check(
                name="scales",
                result=CheckResult.PASS,
                required="checkpoint",
                found="checkpoint",
                where=f"{directory}/x.json",
            ),
            Check(
                name="confidence",
                result=CheckResult.PASS,
                required="at least corroborated",
                found="proven",
                where=capacity.where,
            ),
        ),
        policy={"kv_cache": {"dtype": ["fp8_e4m3"], "scales": "checkpoint"}, "on_violation": "refuse"},
        policy_digest="sha256:" + "c" * 64,
        plan=Plan(
            changes=(Change(what=f"--uds {run}/api.sock", why="kvguard listens in its place"),),
            argv=(
                f"{directory}/bin/vllm",
                "serve",
                directory,
                "--uds",
                f"{run}/api.sock",
                f"--port={port}",
                *extra_argv,
            ),
        ),
        verdict="serve",
        layers=tuple(
            layers if layers is not None else [layer(number, dtype=dtype, blocks=tokens // 128) for number in range(3)]
        ),
        expected_ranks=1,
        ranks=1,
        undigested=undigested if undigested is not None else {"started_at": "2025-11-29T15:03:00Z", "pid": pid},
    )
