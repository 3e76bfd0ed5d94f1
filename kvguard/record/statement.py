"""The shape of a run record: an in-toto Statement v1 whose predicate has SCAI-style attributes."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from kvguard.canonical import canonical_json
from kvguard.record.measured import EFFECTIVE_SIZES, Measured, merge_claims, merge_layers
from kvguard.vocabulary import Check, Claim, Effective, Frozen, Json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:kvguard:run-record:v1"

Verdict = Literal["serve", "refuse", "hold", "warn"]
StageName = Literal["requested", "declared", "predicted", "observed"]
AttributeName = Literal[StageName, "effective", "checks"]
STAGES: tuple[StageName, ...] = ("requested", "declared", "predicted", "observed")

_SHA256 = r"^[0-9a-f]{64}$"
_PREFIXED_SHA256 = r"^sha256:[0-9a-f]{64}$"
_CLAIMS = TypeAdapter(tuple[Claim, ...])
_CHECKS = TypeAdapter(tuple[Check, ...])
_VALUES: dict[str, TypeAdapter[Any]] = {"effective": TypeAdapter(Effective), "checks": _CHECKS}


class _Shape(BaseModel):
    """Frozen; members that a later version adds are kept and not judged."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Digest(_Shape):
    """64 hex digits."""

    sha256: str = Field(pattern=_SHA256)


class Resource(_Shape):
    """An in-toto ResourceDescriptor: what a digest is of."""

    name: str
    digest: Digest
    annotations: dict[str, str] = {}


class Attribute(_Shape):
    """One account of the cache, with the digest of the evidence it rests on.

    `value` is a list of claims for the four stages, the effective cache, or the list of checks.
    """

    attribute: AttributeName
    value: Any
    evidence: Resource | None = None

    @model_validator(mode="after")
    def _value_is_what_the_attribute_holds(self) -> Self:
        try:
            _VALUES.get(self.attribute, _CLAIMS).validate_python(self.value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in ("value", *first["loc"]))
            raise ValueError(f"{self.attribute}: {place}: {first['msg']}") from None
        return self


class Change(Frozen):
    """One change of the plan to the command, and why."""

    what: str
    why: str


class Plan(_Shape):
    """What was made of the command before the engine started. `argv` has no secrets, addresses or directories."""

    changes: tuple[Change, ...] = ()
    argv: tuple[str, ...] = ()
    refusal: str | None = None


class Predicate(_Shape):
    """What was established.

    `undigested` holds what no two starts share: times, paths, process ids, raw lines, and in `measured` (see
    `record.measured`) the sizes of the cache, which `Statement` puts back where they belong.
    """

    kvguard_version: str
    engine: dict[str, Any]
    attributes: tuple[Attribute, ...]
    policy: dict[str, Any] | None
    policy_digest: str | None
    plan: Plan
    verdict: Verdict
    layers: tuple[dict[str, Any], ...]
    expected_ranks: int | None
    ranks: int | None
    connectors: tuple[Json, ...]
    calibration: dict[str, Any] | None = None
    drift: tuple[dict[str, Any], ...] = ()
    scales_digest: str | None = Field(pattern=_PREFIXED_SHA256)
    content_digest: str = Field(pattern=_PREFIXED_SHA256)
    undigested: dict[str, Any]

    @model_validator(mode="after")
    def _measured_holds_sizes(self) -> Self:
        try:
            Measured.model_validate(self.measured)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in ("undigested", "measured", *first["loc"]))
            raise ValueError(f"{place}: {first['msg']}") from None
        canonical_json(self.measured)
        return self

    @property
    def measured(self) -> Any:
        """The sizes as the JSON holds them."""
        return self.undigested.get("measured", {})


class Statement(_Shape):
    """The whole record, as read: typed access to what the JSON holds."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[Resource, ...]
    predicate_type: Literal["urn:kvguard:run-record:v1"] = Field(alias="predicateType")
    predicate: Predicate

    @model_validator(mode="after")
    def _every_attribute_stands_once(self) -> Self:
        names = [attribute.attribute for attribute in self.predicate.attributes]
        if sorted(names) != sorted({*STAGES, "effective", "checks"}):
            raise ValueError("predicate.attributes must be requested, declared, predicted, observed, effective and checks")
        return self

    def claims(self, stage: StageName) -> tuple[Claim, ...]:
        """The claims of one stage."""
        return _CLAIMS.validate_python(self.value(stage))

    @property
    def effective(self) -> Effective:
        """What the strongest evidence supports, with the sizes that were measured."""
        return Effective.model_validate(self.value("effective"))

    @property
    def checks(self) -> tuple[Check, ...]:
        """Policy against evidence."""
        return _CHECKS.validate_python(self.value("checks"))

    def value(self, attribute: AttributeName) -> Any:
        """An attribute's value as JSON, with the sizes that were measured."""
        value = next(item.value for item in self.predicate.attributes if item.attribute == attribute)
        measured = self.predicate.measured
        if attribute == "observed":
            return merge_claims(value, measured.get("observed", ()))
        if attribute == "effective":
            support = merge_claims(value.get("supported_by", ()), measured.get("supported_by", ()))
            sizes = {name: size for name, size in measured.get("effective", {}).items() if name in EFFECTIVE_SIZES}
            return {**value, **sizes, "supported_by": support}
        return value

    @property
    def layers(self) -> list[dict[str, Any]]:
        """What the tensors showed for each rank and layer, with their shapes."""
        return merge_layers(self.predicate.layers, self.predicate.measured.get("layers", ()))

    def without_measured(self) -> Self:
        """This record without the sizes that were measured: all that two equal starts share."""
        undigested = {name: value for name, value in self.predicate.undigested.items() if name != "measured"}
        return self.model_copy(update={"predicate": self.predicate.model_copy(update={"undigested": undigested})})
