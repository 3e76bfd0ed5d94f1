"""All evidence put together: what is effective, how sure that is, and what contradicts it."""

from __future__ import annotations

from typing import Any

import pytest
from replies import NONCE, document, layer, ranks, reply, unit, wide

from kvguard.checkpoint.models import Declared, DeclaredScales, Geometry
from kvguard.evidence.capacity import CapacityReading, capacity
from kvguard.evidence.layouts import Layout
from kvguard.evidence.reconcile import reconcile
from kvguard.evidence.tensors import TensorReading, parse_replies
from kvguard.vocabulary import Claim, Confidence, Effective, ScaleState, Source, Stage

K, V = (0.05000000074505806,), (0.019999999552965164,)
SIZES = {"bfloat16": 23040.0, "float16": 23040.0, "fp8_e4m3": 11520.0, "fp8_e5m2": 11520.0}


def declared(
    state: ScaleState = ScaleState.CHECKPOINT,
    k: dict[int, tuple[float, ...]] | None = None,
    v: dict[int, tuple[float, ...]] | None = None,
    missing: tuple[str, ...] = (),
) -> Declared:
    scales = DeclaredScales(state=state, k=k or {}, v=v or {}, missing_layers=missing)
    return Declared(directory="/m", model_dtype="bfloat16", geometry=Geometry(), scales=scales)


def both(count: int) -> Declared:
    return declared(k=dict.fromkeys(range(count), K), v=dict.fromkeys(range(count), V))


def tensors(layers: list[dict[str, Any]], **changes: Any) -> TensorReading:
    return parse_replies(document(reply(layers, **changes)), NONCE)


def echo(value: str | None, source: Source = Source.METRICS, field: str = "kv_cache_dtype") -> Claim:
    return Claim(stage=Stage.OBSERVED, source=source, field=field, value=value, where=f"{source} somewhere")


def width(bits: int) -> CapacityReading:
    return capacity(
        1024**3, {16: 46592, 8: 93184}[bits], [Layout(dtype=name, bytes_per_token=size) for name, size in SIZES.items()]
    )


def run(**changes: Any) -> Effective:
    base: dict[str, Any] = {
        "tensors": None,
        "capacity": None,
        "metrics_claims": (),
        "log_claims": (),
        "declared": None,
        "predicted_dtype": None,
        "predicted_scales": None,
        "calculated": False,
        "allowed_sixteen_bit": (),
    }
    return reconcile(**{**base, **changes})


def test_nothing_known_is_unknown() -> None:
    assert run() == Effective(scales_detail="the scales were not read: that needs kvguard's reader in the engine")


