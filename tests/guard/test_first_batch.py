"""Calibration by the engine's first batch: what is sent, what is read back, and what the check says."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from checkpoint_fakes import SMOLLM2
from kvguard.engine.client import Answer, EngineClient, EvidenceAnswer
from kvguard.evidence.replies import TensorReading, parse_replies
from kvguard.evidence.scales import classify_scales
from kvguard.guard.calibrated import FirstBatch, calibrate_by_first_batch, calibration_check
from kvguard.reference.prompts import Prompt, PromptSet
from kvguard.vocabulary import CheckResult, ScaleState
from launches import declared
from worker_fakes import BLOCK_SIZE

PROMPTS = PromptSet(prompts=(Prompt(text="abc"), Prompt(text="de")), digest="sha256:" + "7" * 64, origin="test")


def layer(index: int, k: float, v: float) -> dict[str, Any]:
    pair = {"k_scale": [k], "v_scale": [v], "k_scale_float": k, "v_scale_float": v, "q_scale": [1.0], "q_scale_float": 1.0}
    shape = [8, 3, BLOCK_SIZE, 128]
    name = f"model.layers.{index}.self_attn.attn"
    return {"name": name, "class": "Attention", "kv_cache_dtype": "fp8", "tensor_dtype": "torch.uint8", "shape": shape, **pair}


def reading(*scales: tuple[float, float], **limits: int) -> TensorReading:
    layers = [layer(index, k, v) for index, (k, v) in enumerate(scales)]
    sizes = {"max_num_batched_tokens": 2048, "max_model_len": 4, **limits}
    reply = {"nonce": "n", "rank": 0, "tp_size": 1, "layers": layers, "limits": sizes}
    return parse_replies({"replies": [reply], "expected_ranks": 1}, "n")


class Engine:
    """Answers with these readings in turn."""

    def __init__(self, *readings: TensorReading | None, answer: Answer | None = None) -> None:
        self.readings = list(readings)
        self.answer = answer or Answer(200, {"choices": []})
        self.prompts: list[list[int]] = []

    async def evidence(self, secret: str, nonce: str) -> EvidenceAnswer:
        found = self.readings.pop(0)
        return EvidenceAnswer(reading=found) if found is not None else EvidenceAnswer(problem="no answer")

    async def post(self, path: str, body: dict[str, Any], deadline: float = 0) -> Answer:
        if path == "/tokenize":
            return Answer(200, {"tokens": [ord(letter) for letter in body["prompt"]]})
        self.prompts.append(body["prompt"])
        return self.answer


def first(engine: Engine) -> FirstBatch:
    client = cast(EngineClient, engine)
    return asyncio.run(calibrate_by_first_batch(client, "s", "m", PROMPTS, declared(SMOLLM2)))


BEFORE, AFTER = ((1.0, 1.0), (1.0, 1.0)), ((0.05, 0.02), (0.07, 0.03))


def test_the_prompt_fits_one_batch_and_the_scales_are_read_after_it() -> None:
    engine = Engine(reading(*BEFORE), reading(*AFTER))
    found = first(engine)
    assert engine.prompts == [[97, 100]], "one token less than the model's length, shared by the texts"
    assert (found.tokens, found.problem) == (2, "")
    assert found.scales["rank 0 layer model.layers.1.self_attn.attn"] == ((0.07,), (0.03,))
    check = calibration_check(found, reading(*AFTER), PROMPTS)
    assert check.result is CheckResult.PASS
    assert check.found == "2 tokens of sha256:777777777777; unchanged by later requests"


def test_a_later_request_that_changes_them_fails() -> None:
    found = first(Engine(reading(*BEFORE), reading(*AFTER)))
    check = calibration_check(found, reading((0.05, 0.02), (0.07, 0.031)), PROMPTS)
    assert check.result is CheckResult.FAIL
    assert check.enforced
    assert "a later request changed 1 scales, rank 0 layer model.layers.1.self_attn.attn first" in check.found


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Engine(None), "could not be asked for their batch size: no answer"),
        (Engine(reading(*BEFORE), None), "could not be read after calibration: no answer"),
        (Engine(reading(*BEFORE), answer=Answer(500, {"error": {"message": "dead"}})), "was not answered: HTTP 500: dead"),
    ],
)
def test_an_engine_that_cannot_be_calibrated_fails_the_check(engine: Engine, words: str) -> None:
    check = calibration_check(first(engine), None, PROMPTS)
    assert check.result is CheckResult.FAIL
    assert words in check.found
    assert check.action


def test_without_a_second_reading_nothing_is_verified() -> None:
    found = first(Engine(reading(*BEFORE), reading(*AFTER)))
    assert calibration_check(found, None, PROMPTS).result is CheckResult.UNVERIFIED


# --- what the states are ---


def test_scales_of_a_calibration_are_runtime_once_when_they_are_the_files() -> None:
    files = declared(
        {**SMOLLM2, "num_hidden_layers": 2, "quantization_config": {"quant_method": "compressed-tensors"}},
        {
            f"model.layers.{index}.self_attn.{side}_scale": ("F32", [1], value)
            for index in range(2)
            for side, value in (("k", b"\xcd\xcc\x4c\x3d"), ("v", b"\x0a\xd7\xa3\x3c"))
        },
    )
    equal = reading((0.05000000074505806, 0.019999999552965164), (0.05000000074505806, 0.019999999552965164))
    assert classify_scales(equal, files, False, True)[0] is ScaleState.RUNTIME_ONCE
    assert classify_scales(equal, files, False, False)[0] is ScaleState.CHECKPOINT
    off = reading((0.05000000074505806, 0.019999999552965164), (0.0500002, 0.019999999552965164))
    assert classify_scales(off, files, False, True)[0] is ScaleState.UNKNOWN, "more than 1e-6 away from the files"
    lost = reading((1.0, 1.0), (1.0, 1.0))
    assert classify_scales(lost, files, False, True)[0] is ScaleState.UNIT_DEFAULT
    broken = reading((float("nan"), 1.0), (1.0, 1.0))
    assert classify_scales(broken, files, False, True)[0] is ScaleState.INVALID
