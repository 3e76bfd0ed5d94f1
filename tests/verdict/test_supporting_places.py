"""Where a check says the effective dtype was read."""

from __future__ import annotations

import pytest

from kvguard.evidence.tensors import extent
from kvguard.policy.parse import parse_policy
from kvguard.verdict.checks import judge
from kvguard.vocabulary import Claim, Confidence, Effective, Source, Stage

POLICY = parse_policy(b"kv_cache:\n  dtype: fp8_e4m3\n", "p.yaml")


def said(source: Source, where: str, field: str = "kv_cache_dtype") -> Claim:
    return Claim(stage=Stage.OBSERVED, source=source, field=field, value="x", where=where)


def layers(ranks: int, count: int) -> tuple[Claim, ...]:
    return tuple(
        said(Source.TENSORS, f"rank {rank} layer model.layers.{number}.self_attn.attn", "layer_kv_cache")
        for rank in range(ranks)
        for number in range(count)
    )


BYTES = said(Source.TENSORS, "rank 0", "kv_memory_bytes")
CAPACITY = said(Source.CAPACITY, "capacity: 1073741824 bytes ÷ 93184 tokens")
ECHOES = tuple(said(Source.LOG, f"engine log line {number}") for number in range(1, 6))


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ((BYTES, *layers(1, 30)), "cache tensors of 30 layers on 1 rank"),
        ((BYTES, *layers(2, 1)), "cache tensors of 1 layer on 2 ranks"),
        ((CAPACITY,), "capacity: 1073741824 bytes ÷ 93184 tokens"),
        ((ECHOES[0], CAPACITY), "capacity: 1073741824 bytes ÷ 93184 tokens, engine log line 1"),
        (ECHOES[:3], "engine log line 1, engine log line 2, engine log line 3"),
        (ECHOES, "engine log line 1, engine log line 2, engine log line 3, 2 more"),
        ((), "no source gave information"),
    ],
)
def test_checks_name_their_evidence_by_extent(claims: tuple[Claim, ...], expected: str) -> None:
    effective = Effective(dtype="fp8_e4m3", confidence=Confidence.PROVEN, supported_by=claims)
    checks = judge(POLICY, effective, model_dtype="bfloat16", engine_version="0.32.0", declared=None)
    where = {check.name: check.where for check in checks}
    assert where["kv_cache_dtype"] == where["confidence"] == expected


def test_extent_counts_layers_that_pipeline_ranks_share_out() -> None:
    halves = [
        said(Source.TENSORS, f"DP 1 rank {number // 15} layer model.layers.{number}", "layer_kv_cache") for number in range(30)
    ]
    assert extent([*halves, BYTES]) == "30 layers on 2 ranks"
    assert extent([BYTES, CAPACITY]) == ""