class TestDtype:
    def test_tensors_prove_it(self) -> None:
        found = run(tensors=tensors([layer(0), layer(1)]), declared=both(2))
        assert (found.dtype, found.confidence) == ("fp8_e4m3", Confidence.PROVEN)
        assert found.attention_backends == ("CPU_ATTN",)
        assert (found.kv_bytes, found.kv_tokens) == (1073741824, 93184)
        assert found.bytes_per_token == pytest.approx(11522.8, abs=1)
        assert len(found.supported_by) == 3
        assert found.contradictions == ()

    def test_a_missing_rank_proves_nothing(self) -> None:
        reading = parse_replies(document(reply([layer(0)]), expected=2), NONCE)
        found = run(tensors=reading, capacity=width(8), predicted_dtype="fp8_e4m3")
        assert (found.dtype, found.confidence) == ("fp8_e4m3", Confidence.CORROBORATED)
        assert found.scales is ScaleState.UNKNOWN
        assert "1 of 2 ranks answered" in found.scales_detail

    def test_ranks_that_disagree_do_not_prove_it(self) -> None:
        first, second = ranks(2, [layer(0)])
        second["layers"] = [layer(0, backend="OTHER")]
        found = run(tensors=parse_replies(document(first, second, expected=2), NONCE))
        assert found.confidence is Confidence.CORROBORATED
        assert "backend CPU_ATTN on rank 0, OTHER on rank 1" in found.contradictions[0]

    @pytest.mark.parametrize("said", ["fp8", "fp8_e4m3"])
    def test_capacity_and_an_echo_name_it(self, said: str) -> None:
        found = run(capacity=width(8), log_claims=(echo(said, Source.LOG),))
        assert (found.dtype, found.confidence) == ("fp8_e4m3", Confidence.CORROBORATED)
        assert [claim.source for claim in found.supported_by] == [Source.CAPACITY, Source.LOG]

    def test_capacity_and_the_prediction_name_it(self) -> None:
        found = run(capacity=width(8), metrics_claims=(echo(None),), predicted_dtype="fp8_e4m3")
        assert (found.dtype, found.confidence) == ("fp8_e4m3", Confidence.CORROBORATED)
        assert [claim.source for claim in found.supported_by] == [Source.CAPACITY, Source.FACTS]

    @pytest.mark.parametrize("predicted", [None, "unknown", "auto", "bfloat16"])
    def test_capacity_alone_is_a_width(self, predicted: str | None) -> None:
        found = run(capacity=width(8), metrics_claims=(echo(None),), predicted_dtype=predicted)
        assert (found.dtype, found.confidence) == ("8-bit", Confidence.CORROBORATED)
        assert bool(found.contradictions) == (predicted == "bfloat16")

    def test_width_wins_over_a_wrong_echo(self) -> None:
        found = run(capacity=width(8), metrics_claims=(echo("bfloat16"),), predicted_dtype="fp8_e4m3")
        assert (found.dtype, found.confidence) == ("fp8_e4m3", Confidence.CORROBORATED)
        assert found.contradictions == ("metrics somewhere says bfloat16, the cache is fp8_e4m3",)

    def test_echoes_of_one_width_that_differ_leave_the_width(self) -> None:
        echoes = (echo("fp8_e4m3"), echo("fp8_e5m2", Source.LOG))
        found = run(capacity=width(8), metrics_claims=echoes)
        assert found.dtype == "8-bit"
        assert found.contradictions[0] == "the engine's own echoes name fp8_e4m3, fp8_e5m2"

    def test_sixteen_bit_takes_the_models_name(self) -> None:
        assert run(capacity=width(16), declared=both(0)).dtype == "bfloat16"
        assert run(capacity=width(16), log_claims=(echo("float16", Source.LOG, "model_dtype"),)).dtype == "float16"
        assert run(capacity=width(16)).dtype == "16-bit"

    def test_an_explicit_echo_alone_is_echoed(self) -> None:
        found = run(log_claims=(echo("8-bit", Source.LOG),), metrics_claims=(echo("fp8_e4m3"),))
        assert (found.dtype, found.confidence) == ("fp8_e4m3", Confidence.ECHOED)

    def test_the_old_log_line_is_a_width(self) -> None:
        found = run(log_claims=(echo("8-bit", Source.LOG),))
        assert (found.dtype, found.confidence) == ("8-bit", Confidence.ECHOED)

    def test_auto_is_never_an_answer(self) -> None:
        found = run(log_claims=(echo(None, Source.LOG),), metrics_claims=(echo(None),), predicted_dtype="bfloat16")
        assert (found.dtype, found.confidence) == ("unknown", Confidence.UNKNOWN)

    def test_what_was_asked_for_is_no_echo(self) -> None:
        asked = echo("fp8_e4m3", Source.LOG).model_copy(update={"stage": Stage.REQUESTED})
        assert run(log_claims=(asked,)).dtype == "unknown"

    def test_echoes_of_two_widths_are_nothing(self) -> None:
        found = run(log_claims=(echo("bfloat16", Source.LOG),), metrics_claims=(echo("fp8_e4m3"),))
        assert (found.dtype, found.confidence) == ("unknown", Confidence.UNKNOWN)
        assert found.contradictions == ("the engine's own echoes name bfloat16, fp8_e4m3",)

    def test_a_wrong_prediction_is_said(self) -> None:
        found = run(tensors=tensors([wide(0)]), predicted_dtype="fp8_e4m3")
        assert found.contradictions == ("fp8_e4m3 is predicted, the cache is bfloat16",)


