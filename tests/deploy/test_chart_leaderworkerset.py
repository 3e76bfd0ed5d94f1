"""templates/leaderworkerset.yaml: one engine over several nodes, kvguard beside its leader."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from charts import CHART, LEAST, container, environment, merged, notes, of, one, rejected, render, with_least

from kvguard.engine.command import Command, parse_command, split_words

GROUP: dict[str, Any] = {"mode": "sidecar", "multiNode": {"enabled": True, "size": 4}, "engine": {"gpus": 8}}

# leaderworkerset.x-k8s.io/v1: names, enumerations and defaults of the API's own types; its pod templates are judged as pods.
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": {"type": "object"},
        "rolloutStrategy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "type": {"enum": ["RollingUpdate"]},
                "rollingUpdateConfiguration": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "partition": {"type": "integer"},
                        "maxSurge": {"type": ["integer", "string"]},
                        "maxUnavailable": {"type": ["integer", "string"]},
                    },
                },
            },
        },
        "leaderWorkerTemplate": {
            "type": "object",
            "additionalProperties": False,
            "required": ["workerTemplate"],
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                "leaderTemplate": {"type": "object", "required": ["metadata", "spec"]},
                "workerTemplate": {"type": "object", "required": ["metadata", "spec"]},
            },
        },
    },
}


def group(values: dict[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = one(with_least(merged(GROUP, values or {})), "LeaderWorkerSet")
    return found


def pods(values: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    template = group(values)["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def commands(values: dict[str, Any] | None = None) -> tuple[Command, Command]:
    """Leader's and worker's, read as kvguard reads them, so that a flag vLLM does not have fails."""
    leader, worker = (
        parse_command(split_words(container(pod["spec"])["command"]), "0.32.0", lambda path: b"") for pod in pods(values)
    )
    return leader, worker


def test_there_is_none_by_default_and_then_no_deployment():
    assert not of(with_least({}), "LeaderWorkerSet")
    assert not of(with_least(GROUP), "Deployment")


@pytest.mark.parametrize("values", [{}, {"rollout": {"strategy": "Recreate"}}, {"replicas": 3}])
def test_the_kind_would_take_it(values):
    spec = group(values)["spec"]
    jsonschema.Draft7Validator(SCHEMA).validate(spec)
    assert spec["leaderWorkerTemplate"]["size"] == 4
    assert spec["replicas"] == values.get("replicas", 1)


def test_a_field_that_the_kind_does_not_have_is_seen():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate({**group()["spec"], "replica": 1})


def test_leader_and_workers_are_one_engine():
    leader, worker = commands()
    assert not leader.present("--headless")
    assert worker.present("--headless")
    assert (leader.value("--node-rank"), worker.value("--node-rank")) == ("0", "$(LWS_WORKER_INDEX)")
    for command in (leader, worker):
        assert command.value("--nnodes") == "4"
        assert command.value("--master-addr") == "$(LWS_LEADER_ADDRESS)"
        assert command.value("--master-port") == "29501"
    same = {"--headless", "--node-rank", "--host", "--port"}
    flags = [{use.name: use.values for use in command.uses if use.name not in same} for command in (leader, worker)]
    assert flags[0] == flags[1]


@pytest.mark.parametrize(
    ("given", "tensor", "pipeline"),
    [
        ({}, "8", "4"),
        ({"multiNode": {"parallelism": "tensor"}}, "32", None),
        ({"engine": {"gpus": 1}}, None, "4"),
        ({"engine": {"gpus": 1}, "multiNode": {"parallelism": "tensor"}}, "4", None),
    ],
)
def test_how_the_model_is_divided(given, tensor, pipeline):
    for command in commands(given):
        assert command.value("--tensor-parallel-size") == tensor
        assert command.value("--pipeline-parallel-size") == pipeline


def test_only_the_leader_is_reached_and_only_through_kvguard():
    leader, worker = pods()
    service = one(with_least(GROUP), "Service", "rel-kvguard")
    selector = service["spec"]["selector"]
    assert selector.items() <= leader["metadata"]["labels"].items()
    assert not selector.items() <= worker["metadata"]["labels"].items()
    assert [item["name"] for item in leader["spec"]["containers"]] == ["kvguard"]
    engine = commands()[0]
    assert (engine.value("--host"), engine.value("--port")) == ("127.0.0.1", "8001")
    assert "http://127.0.0.1:8001" in container(leader["spec"], "kvguard")["args"]
    assert "ports" not in container(worker["spec"])


def test_each_node_has_its_gpus_and_tells_its_address():
    for pod in pods({"env": [{"name": "NCCL_DEBUG", "value": "WARN"}]}):
        engine = container(pod["spec"])
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert environment(engine)["VLLM_HOST_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert environment(engine)["NCCL_DEBUG"] == "WARN"


def test_the_group_has_another_name_than_the_service():
    """The controller makes a headless Service of the group's name."""
    manifests = with_least(GROUP)
    assert one(manifests, "LeaderWorkerSet")["metadata"]["name"] not in {
        item["metadata"]["name"] for item in of(manifests, "Service")
    }


