"""templates/reference.yaml: the 16-bit engine that answers are compared with."""

from __future__ import annotations

from charts import container, environment, of, one, with_least

VALUES = {
    "shadow": {"mode": "reference", "reference": {"args": ["--max-num-seqs", "4"], "gpus": 2}},
    "engine": {"args": ["--max-model-len", "8192"], "apiKeySecret": {"name": "keys"}},
}


def test_there_is_none_unless_asked_for():
    for mode in ("off", "in-engine"):
        manifests = with_least({"shadow": {"mode": mode}})
        assert not [item for item in manifests if "reference" in item["metadata"]["name"]]


def test_it_is_the_same_engine_under_the_16_bit_policy():
    manifests = with_least(VALUES)
    args = container(one(manifests, "Deployment", "rel-kvguard-reference")["spec"]["template"]["spec"])["args"]
    assert args[args.index("--policy") + 1] == "/etc/kvguard/reference.yaml"
    after = args[args.index("--") + 1 :]
    assert after[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    assert after[-4:] == ["--max-model-len", "8192", "--max-num-seqs", "4"]
    assert after[after.index("--tensor-parallel-size") + 1] == "2"
    assert "--shadow" not in args


def test_its_service_finds_it_and_nothing_else():
    manifests = with_least(VALUES)
    reference = one(manifests, "Deployment", "rel-kvguard-reference")["spec"]
    engine = one(manifests, "Deployment", "rel-kvguard")["spec"]
    selector = one(manifests, "Service", "rel-kvguard-reference")["spec"]["selector"]
    assert selector == reference["selector"]["matchLabels"]
    assert selector.items() <= reference["template"]["metadata"]["labels"].items()
    assert not selector.items() <= engine["template"]["metadata"]["labels"].items()
    for service in of(manifests, "Service"):
        if service["metadata"]["name"] != "rel-kvguard-reference":
            assert not service["spec"]["selector"].items() <= reference["template"]["metadata"]["labels"].items()


def test_it_asks_for_no_key_and_answers_the_engines_only():
    manifests = with_least(VALUES)
    spec = one(manifests, "Deployment", "rel-kvguard-reference")["spec"]["template"]["spec"]
    assert "VLLM_API_KEY" not in environment(container(spec))
    ingress = one(manifests, "NetworkPolicy", "rel-kvguard-reference")["spec"]["ingress"]
    (api,) = [rule for rule in ingress if {"port": "api"} in rule["ports"]]
    (peer,) = api["from"]
    engine = one(manifests, "Deployment", "rel-kvguard")["spec"]["selector"]["matchLabels"]
    assert peer == {"podSelector": {"matchLabels": engine}}


def test_it_has_the_engines_gpus_unless_it_is_given_others():
    def of_reference(gpus: dict[str, int]) -> tuple[str | None, str | None]:
        values = {"shadow": {"mode": "reference", "reference": gpus}, "engine": {"gpus": 4}}
        spec = one(with_least(values), "Deployment", "rel-kvguard-reference")["spec"]["template"]["spec"]
        args = container(spec)["args"]
        flag = "--tensor-parallel-size"
        limits = container(spec)["resources"].get("limits", {})
        return limits.get("nvidia.com/gpu"), args[args.index(flag) + 1] if flag in args else None

    assert of_reference({}) == ("4", "4")
    assert of_reference({"gpus": 2}) == ("2", "2")
    assert of_reference({"gpus": 0}) == (None, None)