class TestMixedLayers:
    def test_layers_that_may_stay_wide(self) -> None:
        found = run(tensors=tensors([wide(0), layer(1), layer(10, sliding_window=512)]), allowed_sixteen_bit=("0",))
        assert (found.dtype, found.sixteen_bit_layers) == ("fp8_e4m3", ("0",))

    def test_windows_by_name(self) -> None:
        layers = [wide(2, sliding_window=512), wide(10, sliding_window=512), layer(1)]
        found = run(tensors=tensors(layers), allowed_sixteen_bit=("sliding_window",))
        assert (found.dtype, found.sixteen_bit_layers) == ("fp8_e4m3", ("2", "10"))

    def test_others_are_mixed(self) -> None:
        found = run(tensors=tensors([wide(0), wide(3), layer(1)]), declared=both(2), allowed_sixteen_bit=("0",))
        assert (found.dtype, found.confidence) == ("mixed", Confidence.PROVEN)
        assert found.sixteen_bit_layers == ("0", "3")
        assert found.scales is ScaleState.CHECKPOINT

    def test_two_formats_are_mixed(self) -> None:
        found = run(tensors=tensors([layer(0), layer(1, kv_cache_dtype="fp8_e5m2")]))
        assert (found.dtype, found.sixteen_bit_layers) == ("mixed", ())


