from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import pytest
import yaml

from kvguard.policy.models import POLICY_DTYPES, policy_digest
from kvguard.policy.parse import parse_policy
from kvguard.policy.schema import policy_schema
from kvguard.vocabulary import UsageError

EXAMPLES = resources.files("kvguard.policy") / "examples"


def valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """The keywords our schema uses, and an error for any that it does not."""
    for keyword, rule in schema.items():
        match keyword:
            case "$ref":
                ok = valid(value, root["$defs"][rule.removeprefix("#/$defs/")], root)
            case "anyOf":
                ok = any(valid(value, option, root) for option in rule)
            case "type":
                kinds = {"object": dict, "array": list, "string": str, "integer": int}
                ok = isinstance(value, kinds[rule]) and not isinstance(value, bool)
            case "enum":
                ok = value in rule
            case "pattern":
                ok = not isinstance(value, str) or re.search(rule, value) is not None
            case "minimum":
                ok = not isinstance(value, int) or value >= rule
            case "maximum":
                ok = not isinstance(value, int) or value <= rule
            case "maxLength":
                ok = not isinstance(value, str) or len(value) <= rule
            case "items":
                ok = not isinstance(value, list) or all(valid(item, rule, root) for item in value)
            case "properties":
                ok = all(valid(value[name], part, root) for name, part in rule.items() if name in value)
            case "additionalProperties":
                assert rule is False
                ok = set(value) <= set(schema["properties"])
            case "$schema" | "$defs" | "title" | "description" | "default":
                ok = True
            case _:
                raise AssertionError(f"keyword {keyword}")
        if not ok:
            return False
    return True


def accepts(text: str) -> bool:
    schema = policy_schema()
    return valid(yaml.safe_load(text), schema, schema)


def test_it_is_json_of_draft_2020_12_and_every_property_is_described() -> None:
    schema = json.loads(json.dumps(policy_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for part in (schema, schema["$defs"]["KVCachePolicy"], schema["$defs"]["EnginePolicy"]):
        assert part["additionalProperties"] is False
        assert "required" not in part
        assert all(field["description"] for field in part["properties"].values())
    assert schema["$defs"]["KVCachePolicy"]["properties"]["dtype"]["anyOf"][0]["enum"] == list(POLICY_DTYPES)


@pytest.mark.parametrize(
    "text", ["{}", "kv_cache: {dtype: fp8}", "kv_cache: {dtype: [fp8, 16bit], skip_layers: [0, sliding_window]}"]
)
def test_it_accepts_what_the_parser_accepts(text: str) -> None:
    parse_policy(text.encode(), "policy.yaml")
    assert accepts(text)


@pytest.mark.parametrize(
    "text",
    [
        "dtype: fp8",
        "kv_cache: {dtype: fp9}",
        "kv_cache: {dtype: 8}",
        "kv_cache: {skip_layers: [-1]}",
        "kv_cache: {scales: [any]}",
        "kv_cache: {min_confidence: unknown}",
        "engine: {version: 0.32}",
        "engine: {attention_backend: [a b]}",
        "on_violation: stop",
    ],
)
def test_it_refuses_what_the_parser_refuses(text: str) -> None:
    with pytest.raises(UsageError, match=r"policy\.yaml line 1"):
        parse_policy(text.encode(), "policy.yaml")
    assert not accepts(text)


@pytest.mark.parametrize(
    ("name", "dtype", "scales"),
    [
        ("fp8-calibrated", "fp8_e4m3", "checkpoint"),
        ("fp8-unit-scales", "fp8_e4m3", "unit"),
        ("sixteen-bit", "16bit", "any"),
    ],
)
def test_the_examples_are_valid_and_commented(name: str, dtype: str, scales: str) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text("utf-8")
    policy = parse_policy(text.encode(), name)
    assert policy.kv_cache.dtype == (dtype,)
    assert policy.kv_cache.scales.value == scales
    assert accepts(text)
    assert text.count("#") > 5
    assert policy_digest(policy)
