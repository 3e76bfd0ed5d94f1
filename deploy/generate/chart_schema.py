"""values.schema.json of the chart: types from values.yaml and its comments, the policy from kvguard's own models.

Draft 7, the newest that both Helm 3 and Helm 4 read.
"""

from __future__ import annotations

from typing import Any

from chart_values import Entry

from kvguard.policy.models import MODEL_DTYPE, POLICY_DTYPES
from kvguard.policy.schema import policy_schema
from kvguard.shadow.settings import Settings
from kvguard.vocabulary import is_quantized

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)

_NUMBERS = r"v?([0-9]+!)?[0-9]+(\.[0-9]+)*"
_SUFFIX = (
    r"([-_.]?(a|b|c|rc|alpha|beta|pre|preview)[-_.]?[0-9]*)?"
    r"([-_.]?(post|rev|r)[-_.]?[0-9]*|-[0-9]+)?"
    r"([-_.]?dev[-_.]?[0-9]*)?"
)
_LOCAL = r"(\+[a-zA-Z0-9]+([-_.][a-zA-Z0-9]+)*)?"
_ONE_RANGE = (
    rf"((==|!=)\s*({_NUMBERS}{_SUFFIX}{_LOCAL}|{_NUMBERS}\.\*)"
    rf"|(<=|>=|<|>)\s*{_NUMBERS}{_SUFFIX}"
    rf"|~=\s*v?([0-9]+!)?[0-9]+(\.[0-9]+)+{_SUFFIX}|===\s*[^\s,;)]+)"
)
VERSION_RANGE = rf"^\s*({_ONE_RANGE})?\s*(,\s*({_ONE_RANGE})?\s*)*$"
"""PEP 440 specifiers, as `packaging` reads them."""

ALERT_CHANGES = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "disabled": {"type": "boolean"},
        "for": {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"},
        "severity": {"enum": ["critical", "warning", "info"]},
        "runbookUrl": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
_QUANTITY = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"}


def chart_schema(entries: tuple[Entry, ...], alerts: tuple[str, ...]) -> dict[str, Any]:
    """The whole schema; `alerts` are the names that `rules.alerts` may change."""
    definitions, policy = _policy()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart kvguard",
        **_section(entries, extra={"global": {"type": "object"}}),
        "definitions": {
            "quantity": _QUANTITY,
            "policy": policy,
            "alerts": {
                "type": "object",
                "additionalProperties": False,
                "properties": dict.fromkeys(alerts, ALERT_CHANGES),
            },
            "shadowSettings": {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: {"type": ["string", "number", "boolean"]} for name in _setting_names()},
            },
            **definitions,
        },
    }


def _setting_names() -> list[str]:
    """Each as kvguard writes it and as YAML is often written."""
    fields = list(Settings.model_fields)
    return [name.replace("_", "-") for name in fields] + [name for name in fields if "_" in name]


def _section(entries: tuple[Entry, ...], extra: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {entry.path[-1]: _schema(entry) for entry in entries} | (extra or {}),
    }


def _schema(entry: Entry) -> dict[str, Any]:
    if entry.below:
        return {"description": entry.doc, **_section(entry.below)} if entry.doc else _section(entry.below)
    if "$ref" in entry.schema:
        return entry.schema  # whatever stands beside a reference is ignored in this draft
    kind = next(name for python, name in _TYPES if isinstance(entry.default, python))
    given = {} if {"enum", "type"} & entry.schema.keys() else {"type": kind}
    return {"description": entry.doc, **given, **entry.schema}


def _policy() -> tuple[dict[str, Any], dict[str, Any]]:
    """The models' own schema, and what `parse_policy` refuses beyond it."""
    schema = _renamed(policy_schema())
    definitions = schema.pop("$defs")
    schema.pop("$schema")
    definitions["EnginePolicy"]["properties"]["version"]["pattern"] = VERSION_RANGE
    unscaled = {"enum": [name for name in POLICY_DTYPES if name == MODEL_DTYPE or is_quantized(name) is False]}
    # A cache without scales cannot meet a demand on them (`kvguard.policy.models.contradiction`).
    schema["not"] = {
        "required": ["kv_cache"],
        "properties": {
            "kv_cache": {
                "required": ["dtype", "scales"],
                "properties": {
                    "dtype": {"anyOf": [unscaled, {"type": "array", "minItems": 1, "items": unscaled}]},
                    "scales": {"not": {"const": "any"}},
                },
            }
        },
    }
    return definitions, schema


def _renamed(value: Any) -> Any:
    """References moved from draft 2020-12's `$defs` to draft 7's `definitions`."""
    if isinstance(value, dict):
        return {
            key: item.replace("#/$defs/", "#/definitions/") if key == "$ref" else _renamed(item) for key, item in value.items()
        }
    return [_renamed(item) for item in value] if isinstance(value, list) else value
