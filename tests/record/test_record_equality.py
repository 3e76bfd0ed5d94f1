from __future__ import annotations

import pytest

from kvguard.record.build import RecordInput, build_record
from kvguard.record.equality import beyond_the_cache, describe_differences
from kvguard.vocabulary import CheckResult, ScaleState
from record_samples import layer, sample

BASE = build_record(sample())


def named(other: RecordInput) -> list[str]:
    return [found.path for found in beyond_the_cache(BASE, build_record(other))]


SIXTEEN = {"dtype": "bfloat16", "scales": ScaleState.NOT_QUANTIZED}


@pytest.mark.parametrize(
    "argv",
    [
        ("--kv-cache-dtype", "auto"),
        ("--kv_cache_dtype=bfloat16", "--gpu-memory-utilization", "0.4", "--max-num-seqs=4", "--max-model-len", "2048"),
        ("--host", "0.0.0.0", "--port=9000", "--served-model-name", "x", "--api-key", "k", "--no-enable-prefix-caching"),
    ],
)
def test_cache_sizes_and_addresses_may_differ(argv: tuple[str, ...]) -> None:
    layers = [layer(number, dtype="bfloat16", blocks=364) for number in range(3)]
    assert named(sample(**SIXTEEN, layers=layers, extra_argv=argv, result=CheckResult.FAIL, size=1 << 31, tokens=46_592)) == []


def test_scales_of_a_calibration_may_differ() -> None:
    assert named(sample(**SIXTEEN).model_copy(update={"calibration": {"way": "overlay", "prompts": "sha256:1"}})) == []


@pytest.mark.parametrize(
    ("other", "path"),
    [
        (sample(version="0.31.0", **SIXTEEN), "engine.version"),
        (sample(extra_argv=("--enforce-eager",), **SIXTEEN), "argv.--enforce-eager"),
        (sample(extra_argv=("--tensor-parallel-size", "2"), **SIXTEEN), "argv.--tensor-parallel-size"),
        (sample(extra_argv=("-O3",), **SIXTEEN), "argv.-O3"),
        (sample(layers=[layer(0)]), "layers"),
        (sample().model_copy(update={"ranks": 2}), "ranks"),
        (sample().model_copy(update={"connectors": ("LMCache",)}), "connectors"),
        (sample().model_copy(update={"subjects": sample().subjects[1:]}), "subject.config.json"),
    ],
)
def test_everything_else_is_named(other: RecordInput, path: str) -> None:
    assert named(other) == [path]


def test_in_words() -> None:
    other = build_record(sample(extra_argv=("--a", "1", "--b", "2", "--c", "3", "--d", "4", "--e", "5" * 80)))
    found = beyond_the_cache(BASE, other)
    text = describe_differences(found)
    assert text.startswith("argv.--a (nothing, there 1); argv.--b (nothing, there 2)")
    assert text.endswith("; and 1 more")
    assert len(describe_differences(found[4:])) < 100
