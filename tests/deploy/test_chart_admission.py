"""The admission policy, in the chart and by itself, judged by the language's own runtime over pods as people write them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from charts import CI_VALUES, ROOT, of, pod_specs, render, with_least

FOLDER = ROOT / "deploy" / "admission"
POLICY, BINDING = yaml.safe_load_all((FOLDER / "validating-admission-policy.yaml").read_text("utf-8"))
KYVERNO = yaml.safe_load((FOLDER / "kyverno-cluster-policy.yaml").read_text("utf-8"))


def evaluate(expression: str, pod: dict[str, Any]) -> Any:
    pytest.importorskip("cel_expr_python", reason="no CEL runtime for this platform")
    from cel_expr_python import cel
    from cel_expr_python.ext import ext_optional

    for variable in reversed(POLICY["spec"]["variables"]):
        expression = expression.replace(f"variables.{variable['name']}", f"({variable['expression']})")
    env = cel.NewEnv(variables={"object": cel.Type.DYN}, extensions=[ext_optional.ExtOptional()])
    return env.compile(expression).eval(data={"object": pod}).value()


def admitted(spec: dict[str, Any]) -> bool:
    return bool(evaluate(POLICY["spec"]["validations"][0]["expression"], {"spec": spec}))


def pod(image: str, command: list[str] | None = None, args: list[str] | None = None, **more: Any) -> dict[str, Any]:
    given = {"command": command, "args": args}
    return {"containers": [{"name": "c", "image": image, **{k: v for k, v in given.items() if v is not None}}], **more}


GUARDED = ["serve", "--policy", "p", "--", "vllm", "serve", "M"]
BARE = [
    pod("vllm/vllm-openai:v0.32.0"),
    pod("vllm/vllm-openai", args=["--model", "M"]),
    pod("registry.example/team/vllm@sha256:0"),
    pod("other:1", command=["vllm", "serve", "M"]),
    pod("other:1", command=["/usr/local/bin/vllm"], args=["serve", "M"]),
    pod("other:1", command=["bash", "-c", "sleep 1; vllm serve M"]),
    pod("other:1", command=["sh", "-c", "set -e\nvllm serve M"]),
    pod("other:1", command=["sh", "-c"], args=["export A=1\nexec vllm serve M\n"]),
    pod("other:1", command=["sh", "-c", "true;vllm serve M"]),
    pod("other:1", command=["sh", "-c", "true&&vllm serve M"]),
    pod("other:1", command=["sh", "-c", "true|(vllm\tserve M)"]),
    pod("other:1", command=["sh", "-c", "\tvllm serve \\\n  M"]),
    pod("other:1", command=["vllm", "serve", "M", "--nnodes", "2", "--node-rank", "0"]),
    pod("other:1", command=["python3", "-m", "vllm.entrypoints.openai.api_server"]),
    pod("other:1", command=["kvguard"], args=["inspect", "M"]) | {"containers": [{"name": "c", "image": "vllm"}]},
    {"containers": [{"name": "a", "image": "nginx"}, {"name": "b", "image": "vllm/vllm-openai"}]},
    {
        "containers": [{"name": "a", "image": "nginx"}],
        "initContainers": [{"name": "b", "image": "vllm/vllm-openai", "restartPolicy": "Always"}],
    },
]
ATTACHED = {"name": "g", "image": "kvguard:1", "command": ["kvguard"], "args": ["attach", "--engine", "http://127.0.0.1:8001"]}
LOOPBACK = {
    "name": "b",
    "image": "vllm/vllm-openai",
    "command": ["vllm", "serve", "M", "--host", "127.0.0.1", "--port", "8001"],
}
BARE += [
    {"containers": [ATTACHED, {**LOOPBACK, "command": ["vllm", "serve", "M"]}]},
    {"containers": [{**ATTACHED, "args": ["verify", "http://127.0.0.1:8001"]}, LOOPBACK]},
]
FINE = [
    {"containers": [ATTACHED, LOOPBACK]},
    {"containers": [ATTACHED], "initContainers": [{**LOOPBACK, "restartPolicy": "Always"}]},
    pod("vllm/vllm-openai", command=["kvguard"], args=GUARDED),
    pod("vllm/vllm-openai", command=["python3", "-I", "-S", "/opt/kvguard"], args=GUARDED),
    pod("other:1", command=["/opt/venv/bin/kvguard", *GUARDED]),
    pod("vllm/vllm-openai", command=["vllm", "serve", "M", "--nnodes", "2", "--node-rank", "1", "--headless"]),
    pod("nginx:1"),
    pod("other:1", command=["sh", "-c", "echo novllm serve\npip install vllm-tools"]),
    pod("vllm/vllm-openai", command=["kvguard"], args=[*GUARDED, "--chat-template", "{{ a }}\n{{ b }}"]),
    pod("nginx:1", command=["nginx", "-g", "daemon off;"]),
    pod("vllm/vllm-openai", command=["python3", "-c", "import huggingface_hub"]),
    {
        "containers": [{"name": "a", "image": "nginx"}],
        "initContainers": [{"name": "b", "image": "vllm/vllm-openai", "command": ["python3", "-c", "pass"]}],
    },
]


@pytest.mark.parametrize("spec", BARE, ids=range(len(BARE)))
def test_vllm_without_kvguard_is_rejected(spec):
    assert not admitted(spec)


@pytest.mark.parametrize("spec", FINE, ids=range(len(FINE)))
def test_everything_else_is_admitted(spec):
    assert admitted(spec)


@pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.stem)
def test_the_charts_own_pods_are_admitted(values):
    for where, spec in pod_specs(render(values)):
        assert admitted(spec), where


def test_the_message_names_the_container_and_the_cure():
    message = evaluate(POLICY["spec"]["validations"][0]["messageExpression"], {"spec": BARE[0]})
    assert message.startswith("container c runs vLLM without kvguard in front: start it as `kvguard serve")


def test_only_labelled_namespaces_are_judged():
    assert BINDING["spec"]["policyName"] == POLICY["metadata"]["name"]
    label = {"matchLabels": {"kvguard.dev/enforce": "true"}}
    assert BINDING["spec"]["matchResources"]["namespaceSelector"] == label
    assert KYVERNO["spec"]["rules"][0]["match"]["any"][0]["resources"]["namespaceSelector"] == label


def test_the_twin_has_the_same_patterns():
    """Kyverno's own functions are not to be had here: its regular expressions are tried, its policy is not run."""
    rule = KYVERNO["spec"]["rules"][0]["validate"]["foreach"][0]
    conditions = [*rule["preconditions"]["any"], *rule["deny"]["conditions"]["all"]]
    keys = " ".join(condition["key"] for condition in conditions)
    image, words, guard, headless, attach, loopback = re.findall(r"regex_match\('([^']*)'", keys)

    def line(item: dict[str, Any]) -> str:
        return " ".join([*item.get("command", []), *item.get("args", [])])

    def is_bare(item: dict[str, Any], pod_line: str) -> bool:
        runs = ("command" not in item and re.fullmatch(image, item["image"])) or re.fullmatch(words, line(item))
        attached = re.fullmatch(attach, pod_line) and re.fullmatch(loopback, line(item))
        excused = attached or re.fullmatch(guard, line(item)) or re.fullmatch(headless, line(item))
        return bool(runs) and not excused

    for spec, bare in [*((spec, True) for spec in BARE), *((spec, False) for spec in FINE)]:
        items = [*spec["containers"], *(c for c in spec.get("initContainers", []) if c.get("restartPolicy") == "Always")]
        pod_line = " ".join(line(item) for item in spec["containers"])
        assert any(is_bare(item, pod_line) for item in items) is bare, spec


def test_off_by_default_in_the_chart():
    assert not of(with_least({}), "ValidatingAdmissionPolicy")
    manifests = with_least({"admission": {"enabled": True}})
    assert of(manifests, "ValidatingAdmissionPolicy") == [POLICY]
    assert of(manifests, "ValidatingAdmissionPolicyBinding") == [BINDING]
