"""The JSON schema of the policy file, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

from kvguard.policy.models import Policy


def policy_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of what `parse_policy` accepts, made from the models so that both stay one."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Policy.model_json_schema(mode="validation"),
        "title": "kvguard policy",
    }
