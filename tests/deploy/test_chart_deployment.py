"""templates/deployment.yaml: kvguard in front of vLLM in one container."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from charts import CHART, LEAST, container, environment, helm, merged, one, pod_specs, rejected, render, with_least

from kvguard.cli.main import app
from kvguard.engine.command import parse_command, split_words
from kvguard.vocabulary import UsageError


def deployment(values: dict[str, Any]) -> dict[str, Any]:
    return one(with_least(values), "Deployment", "rel-kvguard")


def spec(values: dict[str, Any]) -> dict[str, Any]:
    return deployment(values)["spec"]["template"]["spec"]


def arguments(values: dict[str, Any]) -> list[str]:
    return container(spec(values))["args"]


def option(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def test_model_and_policy_are_enough():
    values = {"policy": {"kv_cache": {"dtype": "fp8_e4m3"}}}
    engine = container(spec(values))
    assert engine["command"] == ["python3", "-I", "-S", "/opt/kvguard"]
    before, after = engine["args"][: engine["args"].index("--")], engine["args"][engine["args"].index("--") + 1 :]
    assert before[:3] == ["serve", "--policy", "/etc/kvguard/policy.yaml"]
    assert after == ["vllm", "serve", "Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "8000"]
    assert engine["image"] == "vllm/vllm-openai:v0.32.0"
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_every_option_is_one_that_kvguard_has():
    """The command line is kvguard's own: an option that was renamed fails here, not in a pod."""
    import typer

    args = arguments({"shadow": {"mode": "in-engine", "settings": {"rate": 0.5}}, "calibration": {"enabled": False}})
    before = args[1 : args.index("--")]
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {name for parameter in serve.params for name in parameter.opts}
    used = {word for word in before if word.startswith("--")}
    assert used <= known
    assert len(used) >= 7


def test_the_wrapped_command_is_one_that_kvguard_reads():
    args = arguments({"engine": {"gpus": 4, "args": ["--max-model-len", "8192"]}, "model": {"servedName": "chat"}})
    command = parse_command(split_words(args[args.index("--") + 1 :]), "0.32.0", lambda path: b"")
    assert command.model == "Qwen/Qwen3-8B"
    assert command.value("--port") == "8000"
    assert command.value("--tensor-parallel-size") == "4"
    assert command.value("--served-model-name") == "chat"
    assert command.value("--max-model-len") == "8192"


def test_one_gpu_or_none_is_no_tensor_parallelism():
    assert "--tensor-parallel-size" not in arguments({})
    assert "limits" not in container(spec({"engine": {"gpus": 0}}))["resources"]


def test_limits_beside_gpus_are_kept():
    resources = {"requests": {"cpu": "2"}, "limits": {"memory": "40Gi"}}
    assert container(spec({"engine": {"gpus": 2, "resources": resources}}))["resources"]["limits"] == {
        "memory": "40Gi",
        "nvidia.com/gpu": "2",
    }


@pytest.mark.parametrize(
    ("drain", "period"), [({}, 125), ({"grace": 300}, 305), ({"settle": 20, "grace": 60, "preStop": 15}, 80)]
)
def test_the_kubelet_waits_longer_than_kvguard(drain, period):
    found = spec({"drain": drain})
    args = container(found)["args"]
    assert found["terminationGracePeriodSeconds"] == period
    assert period > float(option(args, "--grace")) + drain.get("preStop", 0)
    assert container(found).get("lifecycle") == ({"preStop": {"sleep": {"seconds": 15}}} if drain.get("preStop") else None)


