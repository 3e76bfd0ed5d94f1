"""Two data-parallel engines behind one address: each is asked by itself, and every rank is accounted for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from guarded import Guarded
from kvguard.vocabulary import ExitCode


@pytest.mark.long
def test_both_engines_are_proven_and_proven_again(guarded: Callable[..., Guarded]) -> None:
    """vLLM 0.32.0 starts as many API servers as engines; a dense model's engines each think they are alone."""
    run = guarded(
        "plain",
        "--data-parallel-size",
        "2",
        policy="kv_cache: {dtype: fp8_e4m3, min_confidence: proven}",
        options=("--reverify", "2", "--settle", "0"),
    )
    run.start_limit = 600.0  # two engines load at once, beside whatever else the machine does
    run.wait_ready()
    predicate = run.record()["predicate"]
    assert (predicate["expected_ranks"], predicate["ranks"]) == (2, 2)
    assert len(predicate["layers"]) == 60
    assert {layer["rank"] for layer in predicate["layers"]} == {0, 1}
    effective = run.effective()
    assert (effective.dtype, effective.confidence) == ("fp8_e4m3", "proven")
    assert effective.kv_tokens == 93184  # of one engine
    assert "kvguard_kv_cache_capacity_tokens 186368.0" in run.management("/metrics").text
    assert "data_parallel" in run.err
    assert "Paris" in run.chat().json()["choices"][0]["message"]["content"]

    def verified() -> float:
        lines = run.management("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("kvguard_last_verified"))

    first = verified()
    run._wait(lambda: verified() > first, "verified again")
    assert "kvguard_verification_stale 0.0" in run.management("/metrics").text
    assert run.stop() == ExitCode.CLEAN
    run.assert_nothing_left()