class TestScales:
    def states(self, layers: list[dict[str, Any]], files: Declared | None, **changes: Any) -> tuple[ScaleState, str]:
        found = run(tensors=tensors(layers), declared=files, **changes)
        return found.scales, found.scales_detail

    def test_sixteen_bit_has_none_whatever_the_attributes_hold(self) -> None:
        found = run(tensors=tensors([wide(0, k_scale=[0.08], k_scale_float="NaN")]), declared=both(1))
        assert (found.scales, found.scales_confidence) == (ScaleState.NOT_QUANTIZED, Confidence.PROVEN)

    def test_equal_to_the_files(self) -> None:
        found = run(tensors=tensors([layer(0), layer(1)]), declared=both(2))
        assert (found.scales, found.scales_confidence) == (ScaleState.CHECKPOINT, Confidence.PROVEN)

    def test_a_float32_rounding_is_equal(self) -> None:
        files = declared(k={0: (0.05,)}, v={0: (0.02,)})
        assert self.states([layer(0)], files)[0] is ScaleState.CHECKPOINT

    def test_one_in_the_files(self) -> None:
        files = declared(ScaleState.UNIT_DECLARED, {0: (1.0,)}, {0: (1.0,)})
        assert self.states([unit(0)], files)[0] is ScaleState.UNIT_DECLARED

    def test_none_in_the_files(self) -> None:
        assert self.states([unit(0)], declared(ScaleState.UNIT_DEFAULT))[0] is ScaleState.UNIT_DEFAULT

    def test_in_the_files_but_not_loaded(self) -> None:
        assert self.states([unit(0), unit(1)], both(2)) == (
            ScaleState.UNIT_DEFAULT,
            "the checkpoint has scales, the engine did not load them",
        )

    def test_partial(self) -> None:
        files = declared(ScaleState.PARTIAL, {0: K}, {0: V}, missing=("model.layers.1 (k, v)",))
        state, detail = self.states([layer(0), unit(1)], files)
        assert state is ScaleState.PARTIAL
        assert detail == "layers 1 run at 1.0 by default; missing in the files: model.layers.1 (k, v)"

    def test_one_side_missing_is_partial(self) -> None:
        files = declared(ScaleState.PARTIAL, {0: K, 1: K}, {0: V})
        state, _ = self.states([layer(0), layer(1, v_scale=[1.0], v_scale_float=1.0)], files)
        assert state is ScaleState.PARTIAL

    def test_calculated(self) -> None:
        assert self.states([layer(0)], declared(ScaleState.UNIT_DEFAULT), calculated=True)[0] is ScaleState.RUNTIME_ONCE
        assert self.states([layer(0)], None, calculated=True)[0] is ScaleState.RUNTIME_ONCE

    def test_not_calculated_yet(self) -> None:
        state, detail = self.states([unit(0)], declared(ScaleState.UNIT_DEFAULT), calculated=True)
        assert (state, detail) == (ScaleState.UNIT_DEFAULT, "no forward pass has calculated scales yet")

    def test_calculated_in_part(self) -> None:
        files = declared(ScaleState.UNIT_DEFAULT)
        assert self.states([layer(0), unit(1)], files, calculated=True)[0] is ScaleState.PARTIAL

    def test_neither_the_files_nor_one(self) -> None:
        state, detail = self.states([layer(0, k_scale=[0.07], k_scale_float=0.07)], both(1))
        assert (state, detail) == (ScaleState.UNKNOWN, "layers 0: values neither the files' nor 1.0")

    def test_without_files_the_origin_is_unknown(self) -> None:
        assert self.states([unit(0)], None)[0] is ScaleState.UNKNOWN
        assert self.states([layer(0)], None)[0] is ScaleState.UNKNOWN

    def test_no_scale_in_the_engine(self) -> None:
        assert self.states([layer(0, k_scale=None, k_scale_float=None)], both(1))[0] is ScaleState.UNKNOWN

    def test_invalid_needs_no_complete_answer(self) -> None:
        reading = parse_replies(document(reply([layer(0, k_scale=["NaN"])]), expected=2), NONCE)
        found = run(tensors=reading, declared=both(1))
        assert found.scales is ScaleState.INVALID
        assert found.scales_detail.startswith("rank 0 layer model.layers.0.self_attn.attn: k_scale is nan")

    def test_waking_from_sleep_leaves_two_copies(self) -> None:
        assert self.states([layer(0, k_scale=[1.0], v_scale=[1.0])], both(1))[0] is ScaleState.INVALID

    def test_dynamic_formats(self) -> None:
        layers = [unit(0, kv_cache_dtype="fp8_per_token_head")]
        assert self.states(layers, both(1))[0] is ScaleState.RUNTIME_DYNAMIC

    def test_heads_are_split_over_ranks(self) -> None:
        files = declared(k={0: (0.1, 0.2, 0.3, 0.4)}, v={0: (0.5,)})
        first, second = ranks(2, [])
        for found, values in ((first, [0.1, 0.2]), (second, [0.3, 0.4])):
            found["layers"] = [layer(0, k_scale=values, k_scale_float=max(values), v_scale=[0.5, 0.5], v_scale_float=0.5)]
        reading = parse_replies(document(first, second, expected=2), NONCE)
        assert run(tensors=reading, declared=files).scales is ScaleState.CHECKPOINT

    def test_a_loader_that_keeps_scales_in_bfloat16(self) -> None:
        """0.05 and 0.02 as bfloat16; anything farther off is neither the files' nor 1.0."""
        rounded = {"k_scale": [0.05004882812500], "v_scale": [0.02001953125]}
        floats = {"k_scale_float": 0.05004882812500, "v_scale_float": 0.02001953125}
        state, detail = self.states([layer(0, **rounded, **floats)], both(1))
        assert state is ScaleState.CHECKPOINT
        assert detail == "equal to the checkpoint's scale tensors to within 2^-8: the loader keeps them in bfloat16"
        assert self.states([layer(0)], both(1))[1] == "equal to the checkpoint's scale tensors"
        other = {"k_scale": [0.0502], "k_scale_float": 0.0502}
        assert self.states([layer(0, **other)], both(1))[0] is ScaleState.UNKNOWN

    def test_scales_that_only_bfloat16_makes_one_are_not_called_exact(self) -> None:
        files = declared(k={0: (1.001,)}, v={0: (1.0,)})
        state, detail = self.states([unit(0)], files)
        assert state is ScaleState.UNIT_DECLARED
        assert detail == "1.0, the checkpoint's scales to within 2^-8: the loader keeps them in bfloat16"

    def test_rocm_doubles_loaded_scales(self) -> None:
        files = declared(k={0: (0.025,)}, v={0: (0.01,)})
        assert self.states([layer(0, backend="ROCM_ATTN")], files)[0] is ScaleState.CHECKPOINT
        assert self.states([layer(0)], files)[0] is ScaleState.UNKNOWN

    def test_not_read_is_unknown(self) -> None:
        found = run(capacity=width(8), declared=both(1))
        assert (found.scales, found.scales_confidence) == (ScaleState.UNKNOWN, Confidence.UNKNOWN)
        found = run(capacity=width(16), declared=both(1))
        assert (found.scales, found.scales_confidence) == (ScaleState.NOT_QUANTIZED, Confidence.CORROBORATED)

    def test_a_prediction_that_did_not_come_true(self) -> None:
        found = run(tensors=tensors([unit(0)]), declared=both(1), predicted_scales=ScaleState.CHECKPOINT)
        assert "scales checkpoint are predicted, the engine has unit_default" in found.contradictions[0]
