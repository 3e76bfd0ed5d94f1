"""From everything established about one start to its run record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from kvguard.canonical import canonical_json, sha256_of
from kvguard.record.digest import content_digest, scales_digest
from kvguard.record.measured import EFFECTIVE_SIZES, split_claims, split_layers, without_sizes
from kvguard.record.normalize import (
    Cleaner,
    exact_float,
    in_order,
    jsonable,
    normalize_argv,
    normalize_checks,
    normalize_claims,
    normalize_effective,
    normalize_json,
    normalize_layers,
    normalize_text,
    valid_text,
)
from kvguard.record.redact import redact_argv, redact_text
from kvguard.record.statement import PREDICATE_TYPE, STAGES, STATEMENT_TYPE, Plan, Verdict
from kvguard.vocabulary import Check, Claim, Effective, Frozen, Json, ScaleState


class Subject(Frozen):
    """A thing the record is about: a checkpoint file, an image. `sha256` is 64 hex digits, `sha256:` may precede."""

    name: str
    sha256: str = Field(pattern=r"^(sha256:)?[0-9a-f]{64}$")
    kind: str


class RecordInput(Frozen):
    """Everything one record is made of.

    `engine` identifies it: version, package, the interpreter's version. `layers` is what the tensors showed,
    one dict for each rank and layer (`rank`, `name`, `k_scale`, …). `connectors` names KV connectors and
    external stores, whose contents were written with somebody's scales. `calibration` says from which prompts, by which
    artefact, runtime scales came. `drift` is what differs from what was established: {field, before, after}. `undigested`
    is for what differs from start to start: timings, raw log lines, process ids, paths, ports, `started_at`.
    """

    subjects: tuple[Subject, ...] = ()
    engine: dict[str, Any]
    kvguard_version: str
    requested: tuple[Claim, ...] = ()
    declared: tuple[Claim, ...] = ()
    predicted: tuple[Claim, ...] = ()
    observed: tuple[Claim, ...] = ()
    effective: Effective
    checks: tuple[Check, ...] = ()
    policy: dict[str, Any] | None = None
    policy_digest: str | None = None
    plan: Plan = Plan()
    verdict: Verdict
    layers: tuple[dict[str, Any], ...] = ()
    expected_ranks: int | None = None
    ranks: int | None = None
    connectors: tuple[Json, ...] = ()
    calibration: dict[str, Json] | None = None
    drift: tuple[dict[str, Json], ...] = ()
    undigested: dict[str, Any] = Field(default_factory=dict)


def build_record(given: RecordInput, secrets: Sequence[str] = ()) -> dict[str, Any]:
    """The run record: an in-toto Statement v1, as JSON data.

    The digested part is normalized (see `record.normalize`), so equal starts have equal `content_digest`s; the
    command as it was, without secrets, goes to `undigested.argv`, measured sizes to `undigested.measured`.
    `secrets` are masked wherever they stand.
    """

    def redacted(text: str) -> str:
        return valid_text(redact_text(text, secrets))

    def clean(text: str) -> str:
        return normalize_text(redacted(text))

    argv = [redacted(item) for item in redact_argv(given.plan.argv)]
    layers, shapes = split_layers(normalize_layers(given.layers, clean))
    layers = in_order(layers, "rank", "name")
    attributes, sizes = _attributes(given, clean)
    has_scales = given.effective.scales is not ScaleState.NOT_QUANTIZED
    statement: dict[str, Any] = {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(given.subjects, clean),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "kvguard_version": given.kvguard_version,
            "engine": normalize_json(given.engine, clean),
            "attributes": attributes,
            "policy": None if given.policy is None else jsonable(given.policy, valid_text, exact_float),
            "policy_digest": given.policy_digest,
            "plan": {
                "changes": normalize_json(given.plan.changes, clean),
                "argv": normalize_argv(argv),
                "refusal": None if given.plan.refusal is None else without_sizes(clean(given.plan.refusal)),
            },
            "verdict": given.verdict,
            "layers": layers,
            "expected_ranks": given.expected_ranks,
            "ranks": given.ranks,
            "connectors": normalize_json(given.connectors, clean),
            "scales_digest": scales_digest(layers) if has_scales else None,
        },
    }
    if given.calibration is not None:
        statement["predicate"]["calibration"] = normalize_json(given.calibration, clean)
    if given.drift:
        statement["predicate"]["drift"] = normalize_json(given.drift, clean)
    statement["predicate"]["content_digest"] = content_digest(statement)
    statement["predicate"]["undigested"] = {
        **jsonable({**given.undigested, "argv": argv}, redacted, exact_float),
        "measured": {**sizes, "layers": shapes},
    }
    return statement


def _subjects(subjects: Sequence[Subject], clean: Cleaner) -> list[dict[str, Json]]:
    named = [
        {
            "name": clean(subject.name),
            "digest": {"sha256": subject.sha256.removeprefix("sha256:")},
            "annotations": {"kind": subject.kind},
        }
        for subject in subjects
    ]
    return sorted(named, key=canonical_json)


def _attributes(given: RecordInput, clean: Cleaner) -> tuple[list[dict[str, Json]], dict[str, Json]]:
    """One for each account, and the sizes left out of them.

    A stage's evidence is its claims, so its digest can be checked without the rest.
    """
    attributes: list[dict[str, Json]] = []
    observed: list[dict[str, Json]] = []
    for stage in STAGES:
        claims = normalize_claims(getattr(given, stage), clean)
        if stage == "observed":
            claims, observed = _split(claims)
        evidence = {"name": f"{stage} claims", "digest": {"sha256": sha256_of(claims).removeprefix("sha256:")}}
        attributes.append({"attribute": stage, "value": claims, "evidence": evidence})
    effective = normalize_effective(given.effective, clean)
    sizes = {name: effective.pop(name) for name in EFFECTIVE_SIZES}
    effective["supported_by"], supported_by = _split(effective["supported_by"])
    attributes.append({"attribute": "effective", "value": effective})
    attributes.append({"attribute": "checks", "value": normalize_checks(given.checks, clean)})
    return attributes, {"effective": sizes, "observed": observed, "supported_by": supported_by}


def _split(claims: list[dict[str, Json]]) -> tuple[list[dict[str, Json]], list[dict[str, Json]]]:
    settled, measured = split_claims(claims)
    return in_order(settled, "source", "field", "where"), measured
