"""Calibrating an engine that computes its scales from its first batch: send that batch, read the scales, see them stay."""

from __future__ import annotations

import secrets

from pydantic import Field

from kvguard.checkpoint.models import Declared
from kvguard.engine.client import EngineClient
from kvguard.evidence.tensors import SCALE_TOLERANCE, TensorReading
from kvguard.reference.calibrate import send_one_batch
from kvguard.reference.prompts import PromptSet
from kvguard.vocabulary import Check, CheckResult, Frozen, KvguardError

CALIBRATION = "calibration"
"""The name of the calibration's check."""

_FALLBACK = 2048

ScalePairs = dict[str, tuple[tuple[float, ...], tuple[float, ...]]]


class FirstBatch(Frozen):
    """The scales right after the first batch of `tokens`, by rank and layer; or why there are none."""

    tokens: int = 0
    scales: ScalePairs = Field(default_factory=dict)
    problem: str = ""


async def calibrate_by_first_batch(
    client: EngineClient, secret: str, model: str, prompts: PromptSet, declared: Declared
) -> FirstBatch:
    """Send the prompt set as the engine's first request. Never raises for an engine that does not answer."""
    before = await client.evidence(secret, secrets.token_hex(8))
    if before.reading is None or not before.reading.replies:
        return FirstBatch(problem=f"the workers could not be asked for their batch size: {before.problem}")
    limits = before.reading.replies[0].limits
    sizes = [limits.max_num_batched_tokens, (limits.max_model_len or 0) - 1]
    limit = min((size for size in sizes if size is not None and size > 0), default=_FALLBACK)
    try:
        tokens = await send_one_batch(client, model, prompts, chat_template=declared.has_chat_template, limit=limit)
    except KvguardError as error:
        return FirstBatch(problem=str(error))
    after = await client.evidence(secret, secrets.token_hex(8))
    if after.reading is None:
        return FirstBatch(tokens=tokens, problem=f"the scales could not be read after calibration: {after.problem}")
    return FirstBatch(tokens=tokens, scales=scale_pairs(after.reading))


def scale_pairs(reading: TensorReading) -> ScalePairs:
    """Each rank's and layer's scales of keys and values."""
    return {f"{reply.who} layer {layer.name}": (layer.k_scale or (), layer.v_scale or ()) for reply, layer in reading.layers()}


def calibration_check(first: FirstBatch, now: TensorReading | None, prompts: PromptSet) -> Check:
    """Whether the scales came from the prompt set and later requests left them alone."""
    changed = []
    if now is not None and not first.problem:
        later = scale_pairs(now)
        changed = [place for place, pair in first.scales.items() if not _equal(pair, later.get(place))]
    if first.problem:
        result, found = CheckResult.FAIL, first.problem
    elif now is None or not first.scales:
        result, found = CheckResult.UNVERIFIED, "the scales were not read twice"
    elif changed:
        result, found = CheckResult.FAIL, f"a later request changed {len(changed)} scales, {changed[0]} first"
    else:
        result, found = CheckResult.PASS, f"{first.tokens} tokens of {prompts.digest[:19]}; unchanged by later requests"
    return Check(
        name=CALIBRATION,
        result=result,
        required="scales computed from kvguard's prompts, before any other request, and unchanged since",
        found=found,
        where="scale tensors in the workers",
        action="" if result is CheckResult.PASS else "see the engine's log; `kvguard calibrate` measures without the flag",
    )


def _equal(one: tuple[tuple[float, ...], ...], other: tuple[tuple[float, ...], ...] | None) -> bool:
    if other is None or [len(side) for side in one] != [len(side) for side in other]:
        return False
    pairs = [(a, b) for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return all(a == b or abs(a - b) <= SCALE_TOLERANCE * abs(a) for a, b in pairs)
