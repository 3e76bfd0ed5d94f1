"""templates/policy.yaml, and the schema's part that is the policy: what kvguard would refuse, the chart refuses."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml
from charts import CHART, LEAST, merged, one, rejected, with_least
from hypothesis import given
from hypothesis import strategies as st

from kvguard.policy.models import POLICY_DTYPES, OnViolation, Policy, ScalesRule
from kvguard.policy.parse import parse_policy
from kvguard.policy.schema import policy_schema
from kvguard.vocabulary import UsageError

SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
POLICY = jsonschema.Draft7Validator({"$ref": "#/definitions/policy", "definitions": SCHEMA["definitions"]})


def kvguard_accepts(policy: dict[str, Any]) -> bool:
    try:
        parse_policy(yaml.safe_dump(policy).encode(), "policy")
    except UsageError:
        return False
    return True


def test_the_config_map_holds_the_policy_that_was_given():
    policy = {
        "kv_cache": {"dtype": ["fp8", "16bit"], "scales": "checkpoint", "skip_layers": [0, "sliding_window"]},
        "engine": {"version": ">=0.27,<0.34", "attention_backend": "FLASH_ATTN"},
        "shadow": {"on_regression": "unready"},
    }
    text = one(with_least({"policy": policy}), "ConfigMap", "rel-kvguard-policy")["data"]["policy.yaml"]
    parsed = parse_policy(text.encode(), "policy.yaml")
    assert parsed == Policy.model_validate({**policy, "on_violation": "hold"})


def test_hold_is_the_default_and_can_be_changed():
    for given_, found in (({}, OnViolation.HOLD), ({"on_violation": "refuse"}, OnViolation.REFUSE)):
        text = one(with_least({"policy": given_}), "ConfigMap", "rel-kvguard-policy")["data"]["policy.yaml"]
        assert parse_policy(text.encode(), "policy.yaml").on_violation is found


def test_the_reference_runs_16_bit():
    data = one(with_least({"shadow": {"mode": "reference"}}), "ConfigMap", "rel-kvguard-policy")["data"]
    assert parse_policy(data["reference.yaml"].encode(), "reference.yaml").kv_cache.dtype == ("16bit",)
    assert "reference.yaml" not in one(with_least({}), "ConfigMap", "rel-kvguard-policy")["data"]


def test_a_policy_rolls_the_pods_that_it_is_for_and_no_others():
    def stamps(policy: dict[str, Any]) -> list[str]:
        manifests = with_least({"policy": policy, "shadow": {"mode": "reference"}})
        return [
            one(manifests, "Deployment", name)["spec"]["template"]["metadata"]["annotations"]["kvguard.dev/policy-checksum"]
            for name in ("rel-kvguard", "rel-kvguard-reference")
        ]

    before, after = stamps({}), stamps({"kv_cache": {"dtype": "fp8"}})
    assert before[0] != after[0]
    assert before[1] == after[1], "the reference's own policy is the same"


def test_the_schema_is_kvguards_own_and_adds_to_it():
    """Every key of the models is in the chart with the same description, so that neither can move alone."""
    own, chart = policy_schema(), SCHEMA["definitions"]
    assert chart["policy"]["properties"].keys() == own["properties"].keys()
    for name, section in own["$defs"].items():
        for key, value in section.get("properties", {}).items():
            assert chart[name]["properties"][key]["description"] == value["description"]


def test_every_section_is_tried_below():
    assert set(Policy.model_fields) == {"kv_cache", "engine", "shadow", "drift", "on_violation"}


VERSIONS = st.one_of(
    st.sampled_from(
        [
            "",
            ">=0.27,<0.34",
            "==0.32.*",
            "~=0.32",
            "~=0.32.0",
            "==0.32.0+cpu",
            "!=0.30.1",
            ">=0.32.0rc1",
            ">=0.27 , <0.34",
            "<1!2.0",
            ">=0.27,",
            "===0.32",
            "~=1",
            ">0.1.dev1",
            ">=v0.3",
            ">=0.3.post1",
        ]
    ),
    st.sampled_from(
        ["0.32", ">=", ">=x", "=>0.32", ">=0.32.*", "==0.32+", "~=0.32.*", "latest", ">=0.27 <0.34", ",", "<0.3+cpu"]
    ),
    st.from_regex(r"\A(==|>=|<|~=)[0-9.*a-c+]{1,6}\Z"),
)
DTYPES = st.sampled_from([*POLICY_DTYPES, "fp9", "FP8", "auto", "", 8, True])
LAYERS = st.sampled_from([0, 31, 99999, 100000, -1, "0", "07", "sliding_window", "window", True])


def one_or_many(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(items, st.lists(items, max_size=3))


POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "kv_cache": st.fixed_dictionaries(
            {},
            optional={
                "dtype": one_or_many(DTYPES),
                "scales": st.sampled_from([*ScalesRule, "calibrated", 1]).map(lambda rule: getattr(rule, "value", rule)),
                "skip_layers": one_or_many(LAYERS),
                "min_confidence": st.sampled_from(["proven", "corroborated", "echoed", "unknown", "sure"]),
                "scale": st.just("any"),
            },
        ),
        "engine": st.fixed_dictionaries(
            {},
            optional={
                "version": VERSIONS,
                "attention_backend": one_or_many(st.sampled_from(["FLASH_ATTN", "flash", "", "A B", 5])),
            },
        ),
        "shadow": st.fixed_dictionaries({}, optional={"on_regression": st.sampled_from(["alert", "unready", "die"])}),
        "drift": st.fixed_dictionaries(
            {},
            optional={
                "action": st.sampled_from(["alert", "unready", "die"]),
                "min_confidence": st.sampled_from(["proven", "corroborated", "echoed"]),
            },
        ),
        "on_violation": st.sampled_from(["refuse", "hold", "warn", "stop"]),
    },
)


@given(POLICIES)
def test_chart_and_kvguard_agree_on_every_policy(policy):
    assert POLICY.is_valid(policy) == kvguard_accepts(policy), policy


@pytest.mark.parametrize("program", ["helm", "helm3"])
@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ({"kv_cache": {"dtype": "fp9"}}, "dtype"),
        ({"kv_cache": {"dytpe": "fp8"}}, "dytpe"),
        ({"kv_cache": {"dtype": "16bit", "scales": "checkpoint"}}, "policy"),
        ({"engine": {"version": "latest"}}, "version"),
        ({"on_violation": "ignore"}, "on_violation"),
    ],
)
def test_helm_refuses_what_kvguard_refuses(program, policy, named):
    assert not kvguard_accepts(policy)
    assert named in rejected(merged(LEAST, {"policy": policy}), program)