def test_a_held_pod_stays_up_and_unready():
    engine = container(spec({"startup": {"timeout": 601}}))
    assert engine["startupProbe"]["httpGet"] == {"path": "/livez", "port": "management"}
    assert engine["startupProbe"]["periodSeconds"] * engine["startupProbe"]["failureThreshold"] >= 601
    assert engine["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "management"}
    assert engine["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "management"}
    assert option(engine["args"], "--start-timeout") == "601"
    assert deployment({"startup": {"timeout": 601}})["spec"]["progressDeadlineSeconds"] == 1321
    assert {"name": "management", "containerPort": 9464} in engine["ports"]
    assert engine["terminationMessagePath"] == "/dev/termination-log"


def test_draining_and_waiting_for_scales_are_no_lack_of_progress():
    drained = {"drain": {"preStop": 30, "grace": 300}, "startup": {"timeout": 600}}
    assert deployment(drained)["spec"]["progressDeadlineSeconds"] == 30 + 300 + 600 + 600
    waiting = {"calibration": {"enabled": True, "claim": "c"}, "model": {"cache": {"claim": "m"}}}
    assert deployment(merged(drained, waiting))["spec"]["progressDeadlineSeconds"] == 30 + 300 + 2 * 600 + 600


def test_another_management_port_is_the_same_everywhere():
    engine = container(spec({"management": {"port": 9999}}))
    assert option(engine["args"], "--management-port") == "9999"
    assert {"name": "management", "containerPort": 9999} in engine["ports"]


def test_a_rollout_fits_the_gpus_there_are():
    assert deployment({})["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    assert deployment({"rollout": {"strategy": "Recreate"}})["spec"]["strategy"] == {"type": "Recreate"}


def test_a_new_policy_rolls_the_pods_and_nothing_else_does():
    def checksum(values: dict[str, Any]) -> str:
        return deployment(values)["spec"]["template"]["metadata"]["annotations"]["kvguard.dev/policy-checksum"]

    assert checksum({}) == checksum({"replicas": 3})
    assert checksum({}) != checksum({"policy": {"kv_cache": {"dtype": "16bit"}}})


def test_kvguard_is_copied_in_or_built_in():
    copied = spec({})
    assert container(copied, "kvguard")["image"] == "kvguard:0.1.0"
    assert container(copied, "kvguard")["command"] == ["cp", "-Rf", "/opt/kvguard/.", "/target"]
    mounts = {mount["mountPath"]: mount for mount in container(copied)["volumeMounts"]}
    assert mounts["/opt/kvguard"]["readOnly"] is True
    built = spec({"kvguard": {"delivery": "builtin"}})
    assert [item["name"] for item in built["initContainers"]] == ["model"]
    assert "/opt/kvguard" not in {mount["mountPath"] for mount in container(built)["volumeMounts"]}


def test_the_hub_is_asked_by_the_download_alone():
    found = spec({"model": {"tokenSecret": {"name": "hub"}}})
    download, engine = container(found, "model"), container(found)
    assert download["command"][-1] == "Qwen/Qwen3-8B"
    assert environment(download)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "HF_TOKEN" not in environment(engine)
    assert environment(engine)["HF_HUB_OFFLINE"] == "1"
    assert environment(engine)["HF_HOME"] == environment(download)["HF_HOME"] == "/model"


def test_a_pinned_revision_is_served_from_its_snapshot():
    commit = "0123456789abcdef0123456789abcdef01234567"
    found = spec({"model": {"revision": commit}})
    assert container(found, "model")["command"][-2:] == ["Qwen/Qwen3-8B", commit]
    args = container(found)["args"]
    assert option(args, "serve") == "--policy"
    assert args[args.index("vllm") + 2] == f"/model/hub/models--Qwen--Qwen3-8B/snapshots/{commit}"
    assert option(args, "--served-model-name") == "Qwen/Qwen3-8B"


def test_the_download_is_python_that_calls_the_hub_with_name_and_revision(tmp_path):
    """The script as the init container runs it, against a hub library of the test's."""
    (tmp_path / "huggingface_hub.py").write_text(
        "def snapshot_download(name, revision=None, ignore_patterns=()):\n    return f'{name}@{revision}'\n"
    )
    script = (CHART / "files" / "download.py").read_text("utf-8")
    for extra, said in ((["abc"], "org/name@abc"), ([], "org/name@None")):
        command = [sys.executable, "-c", script, "org/name", *extra]
        done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, check=True)
        assert done.stdout.strip() == said


@pytest.mark.parametrize(
    ("model", "path", "volume"),
    [
        (
            {"source": "pvc", "name": "llama", "pvc": {"claim": "models"}},
            "/model/llama",
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        ),
        (
            {"source": "image", "name": "", "image": {"reference": "models/a:1"}},
            "/model",
            {"image": {"reference": "models/a:1", "pullPolicy": "IfNotPresent"}},
        ),
    ],
)
def test_a_model_from_a_claim_or_an_image(model, path, volume):
    found = spec({"model": model})
    args = container(found)["args"]
    assert args[args.index("vllm") + 2] == path
    assert {"name": "model", **volume} in found["volumes"]
    assert "HF_HOME" not in environment(container(found))
    assert [item["name"] for item in found["initContainers"]] == ["kvguard"]


def test_keys_come_from_a_secret():
    assert "VLLM_API_KEY" not in environment(container(spec({})))
    found = environment(container(spec({"engine": {"apiKeySecret": {"name": "keys", "key": "one"}}})))
    assert found["VLLM_API_KEY"] == {"secretKeyRef": {"name": "keys", "key": "one"}}


def test_volumes_are_what_their_names_say():
    volumes = {item["name"]: item for item in spec({"cache": {"claim": "kernels"}, "records": {"claim": "log"}})["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == "kernels"
    assert volumes["records"]["persistentVolumeClaim"]["claimName"] == "log"
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["run"]["emptyDir"]["medium"] == "Memory"
    assert {item["name"]: item for item in spec({})["volumes"]}["cache"]["emptyDir"] == {"sizeLimit": "20Gi"}


def test_the_run_directory_is_one_that_kvguard_takes():
    """It makes its own folder of mode 0700 below the mount, which is not its own, with a path short enough for sockets."""
    from kvguard.engine.run_directory import base_directory

    found = environment(container(spec({})))
    assert str(base_directory(found)) == "/run/kvguard/private"
    assert any(mount["mountPath"] == "/run/kvguard" for mount in container(spec({}))["volumeMounts"])


def test_probes_of_live_traffic():
    assert "--shadow" not in arguments({})
    assert option(arguments({"shadow": {"mode": "in-engine"}}), "--shadow") == "in-engine"
    args = arguments({"shadow": {"mode": "reference", "settings": {"rate": 0.25, "max-tokens": 32}}})
    assert option(args, "--shadow") == "http://rel-kvguard-reference:8000"
    assert option(args, "--shadow-record") == "http://rel-kvguard-reference:9464"
    pairs = [args[i + 1] for i, word in enumerate(args) if word == "--shadow-set"]
    from kvguard.shadow.settings import parse_settings

    parsed = parse_settings(pairs)
    assert (parsed.rate, parsed.max_tokens) == (0.25, 32)


def test_scheduling_is_the_users():
    given = {
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "imagePullSecrets": [{"name": "pull"}],
    }
    found = spec(given)
    assert {key: found[key] for key in given} == given
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    labels = deployment({})["spec"]["selector"]["matchLabels"]
    assert spec({"topologySpreadConstraints": spread})["topologySpreadConstraints"] == [
        {**spread[0], "labelSelector": {"matchLabels": labels}}
    ]


def test_extras_reach_the_container_and_the_pod():
    values = {
        "env": [{"name": "A", "value": "b"}],
        "envFrom": [{"configMapRef": {"name": "c"}}],
        "volumes": [{"name": "x", "emptyDir": {}}],
        "volumeMounts": [{"name": "x", "mountPath": "/x"}],
        "podLabels": {"team": "chat"},
        "podAnnotations": {"note": "1"},
        "kvguard": {"extraArgs": ["--record-dir", "/x"]},
    }
    found = deployment(values)["spec"]["template"]
    engine = container(found["spec"])
    assert environment(engine)["A"] == "b"
    assert engine["envFrom"] == values["envFrom"]
    assert {"name": "x", "mountPath": "/x"} in engine["volumeMounts"]
    assert {"name": "x", "emptyDir": {}} in found["spec"]["volumes"]
    assert found["metadata"]["labels"]["team"] == "chat"
    assert found["metadata"]["annotations"]["note"] == "1"
    assert option(engine["args"], "--record-dir") == "/x"
    assert engine["args"].index("--record-dir") < engine["args"].index("--")


def test_an_autoscaler_owns_the_number_of_replicas():
    assert deployment({"replicas": 3})["spec"]["replicas"] == 3
    assert "replicas" not in deployment({"autoscaling": {"kind": "hpa"}})["spec"]
    keda = merged(
        LEAST, {"replicas": 2, "autoscaling": {"kind": "keda", "prometheus": "http://p"}, "monitor": {"kind": "PodMonitor"}}
    )
    assert "replicas" not in one(render(keda), "Deployment", "rel-kvguard")["spec"]
    assert one(render(keda, apis=()), "Deployment", "rel-kvguard")["spec"]["replicas"] == 2


@pytest.mark.parametrize("mode", ["wrapper", "sidecar"])
def test_both_ports_listen_where_the_value_says(mode):
    """The management port follows the API's host; an engine beside kvguard stays on the loopback, which every pod has."""
    for host in ("0.0.0.0", "::"):
        found = spec({"mode": mode, "listenHost": host})
        facing = container(found, "kvguard" if mode == "sidecar" else "vllm")
        assert option(facing["args"], "--host") == host
        assert "--management-host" not in facing["args"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert facing[probe]["httpGet"].keys() == {"path", "port"}, "the kubelet asks the pod's own address"
        if mode == "sidecar":
            assert option(container(found, "vllm")["command"], "--host") == "127.0.0.1"


def test_two_colons_are_both_families():
    """Both of kvguard's ports are bound by this function, in both modes."""
    from kvguard.proxy.server import bind

    if not Path("/proc/net/if_inet6").is_file():
        with pytest.raises(UsageError, match="Address family"):
            bind("::", 0)
        pytest.skip("this machine's kernel has no IPv6")
    with bind("::", 0) as listener:
        listener.listen()
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, listener.getsockname()[1]), timeout=60):
                pass
    with bind("0.0.0.0", 0) as narrow:
        assert narrow.family is socket.AF_INET


@pytest.mark.parametrize("mode", ["wrapper", "sidecar"])
def test_a_quota_on_requests_and_limits_admits_every_container(mode):
    """Init containers and the pod of `helm test` too; the engine's own limits are the user's to choose."""
    engine = {"resources": {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"cpu": "8", "memory": "64Gi"}}}
    guard = {"resources": {"limits": {"cpu": "2"}}}
    calibrated = merged(CALIBRATED, {"policy": RUNTIME}) if mode == "wrapper" else {}
    values = merged({"mode": mode, "engine": engine, "sidecar": guard, "model": {"cache": {"claim": "m"}}}, calibrated)
    seen = 0
    for where, found in pod_specs(with_least(values)):
        for one_ in [*found["containers"], *found.get("initContainers", [])]:
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= one_["resources"][kind].keys(), (where, one_["name"], kind)
            seen += 1
    assert seen >= 4


def test_service_variables_never_reach_vllm():
    assert spec({})["enableServiceLinks"] is False


def test_code_that_comes_with_a_model_is_copied_where_it_can_be_written():
    engine = container(spec({"engine": {"args": ["--trust-remote-code"]}}))
    path = environment(engine)["HF_MODULES_CACHE"]
    mounts = [item for item in engine["volumeMounts"] if path.startswith(item["mountPath"] + "/")]
    assert [item.get("readOnly", False) for item in mounts] == [False]


def test_the_users_variables_win():
    values = {
        "env": [{"name": "HOME", "value": "/x"}, {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    }
    for mode in ("wrapper", "sidecar"):
        found = container(spec({"mode": mode, **values}))["env"]
        assert [item for item in found if item["name"] in {"HOME", "A"}] == values["env"]
        assert len({item["name"] for item in found}) == len(found)


def test_digests_win_over_tags():
    digest = "sha256:" + "a" * 64
    assert container(spec({"engine": {"image": {"digest": digest}}}))["image"] == f"vllm/vllm-openai@{digest}"


RUNTIME: dict[str, Any] = {"kv_cache": {"dtype": "fp8_e4m3", "scales": "runtime"}}
CALIBRATED: dict[str, Any] = {"calibration": {"enabled": True, "claim": "c"}, "model": {"cache": {"claim": "m"}}}
WRONG = [
    ({"model": {"name": ""}}, "model.name: required"),
    ({"mode": "sidecar", "shadow": {"mode": "in-engine"}}, "shadow.mode: in-engine needs mode: wrapper"),
    ({"mode": "sidecar", "calibration": {"enabled": True, "claim": "c"}}, "calibration.enabled: needs mode: wrapper"),
    ({"mode": "daemon"}, "/mode"),
    ({"model": {"source": "pvc"}}, "model.pvc.claim: required"),
    ({"model": {"source": "image"}}, "model.image.reference: required"),
    ({"model": {"source": "pvc", "name": "/a", "pvc": {"claim": "m"}}}, "path inside the volume"),
    ({"model": {"source": "pvc", "name": "../a", "pvc": {"claim": "m"}}}, "must not contain"),
    ({"drain": {"settle": 30, "grace": 30}}, "drain.settle: 30 s leave nothing of drain.grace"),
    ({"autoscaling": {"kind": "hpa", "minReplicas": 9}}, "autoscaling.minReplicas: 9 is above"),
    ({"autoscaling": {"kind": "keda"}}, "autoscaling.prometheus: required"),
    ({"autoscaling": {"kind": "keda", "prometheus": "http://p"}}, "monitor.kind"),
    ({"engine": {"args": ["--port", "1"]}}, "engine.args: --port is set by the chart"),
    ({"service": {"ipFamilies": ["IPv6"]}}, "listenHost: service.ipFamilies has IPv6"),
    ({"service": {"ipFamilies": ["IPv5"]}}, "ipFamilies"),
    ({"listenHost": "10.0.0.1"}, "listenHost"),
    ({"calibration": {"by": "pod"}}, "/calibration/by"),
    ({"startup": {"timeout": 1e9}}, "/startup/timeout"),
    ({"engine": {"args": ["--host=::"]}}, "engine.args: --host is set by the chart"),
    ({"engine": {"args": ["--kv-cache-dtype", "fp8"]}, "shadow": {"mode": "reference"}}, "leave the KV cache to policy"),
    ({"calibration": {"enabled": True}}, "calibration.claim: required"),
    ({"calibration": {"enabled": True, "claim": "c"}}, "model.cache.claim: required"),
    ({"mode": "sidecar", "policy": {"kv_cache": {"min_confidence": "proven"}}}, "policy.kv_cache.min_confidence: proven needs"),
    ({"mode": "sidecar", "policy": RUNTIME}, "policy.kv_cache.scales: runtime needs mode: wrapper"),
    (CALIBRATED | {"policy": {"kv_cache": {"scales": "unit"}}}, "policy.kv_cache.scales: unit contradicts calibration"),
    ({"policy": RUNTIME}, "policy.kv_cache.scales: runtime, and nothing measures them"),
    ({"management": {"port": 8000}}, "management.port: 8000 is the port of the API"),
    ({"mode": "sidecar", "management": {"port": 8001}}, "management.port: 8001 is the port of the engine"),
    ({"mode": "sidecar", "multiNode": {"enabled": True, "masterPort": 9464}}, "multiNode.masterPort: 9464 is the port of"),
    ({"podLabels": {"app.kubernetes.io/component": "x"}}, "podLabels: app.kubernetes.io/component is set by the chart"),
    ({"podAnnotations": {"kvguard.dev/policy-checksum": "x"}}, "podAnnotations: kvguard.dev/policy-checksum is set"),
    ({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "env: A is given twice"),
    ({"volumes": [{"name": "tmp", "emptyDir": {}}]}, "volumes: there is a volume tmp already"),
    ({"volumeMounts": [{"name": "x", "mountPath": "/tmp/"}]}, "volumeMounts: something is mounted at /tmp/ already"),
    ({"engine": {"args": ["--api-key", "s3cret"]}}, "engine.args: --api-key would stand in the pod's spec"),
    ({"engine": {"args": ["--api-key=s3cret"]}}, "use engine.apiKeySecret"),
    ({"engine": {"image": {"tag": ""}}}, "engine.image.tag: required"),
    ({"fullnameOverride": "1-llama"}, 'fullnameOverride: Services would be called "1-llama"'),
    ({"fullnameOverride": "a.b"}, "fullnameOverride: Services would be called"),
    ({"nameOverride": "-x"}, "nameOverride: "),
    ({"serviceAccount": {"name": "My Account"}}, 'serviceAccount.name: "My Account"'),
    ({"shadow": {"settings": {"rat": 0.1}}}, "'rat'"),
    ({"replicas": -1}, "replicas"),
    ({"replicas": "two"}, "replicas"),
    ({"repicas": 2}, "repicas"),
    ({"model": {"nmae": "x"}}, "nmae"),
    ({"model": {"revision": "main"}}, "/model/revision"),
    ({"engine": {"sharedMemory": "8 GB"}}, "sharedMemory"),
    ({"rollout": {"strategy": "BlueGreen"}}, "strategy"),
    ({"runAsUser": 0}, "runAsUser"),
    ({"rules": {"alerts": {"KvguardDrifed": {"for": "1m"}}}}, "KvguardDrifed"),
    ({"rules": {"alerts": {"KvguardDrifted": {"severity": "loud"}}}}, "severity"),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_a_wrong_value_is_named(values, said):
    assert said in rejected(merged(LEAST, values))


@pytest.mark.parametrize(
    "values",
    [
        CALIBRATED,
        {"cache": {"claim": "kernels"}},
        {"engine": {"args": ["--calculate-kv-scales"]}},
        {"kvguard": {"extraArgs": ["--calibrate"]}},
        {"kvguard": {"extraArgs": ["--scales", "/x"]}},
        {"policy": {"kv_cache": {"dtype": "fp8_per_token_head"}}},
    ],
)
def test_runtime_scales_may_come_in_many_ways(values):
    assert deployment(merged({"policy": RUNTIME}, values))


def test_a_message_does_not_repeat_a_key():
    assert "s3cret" not in rejected(merged(LEAST, {"engine": {"args": ["--api-key=s3cret"]}}))


def test_the_probes_settings_may_have_either_spelling():
    assert "max-tokens=8" in arguments({"shadow": {"mode": "in-engine", "settings": {"max_tokens": 8}}})


def test_a_release_that_begins_with_a_digit_is_named():
    done = helm("template", "1llama", str(CHART), "--values", "-", stdin=json.dumps(LEAST))
    assert done.returncode != 0
    assert 'the release\'s name "1llama"' in done.stderr


def test_refusals_are_remembered_on_an_empty_dir_of_their_own():
    """Whatever keeps the records: a claim that pods share would share refusals too."""
    found = spec({"records": {"claim": "records"}})
    folder = option(container(found)["args"], "--refusals")
    (mount,) = [item for item in container(found)["volumeMounts"] if item["mountPath"] == folder]
    (volume,) = [item for item in found["volumes"] if item["name"] == mount["name"]]
    assert set(volume) == {"name", "emptyDir"}
    assert not mount.get("readOnly")
    off = spec({"kvguard": {"rememberRefusals": False}})
    assert "--refusals" not in container(off)["args"]
    assert "refusals" not in {item["name"] for item in off["volumes"]}