def test_autoscalers_scale_groups():
    for kind in ("hpa", "keda"):
        scaled = {"autoscaling": {"kind": kind, "prometheus": "http://p"}, "monitor": {"kind": "PodMonitor"}}
        manifests = with_least(merged(GROUP, scaled))
        (scaler,) = of(manifests, "HorizontalPodAutoscaler") + of(manifests, "ScaledObject")
        target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "rel-kvguard-group"}
        assert scaler["spec"]["scaleTargetRef"] == target
        assert "replicas" not in one(manifests, "LeaderWorkerSet")["spec"]
        for trigger in scaler["spec"].get("triggers", []):
            pattern = re.search(r'pod=~"([^"]*)"', trigger["metadata"]["query"])
            assert pattern is not None
            assert re.fullmatch(pattern[1], "rel-kvguard-group-0")
            assert not re.fullmatch(pattern[1], "rel-kvguard-group-0-1"), "workers have no metrics"


def test_ranks_reach_each_other_and_nobody_else_reaches_workers():
    manifests = with_least(merged(GROUP, {"networkPolicy": {"enabled": True}}))
    engine, worker = (one(manifests, "NetworkPolicy", name)["spec"] for name in ("rel-kvguard", "rel-kvguard-worker"))
    peer = {
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/name": "kvguard", "app.kubernetes.io/instance": "rel"},
            "matchExpressions": [
                {"key": "app.kubernetes.io/component", "operator": "In", "values": ["engine", "worker"]},
            ],
        }
    }
    for policy in (engine, worker):
        assert {"from": [peer]} in policy["ingress"]
        assert {"to": [peer]} in policy["egress"]
    assert worker["ingress"] == [{"from": [peer]}]


def test_a_cluster_without_the_kind_is_told():
    assert not of(render(merged(LEAST, GROUP), apis=()), "LeaderWorkerSet")
    assert "NO ENGINE WAS CREATED" in notes(merged(LEAST, GROUP))
    assert "port-forward pod/rel-kvguard-group-0 9464" in notes(merged(LEAST, GROUP))


@pytest.mark.parametrize("program", ["helm", "helm3"])
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mode": "wrapper"}, "multiNode.enabled: needs mode: sidecar, found mode: wrapper"),
        ({"engine": {"gpus": 0}}, "engine.gpus: multiNode.enabled needs at least 1"),
        ({"engine": {"args": ["--nnodes", "2"]}}, "engine.args: --nnodes is set by the chart"),
        ({"engine": {"args": ["--tensor-parallel-size=2"]}}, "engine.args: --tensor-parallel-size is set by the chart"),
        ({"multiNode": {"size": 1}}, "/multiNode/size"),
        ({"multiNode": {"parallelism": "expert"}}, "/multiNode/parallelism"),
    ],
)
def test_a_wrong_value_is_named(values, named, program):
    said = rejected(merged(LEAST, GROUP, values), program)
    assert named in said or named.replace("/", ".").lstrip(".") in said


def test_flags_of_one_node_may_still_be_given_there():
    assert (CHART / "ci" / "multinode-values.yaml").is_file()
    with_least({"engine": {"gpus": 1, "args": ["--tensor-parallel-size", "1"]}})
