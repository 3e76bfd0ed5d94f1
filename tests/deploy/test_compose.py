"""deploy/compose.yaml: every file it mounts is there and is accepted by the program that reads it."""

from __future__ import annotations

import copy
import json
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml
from charts import ROOT, tool
from toolbox import REQUIRED, node_modules

from kvguard.policy.parse import load_policy

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def mounts() -> list[tuple[str, str, str]]:
    """Service, source and target of every mount, defaults of variables filled in."""
    found = []
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            plain = volume.replace("${POLICY:-./compose/policy.yaml}", "./compose/policy.yaml")
            source, target = plain.removesuffix(":ro").rsplit(":", 1)
            found.append((name, source, target))
    return found


def test_what_is_mounted_is_there():
    local = [(source, target) for _, source, target in mounts() if source.startswith("./")]
    assert len(local) >= 6
    for source, _ in local:
        assert (DEPLOY / source).exists(), source


def specification() -> jsonschema.Draft7Validator:
    """The Compose Specification's own schema."""
    folder = node_modules()
    if folder is None:
        reason = "the compose schema is not on this machine: make tools"
        pytest.fail(reason) if REQUIRED else pytest.skip(reason)
    return jsonschema.Draft7Validator(json.loads((folder / "dclint/schemas/compose.schema.json").read_text("utf-8")))


def test_it_follows_the_specification():
    validator = specification()
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    wrong = copy.deepcopy(COMPOSE)
    wrong["services"]["kvguard"]["stop_grace"] = "30s"
    assert not validator.is_valid(wrong), "the specification can refuse"


def test_services_that_are_named_exist_and_volumes_are_declared():
    for name, source, _ in mounts():
        if not source.startswith((".", "$")):
            assert source in COMPOSE["volumes"], name
    ports = [port.rsplit(":", 2)[1] for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == len(set(ports)) == 5


def test_everybody_may_read_what_is_mounted():
    """kvguard, Prometheus and Grafana each run as a user of their own image."""
    for _, source, _ in mounts():
        if source.startswith("./"):
            place = DEPLOY / source
            for path in [place, *place.rglob("*")]:
                assert path.stat().st_mode & 0o004, f"{path} is not readable by all"


def test_only_this_machine_can_reach_it():
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_kvguard_runs_as_in_the_image():
    service = SERVICES["kvguard"]
    assert service["build"]["target"] == "engine"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "entrypoint" not in service
    assert service["command"][:3] == ["serve", "--policy", "/etc/kvguard/policy.yaml"]
    assert ("kvguard", "./compose/policy.yaml", "/etc/kvguard/policy.yaml") in mounts()


def test_the_policy_is_one_that_kvguard_takes():
    assert load_policy(DEPLOY / "compose" / "policy.yaml").kv_cache.dtype == ("16bit", "fp8_e4m3")


def test_prometheus_takes_its_configuration(tmp_path):
    for source in (DEPLOY / "compose" / "prometheus.yaml", DEPLOY / "prometheus" / "rules.yaml"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    done = subprocess.run(
        [str(tool("promtool")), "check", "config", str(tmp_path / "prometheus.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_prometheus_scrapes_both_ports_and_knows_alertmanager():
    config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text("utf-8"))
    targets = config["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == ["kvguard:9464", "kvguard:8000"]
    (manager,) = config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert manager.partition(":")[0] in SERVICES


def test_alertmanager_takes_its_configuration():
    file = DEPLOY / "compose" / "alertmanager.yaml"
    done = subprocess.run([str(tool("amtool")), "check-config", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_ticket_mutes_a_page():
    config = yaml.safe_load((DEPLOY / "compose" / "alertmanager.yaml").read_text("utf-8"))
    for rule in config["inhibit_rules"]:
        assert 'severity!="critical"' in rule["target_matchers"]


def test_grafana_finds_data_source_and_dashboards():
    source = yaml.safe_load((DEPLOY / "compose" / "grafana-datasource.yaml").read_text("utf-8"))["datasources"][0]
    assert source["type"] == "prometheus"
    assert source["url"].removeprefix("http://").partition(":")[0] in SERVICES
    provider = yaml.safe_load((DEPLOY / "compose" / "grafana-dashboards.yaml").read_text("utf-8"))["providers"][0]
    assert ("grafana", "./grafana", provider["options"]["path"]) in mounts()
