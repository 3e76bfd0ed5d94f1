"""templates/service.yaml: one Service for clients, one for those who look."""

from __future__ import annotations

from charts import of, one, with_least


def test_clients_get_the_api_port_of_ready_pods():
    manifests = with_least({"service": {"port": 80, "type": "LoadBalancer", "annotations": {"a": "b"}}})
    service = one(manifests, "Service", "rel-kvguard")
    assert service["spec"]["ports"] == [{"name": "api", "port": 80, "targetPort": "api"}]
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert "publishNotReadyAddresses" not in service["spec"]
    labels = one(manifests, "Deployment", "rel-kvguard")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_management_reaches_refused_pods_too():
    spec = one(with_least({"management": {"port": 9999}}), "Service", "rel-kvguard-management")["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True
    assert {"name": "management", "port": 9999, "targetPort": "management"} in spec["ports"]


def test_families_are_the_clusters_or_the_same_for_all():
    assert not [one for one in of(with_least({}), "Service") if {"ipFamilies", "ipFamilyPolicy"} & one["spec"].keys()]
    dual = {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]}
    services = of(with_least({"listenHost": "::", "service": dual, "shadow": {"mode": "reference"}}), "Service")
    assert len(services) == 3
    for service in services:
        assert {name: service["spec"][name] for name in dual} == dual


def test_names_follow_release_and_overrides():
    assert one(with_least({"nameOverride": "llm"}), "Service", "rel-llm")
    assert one(with_least({"fullnameOverride": "x"}), "Service", "x")
    assert one(with_least({"nameOverride": "rel"}), "Service", "rel")
