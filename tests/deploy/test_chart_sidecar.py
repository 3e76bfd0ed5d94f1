"""templates/deployment.yaml with mode: sidecar: an engine of its own, and kvguard that attaches to it."""

from __future__ import annotations

from typing import Any

from charts import container, environment, of, one, with_least

from kvguard.engine.command import parse_command, split_words


def spec(values: dict[str, Any]) -> dict[str, Any]:
    return one(with_least({"mode": "sidecar", **values}), "Deployment")["spec"]["template"]["spec"]


def option(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def test_the_engine_starts_before_kvguard_and_stops_after_it():
    """A sidecar in Kubernetes' sense; as a second plain container it would get its SIGTERM while kvguard drains."""
    found = spec({"drain": {"grace": 300, "preStop": 5}})
    assert [item["name"] for item in found["containers"]] == ["kvguard"]
    assert [item["name"] for item in found["initContainers"]] == ["model", "vllm"]
    assert container(found, "vllm")["restartPolicy"] == "Always"
    assert found["terminationGracePeriodSeconds"] >= 5 + 300 + 15


def test_only_kvguard_reaches_the_engine():
    found = spec({"engine": {"args": ["--kv-cache-dtype", "fp8"], "gpus": 2}})
    engine, guard = container(found, "vllm"), container(found, "kvguard")
    command = parse_command(split_words(engine["command"]), "0.32.0", lambda path: b"")
    assert command.value("--host") == "127.0.0.1"
    assert option(guard["args"], "--engine") == f"http://127.0.0.1:{command.value('--port')}"
    assert "ports" not in engine
    assert {item["containerPort"] for item in guard["ports"]} == {8000, 9464}
    assert command.value("--kv-cache-dtype") == "fp8"
    assert command.value("--tensor-parallel-size") == "2"
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "nvidia.com/gpu" not in str(guard["resources"])


def test_kvguard_comes_in_its_own_image():
    found = spec({})
    assert container(found, "kvguard")["image"] == "kvguard:0.1.0"
    assert not [mount for mount in container(found, "vllm")["volumeMounts"] if mount["mountPath"] == "/opt/kvguard"]
    assert "kvguard" not in {volume["name"] for volume in found["volumes"]}


def test_every_option_is_one_that_kvguard_has():
    import typer

    from kvguard.cli.main import app

    args = container(spec({"sidecar": {"kvBytes": "40GiB"}}), "kvguard")["args"]
    attach = typer.main.get_command(app).commands["attach"]  # type: ignore[attr-defined]
    known = {name for parameter in attach.params for name in parameter.opts}
    assert args[0] == "attach"
    assert {word for word in args if word.startswith("--")} <= known
    assert option(args, "--kv-bytes") == "40GiB"
    assert "--kv-bytes" not in container(spec({}), "kvguard")["args"]


def test_probes_and_key_are_kvguards():
    found = spec({"engine": {"apiKeySecret": {"name": "keys"}}})
    guard = container(found, "kvguard")
    assert guard["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "management"}
    assert "readinessProbe" not in container(found, "vllm")
    for name in ("vllm", "kvguard"):
        assert environment(container(found, name))["VLLM_API_KEY"] == {"secretKeyRef": {"name": "keys", "key": "api-key"}}
    assert "VLLM_API_KEY" not in environment(container(spec({}), "kvguard"))


def test_kvguard_can_read_the_models_files():
    found = spec({})
    guard = container(found, "kvguard")
    assert {"name": "model", "mountPath": "/model", "readOnly": True} in guard["volumeMounts"]
    assert environment(guard)["HF_HOME"] == "/model"


def test_there_is_no_job_and_no_reference():
    manifests = with_least({"mode": "sidecar"})
    assert not of(manifests, "Job")
    assert len(of(manifests, "Deployment")) == 1
