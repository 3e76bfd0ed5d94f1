"""The arithmetic of docs/geometry.md on a real engine: tokens in 1 GiB, and from those back to the dtype of each layer."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from guarded import Guarded
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.models import Declared
from kvguard.cli.inspect_sizes import Load, sizes
from kvguard.engine.checkpoint_files import read_checkpoint
from kvguard.evidence.cache_size import measure
from kvguard.evidence.capacity import CapacityReading
from kvguard.evidence.metrics import claims, parse_metrics
from kvguard.vocabulary import Confidence, width_bits

GIB = 1 << 30
LENGTH, BATCH, BLOCK = 16_384, 256, 128
SIXTEEN, FP8 = "bfloat16", "fp8_e4m3"
KINDS = {
    "grouped heads": ("llama", {}),
    "one head": ("llama", {"num_key_value_heads": 1}),
    "windows in every other layer": ("gemma2", {"sliding_window": 4096}),
    "windows in every layer": ("mistral", {"sliding_window": 4096}),
}


@pytest.fixture
def served(engine_bin: Path, engine_python: Path, model: Path, tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    """Starts kvguard on a checkpoint with random weights, made here."""
    started: list[Guarded] = []

    def start(kind: str, dtype: str, *flags: str) -> Guarded:
        family, own = KINDS[kind]
        maker, out = Path(__file__).with_name("make_tiny.py"), tmp_path / family
        command = [str(engine_python), str(maker), family, str(model), str(out)]
        values = json.dumps({**own, "max_position_embeddings": LENGTH})
        subprocess.run([*command, values], check=True, capture_output=True, timeout=300)
        more = ("--max-model-len", str(LENGTH), "--max-num-batched-tokens", str(BATCH))
        one = Guarded(tmp_path, out, "--kv-cache-dtype", dtype, *more, *flags, vllm=str(engine_bin))
        started.append(one)
        return one.wait_ready()

    yield start
    for one in started:
        one.close()


def declared_of(served: Guarded) -> Declared:
    return declare(read_checkpoint(served.model))


def from_outside(served: Guarded) -> CapacityReading:
    """What the engine's own page proves, without a look inside."""
    page = claims(parse_metrics(served.api("/metrics").text))
    return measure(tensors=None, metrics_claims=page, log_claims=(), geometry=declared_of(served).geometry, ranks=1)


def case(kind: str, dtype: str, *, long: bool = False) -> object:
    return pytest.param(kind, dtype, id=f"{kind}, {dtype}", marks=[pytest.mark.long] if long else [])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        case("grouped heads", FP8),
        case("one head", SIXTEEN),
        case("windows in every other layer", FP8),
        case("grouped heads", SIXTEEN, long=True),
        case("one head", FP8, long=True),
        case("windows in every other layer", SIXTEEN, long=True),
        case("windows in every layer", SIXTEEN, long=True),
        case("windows in every layer", FP8, long=True),
    ],
)
def test_what_inspect_predicts_is_what_the_engine_has(served: Callable[..., Guarded], kind: str, dtype: str) -> None:
    one = served(kind, dtype)
    effective = one.effective()
    assert (effective.dtype, effective.confidence, effective.contradictions) == (dtype, Confidence.PROVEN, ())
    # Beside a window an engine keeps the tokens of a step, and a block, because a window may begin inside one.
    load = Load(memory=GIB, context=LENGTH, in_flight=BATCH + BLOCK)
    predicted = next(size for size in sizes(declared_of(one), "0.32.0", load) if size["dtype"] == dtype)
    # The engine's tokens are those of sequences as long as it takes them.
    tokens = GIB / predicted["sequence_bytes"] * LENGTH
    assert effective.kv_bytes == pytest.approx(GIB, rel=0.01)
    assert effective.kv_tokens == pytest.approx(tokens, rel=0.01)
    assert effective.bytes_per_token == pytest.approx(predicted["sequence_bytes"] / LENGTH, rel=0.01)
    reading = from_outside(one)
    assert (reading.width, dtype in reading.candidates) == (width_bits(dtype), True), reading.reason
    if "window" not in kind:
        assert effective.bytes_per_token == pytest.approx(predicted["bytes_per_token"], rel=0.01)
        assert effective.kv_tokens == pytest.approx(predicted["tokens"], rel=0.01)
    assert one.stop() == 0


@pytest.mark.long
def test_layers_kept_at_16_bit_are_told_from_the_size(served: Callable[..., Guarded]) -> None:
    one = served("grouped heads", FP8, "--kv-cache-dtype-skip-layers", "0", "3")
    assert one.effective().sixteen_bit_layers == ("0", "3")
    reading = from_outside(one)
    assert reading.width == 8, reading.reason
    assert reading.sixteen_bit_layers(FP8) == ((0, 3),)
    assert one.stop() == 0


@pytest.mark.long
def test_windowed_layers_kept_at_16_bit_cannot_be_told(served: Callable[..., Guarded]) -> None:
    one = served("windows in every other layer", FP8, "--kv-cache-dtype-skip-layers", "sliding_window")
    assert one.effective().sixteen_bit_layers == ("0", "2")
    reading = from_outside(one)
    assert (reading.width, reading.fits) == (None, ()), reading.reason
    assert one.stop() == 0
