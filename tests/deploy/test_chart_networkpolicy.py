"""templates/networkpolicy.yaml: who reaches the pods, and whom they reach."""

from __future__ import annotations

from typing import Any

from charts import of, one, with_least


def policy(values: dict[str, Any]) -> dict[str, Any]:
    enabled = {"networkPolicy": {"enabled": True, **values.pop("networkPolicy", {})}}
    return one(with_least({**values, **enabled}), "NetworkPolicy", "rel-kvguard")["spec"]


def ports(rules: list[dict[str, Any]]) -> set[Any]:
    return {port["port"] for rule in rules for port in rule["ports"]}


def test_off_by_default():
    assert not of(with_least({}), "NetworkPolicy")


def test_clients_and_monitoring_are_named_apart():
    clients, monitoring = [{"podSelector": {"matchLabels": {"a": "b"}}}], [{"namespaceSelector": {}}]
    api, management = policy({"networkPolicy": {"clients": clients, "monitoring": monitoring}})["ingress"]
    assert (api["ports"], api["from"][:-1]) == ([{"port": "api"}], clients)
    assert {port["port"] for port in management["ports"]} == {"management", "api"}
    assert management["from"] == monitoring


def test_named_clients_are_the_only_ones_of_the_api():
    clients = [{"podSelector": {"matchLabels": {"a": "b"}}}]
    api, management = policy({"networkPolicy": {"clients": clients}})["ingress"]
    assert management == {"ports": [{"port": "management"}], "from": [{"podSelector": {}}]}
    assert api["from"][0] == clients[0]


def test_helm_test_is_always_a_client():
    values = {"networkPolicy": {"enabled": True, "clients": [{"namespaceSelector": {}}]}}
    manifests = with_least(values)
    labels = one(manifests, "Pod")["metadata"]["labels"]
    api = one(manifests, "NetworkPolicy")["spec"]["ingress"][0]
    selector = api["from"][-1]["podSelector"]["matchLabels"]
    assert selector.items() <= labels.items()
    engine = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= engine.items()


def test_unnamed_the_api_is_open_and_management_is_not():
    api, management = policy({})["ingress"]
    assert "from" not in api
    assert management["from"] == [{"podSelector": {}}]


def test_only_a_download_reaches_out():
    assert ports(policy({})["egress"]) == {53, 443}
    local = {"model": {"source": "pvc", "pvc": {"claim": "m"}}}
    assert ports(policy(local)["egress"]) == {53}
    extra = [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]
    assert policy({"networkPolicy": {"egress": extra}})["egress"][-1] == extra[0]


def test_probes_reach_the_reference():
    egress = policy({"shadow": {"mode": "reference"}})["egress"]
    (rule,) = [rule for rule in egress if "to" in rule]
    assert rule["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "reference"
    assert {port["port"] for port in rule["ports"]} == {"api", "management"}
