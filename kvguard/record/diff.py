"""What differed between two starts, in one screen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvguard.canonical import canonical_json
from kvguard.record.statement import STAGES, Statement
from kvguard.vocabulary import Claim, Frozen, Json, width_bits

_MISSING = None
_PLAIN = ("verdict", "policy_digest", "scales_digest", "kvguard_version", "expected_ranks", "ranks")


class Difference(Frozen):
    """One thing that differed: where, and what each record holds there; None where a record holds nothing."""

    path: str
    a: Any
    b: Any


def diff_records(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    """What differs between two records' digested parts, most important first; empty exactly when nothing does.

    Measured sizes differ between equal starts, so they are told only where the caches' widths differ. Claims and
    layers are folded, so that a dtype that differs in 30 layers is one line, not 30. Raises pydantic's
    ValidationError for what `read_record` would not have returned.
    """
    first, second = Statement.model_validate(a), Statement.model_validate(b)
    if _width(first) == _width(second):
        first, second = first.without_measured(), second.without_measured()
    differences = tuple(_differences(first, second))
    digests = (first.predicate.content_digest, second.predicate.content_digest)
    if not differences and digests[0] != digests[1]:
        return (Difference(path="content_digest", a=digests[0], b=digests[1]),)
    return differences


def _width(statement: Statement) -> int | None:
    return width_bits(statement.effective.dtype)


def _differences(a: Statement, b: Statement) -> Iterator[Difference]:
    pa, pb = a.predicate, b.predicate
    yield from _members("effective", _effective(a), _effective(b))
    yield from _members("", {name: getattr(pa, name) for name in _PLAIN}, {name: getattr(pb, name) for name in _PLAIN})
    yield from _members("checks", _checks(a), _checks(b))
    for stage in STAGES:
        yield from _members(stage, _claims(a.claims(stage)), _claims(b.claims(stage)))
    yield from _members("engine", pa.engine, pb.engine)
    yield from _members("subject", _subjects(a), _subjects(b))
    yield from _members("argv", _options(pa.plan.argv), _options(pb.plan.argv))
    yield from _members("plan", _plan(a), _plan(b))
    yield from _members("policy", _flat(pa.policy), _flat(pb.policy))
    yield from _members("calibration", _flat(pa.calibration), _flat(pb.calibration))
    yield from _members("drift", _drifted(a), _drifted(b))
    yield from _members("connectors", {"": list(pa.connectors)}, {"": list(pb.connectors)})
    yield from _layers(a.layers, b.layers)


def _members(path: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys((*a, *b)):
        one, other = a.get(name, _MISSING), b.get(name, _MISSING)
        if canonical_json(one) != canonical_json(other):
            yield Difference(path=".".join(filter(None, (path, name))), a=one, b=other)


def _effective(statement: Statement) -> dict[str, Json]:
    """Without the claims that support it: they are compared as observed."""
    return {name: value for name, value in statement.value("effective").items() if name != "supported_by"}


def _checks(statement: Statement) -> dict[str, str]:
    """Checks by name; the words are shown with the result, since a failed check may fail for another reason."""
    told: dict[str, list[str]] = defaultdict(list)
    for check in statement.checks:
        told[check.name].append(f"{check.result.value}: required {check.required}, found {check.found}")
    return {name: "; ".join(texts) for name, texts in told.items()}


def _claims(claims: Sequence[Claim]) -> dict[str, Json]:
    """What each source says about each field, all places together: one value, or the list of different ones."""
    said: dict[str, dict[bytes, Json]] = defaultdict(dict)
    for claim in claims:
        said[f"{claim.source.value}.{claim.field}"][canonical_json(claim.value)] = claim.value
    return {name: _folded(values) for name, values in said.items()}


def _folded(values: Mapping[bytes, Json]) -> Json:
    ordered = [values[text] for text in sorted(values)]
    return ordered[0] if len(ordered) == 1 else ordered


def _subjects(statement: Statement) -> dict[str, str]:
    return {subject.name: f"sha256:{subject.digest.sha256}" for subject in statement.subject}


def _options(argv: Sequence[str]) -> dict[str, Json]:
    """A command as options and their values, so that the order of options does not matter; bare words by position."""
    options: dict[str, Json] = {}
    flag, words = "", 0
    for item in argv:
        if item.startswith("-") and len(item) > 1:
            flag, equals, value = item.partition("=")
            flag = flag.replace("_", "-")
            options[flag] = value if equals else True
        elif flag and options[flag] is True:
            options[flag] = item
        else:
            words += 1
            options[f"word {words}"] = item
    return options


def _plan(statement: Statement) -> dict[str, Json]:
    plan = statement.predicate.plan
    return {"changes": [f"{change.what}: {change.why}" for change in plan.changes], "refusal": plan.refusal}


def _drifted(statement: Statement) -> dict[str, str]:
    return {str(one.get("field")): f"{one.get('before')} before, {one.get('after')}" for one in statement.predicate.drift}


def _flat(value: Mapping[str, Any] | None, prefix: str = "") -> dict[str, Json]:
    flat: dict[str, Json] = {}
    for name, item in (value or {}).items():
        if isinstance(item, dict):
            flat.update(_flat(item, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = item
    return flat


def _layers(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Iterator[Difference]:
    """One difference for each member that differs, over all ranks and layers where it does."""
    ours, theirs = _by_place(a), _by_place(b)
    if len(ours) != len(theirs) or ours.keys() != theirs.keys():
        yield Difference(path="layers", a=_only(ours, theirs), b=_only(theirs, ours))
    both = [place for place in ours if place in theirs]
    changed: dict[str, list[tuple[Json, Json]]] = defaultdict(list)
    for place in both:
        one, other = ours[place], theirs[place]
        for member in dict.fromkeys((*one, *other)):
            pair = (one.get(member), other.get(member))
            if canonical_json(pair[0]) != canonical_json(pair[1]):
                changed[member].append(pair)
    for member, pairs in changed.items():
        one, other = (_folded({canonical_json(pair[side]): pair[side] for pair in pairs}) for side in (0, 1))
        yield Difference(path=f"layers.{member} ({len(pairs)} of {len(both)})", a=one, b=other)


def _by_place(layers: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {f"rank {layer.get('rank')} {layer.get('name')}": layer for layer in layers}


def _only(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    alone = [place for place in ours if place not in theirs]
    rest = f", only here: {', '.join(alone[:3])}{' …' if len(alone) > 3 else ''}" if alone else ""
    return f"{len(ours)} layers{rest}"
