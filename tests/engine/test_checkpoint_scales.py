"""Calibrated scales from the checkpoint: loaded, read back from the tensors, proven equal to the file's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from guarded import Guarded
from kvguard.demo.variants import K_SCALE, V_SCALE
from kvguard.vocabulary import ExitCode

POLICY = "kv_cache: {dtype: fp8_e4m3, scales: checkpoint, min_confidence: proven}"


def test_checkpoint_scales_are_proven_with_their_values(guarded: Callable[..., Guarded]) -> None:
    served = guarded("kv_scheme_scales", "--kv-cache-dtype", "fp8", policy=POLICY).wait_ready()
    effective = served.effective()
    assert (effective.dtype, effective.confidence, effective.scales) == ("fp8_e4m3", "proven", "checkpoint")
    layers = served.record()["predicate"]["layers"]
    assert len(layers) == 30
    for layer in layers:
        assert layer["k_scale"] == [pytest.approx(K_SCALE, rel=1e-6)]
        assert layer["v_scale"] == [pytest.approx(V_SCALE, rel=1e-6)]
    assert served.record()["predicate"]["scales_digest"].startswith("sha256:")
    answer = served.chat()
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-kvguard-kv-scales"] == "checkpoint"
    first = served.record()["predicate"]["content_digest"]
    assert served.stop() == ExitCode.CLEAN
    served.assert_nothing_left()

    again = guarded("kv_scheme_scales", "--kv-cache-dtype", "fp8", policy=POLICY).wait_ready()
    assert again.record()["predicate"]["content_digest"] == first, "two equal starts have equal digests"
