"""From everything established about one start to its run record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from kvguard.canonical import canonical_json, sha256_of
from kvguard.record.digest import content_digest, scales_digest
from kvguard.record.normalize import (
    Cleaner,
    exact_float,
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
    external stores, whose contents were written with somebody's scales. `undigested` is for what differs from
    start to start: timings, raw log lines, process ids, paths, ports, `started_at`.
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
    undigested: dict[str, Any] = Field(default_factory=dict)


def build_record(given: RecordInput, secrets: Sequence[str] = ()) -> dict[str, Any]:
    """The run record: an in-toto Statement v1, as JSON data.

    The digested part is normalized (see `record.normalize`), so equal starts have equal `content_digest`s; the
    command as it was, without secrets, goes to `undigested.argv`. `secrets` are masked wherever they stand.
    """

    def redacted(text: str) -> str:
        return valid_text(redact_text(text, secrets))

    def clean(text: str) -> str:
        return normalize_text(redacted(text))

    argv = [redacted(item) for item in redact_argv(given.plan.argv)]
    layers = normalize_layers(given.layers, clean)
    has_scales = given.effective.scales is not ScaleState.NOT_QUANTIZED
    statement: dict[str, Any] = {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(given.subjects, clean),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "kvguard_version": given.kvguard_version,
            "engine": normalize_json(given.engine, clean),
            "attributes": _attributes(given, clean),
            "policy": None if given.policy is None else jsonable(given.policy, valid_text, exact_float),
            "policy_digest": given.policy_digest,
            "plan": {
                "changes": normalize_json(given.plan.changes, clean),
                "argv": normalize_argv(argv),
                "refusal": None if given.plan.refusal is None else clean(given.plan.refusal),
            },
            "verdict": given.verdict,
            "layers": layers,
            "expected_ranks": given.expected_ranks,
            "ranks": given.ranks,
            "connectors": normalize_json(given.connectors, clean),
            "scales_digest": scales_digest(layers) if has_scales else None,
        },
    }
    statement["predicate"]["content_digest"] = content_digest(statement)
    statement["predicate"]["undigested"] = jsonable({**given.undigested, "argv": argv}, redacted, exact_float)
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


def _attributes(given: RecordInput, clean: Cleaner) -> list[dict[str, Json]]:
    """One for each account. A stage's evidence is its claims, so its digest can be checked without the rest."""
    attributes: list[dict[str, Json]] = []
    for stage in STAGES:
        claims = normalize_claims(getattr(given, stage), clean)
        evidence = {"name": f"{stage} claims", "digest": {"sha256": sha256_of(claims).removeprefix("sha256:")}}
        attributes.append({"attribute": stage, "value": claims, "evidence": evidence})
    attributes.append({"attribute": "effective", "value": normalize_effective(given.effective, clean)})
    attributes.append({"attribute": "checks", "value": normalize_checks(given.checks, clean)})
    return attributes
