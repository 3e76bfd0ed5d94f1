"""templates/prometheusrule.yaml: deploy/prometheus' rules, with the release's changes."""

from __future__ import annotations

from typing import Any

import yaml
from charts import ROOT, of, one, with_least

SOURCE = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text("utf-8"))["groups"]


def alerts(rules: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rule = one(with_least({"rules": {"enabled": True, **rules}}), "PrometheusRule")
    return {item["alert"]: item for group in rule["spec"]["groups"] for item in group["rules"] if "alert" in item}


def test_off_by_default():
    assert not of(with_least({}), "PrometheusRule")


def test_unchanged_the_rules_are_those_of_the_repository():
    found = one(with_least({"rules": {"enabled": True}}), "PrometheusRule")["spec"]["groups"]
    kept = [{"name": group["name"], "rules": group["rules"]} for group in SOURCE]
    assert found == kept


def test_changes_touch_their_alert_alone():
    changes = {
        "KvguardPreemptions": {
            "for": "1h",
            "severity": "info",
            "labels": {"team": "chat"},
            "runbookUrl": "https://r.example/p",
        },
        "KvguardShadowBlind": {"disabled": True},
    }
    plain, changed = alerts({}), alerts({"alerts": changes})
    assert plain.keys() - changed.keys() == {"KvguardShadowBlind"}
    rule = changed.pop("KvguardPreemptions")
    assert rule["for"] == "1h"
    assert rule["labels"] == {"severity": "info", "team": "chat"}
    assert rule["annotations"]["runbook_url"] == "https://r.example/p"
    assert rule["expr"] == plain["KvguardPreemptions"]["expr"]
    assert all(plain[name] == rule for name, rule in changed.items())


def test_runbooks_can_live_anywhere():
    found = alerts({"runbookUrl": "https://runbooks.example/kv/"})
    assert found["KvguardDrifted"]["annotations"]["runbook_url"] == "https://runbooks.example/kv/kvguarddrifted.md"


def test_labels_of_the_alert_survive_templating():
    """Prometheus' own braces are not Helm's."""
    assert "{{ $labels.namespace }}/{{ $labels.pod }}" in alerts({})["KvguardDrifted"]["annotations"]["description"]
