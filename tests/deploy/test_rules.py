"""Rules: valid, tested by promtool, each alert complete with its runbook, its cases and its silence."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from charts import ROOT, tool

FOLDER = ROOT / "deploy" / "prometheus"
GROUPS = yaml.safe_load((FOLDER / "rules.yaml").read_text("utf-8"))["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
CASES = yaml.safe_load((FOLDER / "rules_test.yaml").read_text("utf-8"))["tests"]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(tool("promtool")), *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_rules_are_valid():
    done = promtool("check", "rules", str(FOLDER / "rules.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_fire_and_stay_silent_as_written():
    done = promtool("test", "rules", str(FOLDER / "rules_test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_that_fires_wrongly_is_seen(tmp_path):
    """The unit tests can fail: with the threshold of preemptions lowered, the healthy fleet fires."""
    rules = (FOLDER / "rules.yaml").read_text("utf-8")
    assert "preemptions_total[10m])) > 0.1" in rules
    (tmp_path / "rules.yaml").write_text(rules.replace("preemptions_total[10m])) > 0.1", "preemptions_total[10m])) > 0.001"))
    few = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": CASES[:1]}
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(few))
    done = promtool("test", "rules", str(tmp_path / "few.yaml"))
    assert done.returncode != 0
    assert "KvguardPreemptions" in done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_is_complete(rule):
    annotations = rule["annotations"]
    assert rule["alert"].startswith("Kvguard")
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert "{{" not in annotations["summary"], "a summary is the same for every instance"
    assert "$labels.namespace" in annotations["description"]
    assert annotations["runbook_url"] == f"deploy/runbooks/{rule['alert'].lower()}.md"


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_has_its_runbook(rule):
    text = (ROOT / rule["annotations"]["runbook_url"]).read_text("utf-8")
    assert text.startswith(f"# {rule['alert']}\n\nSeverity: {rule['labels']['severity']}, ")
    sections = re.findall(r"^## (.+)\n\n(.+)$", text, re.MULTILINE)
    assert [title for title, _ in sections] == ["Meaning", "Impact", "What to look at", "What to do", "How to confirm"]


RUNBOOKS = {rule["alert"]: (ROOT / rule["annotations"]["runbook_url"]).read_text("utf-8") for rule in ALERTS}


@pytest.mark.parametrize("alert", RUNBOOKS)
def test_commands_in_runbooks_work_as_written(alert):
    """kubectl says where; kvguard's commands and options are kvguard's; pages are ones that kvguard serves."""
    import typer

    from kvguard.cli.main import app

    spans = [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", RUNBOOKS[alert])]
    for span in spans:
        words = span.split()
        if words[0] in {"kubectl", "helm"} and len(words) > 1:
            assert "--namespace NAMESPACE" in span, span
        if words[0] == "kvguard" and len(words) > 1:
            command = typer.main.get_command(app)
            for word in words[1:]:
                if word in getattr(command, "commands", {}):
                    command = command.commands[word]  # type: ignore[attr-defined]
            known = {name for parameter in command.params for name in parameter.opts}
            assert command.name == words[1] or command.name == words[2], span
            assert {word for word in words if word.startswith("--")} <= known, span


def test_runbooks_name_pages_and_metrics_that_exist(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "generate"))
    from metric_names import defined, recorded

    known = defined() | recorded(FOLDER / "rules.yaml")
    pages = {
        "livez",
        "readyz",
        "metrics",
        "record",
        "evidence",
        "policy",
        "shadow",
        "",
        "sleep",
        "wake_up",
        "update_weights",
        "health",
    }
    for alert, text in RUNBOOKS.items():
        for page in re.findall(r"http://127\.0\.0\.1:9464/(\w*)", text) + re.findall(r"`/(\w+)`", text):
            assert page in pages, (alert, page)
        for name in re.findall(r"\b(?:kvguard_(?!replicas)[a-z_]+|vllm:[a-z_]+)\b(?=[`{\[])", text):
            assert name in known or f"{name}_bucket" in known or f"{name}_sum" in known, (alert, name)


def test_no_runbook_without_an_alert():
    names = {f"{rule['alert'].lower()}.md" for rule in ALERTS}
    assert {path.name for path in (ROOT / "deploy" / "runbooks").iterdir()} == names


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_fires_in_a_case_and_is_silent_in_others(rule):
    label = f'alertname="{rule["alert"]}"'
    fires = [case["name"] for case in CASES if label in yaml.safe_dump(case["promql_expr_test"])]
    assert fires
    assert len(CASES) - len(fires) > 20


def test_gauges_are_read_through_a_range_or_a_recording():
    """One missed scrape neither fires nor resolves an alert of kvguard's gauges."""
    instant = re.compile(r"kvguard_[a-z_]+(?:\{[^}]*\})?(?!\[|[a-z_{])")
    allowed = {"kvguard_build_info", "kvguard_shadow_noise_floor_nats"}
    for rule in ALERTS:
        bare = re.sub(r'"[^"]*"', '""', re.sub(r"\w+:kvguard_\w+:\w+", "", rule["expr"]))
        for found in instant.findall(bare):
            assert found.partition("{")[0] in allowed, f"{rule['alert']}: {found}"


def test_a_full_cache_alone_alarms_nobody():
    assert not [rule["alert"] for rule in ALERTS if re.search(r"pinned_ratio|usage_perc|used_(bytes|tokens)", rule["expr"])]


def test_pages_are_few():
    assert sorted(rule["alert"] for rule in ALERTS if rule["labels"]["severity"] == "critical") == [
        "KvguardAnswersCollapse",
        "KvguardDrifted",
        "KvguardEngineHangs",
        "KvguardExitedForPolicy",
        "KvguardMixedReplicas",
        "KvguardTooFewServing",
    ]


PAGE = "on every page of kvguard: KvguardTargetDown, and KvguardAbsent for a whole fleet"
ABSENT_ELSEWHERE = {
    "up": "a target without kvguard is not ours to miss",
    "kvguard_build_info": PAGE,
    "kvguard_state": PAGE,
    "kvguard_effective_info": PAGE,
    "kvguard_check_status": PAGE,
    "kvguard_proxy_delay_seconds_sum": PAGE,
    "kvguard_proxy_delay_seconds_count": PAGE,
    "kvguard_proxy_cpu_seconds_total": PAGE,
    "kvguard_proxy_time_to_first_byte_seconds_bucket": PAGE,
    "kvguard_proxy_requests_total": "begins with the first request",
    "kvguard_canary_unanswered": "begins with the first silence of five minutes",
    "kvguard_shadow_collapsed_total": "there while kvguard_shadow_state is not off",
    "kvguard_shadow_sum": "there while kvguard_shadow_state is not off",
    "kvguard_shadow_noise_floor_nats": "there while kvguard_shadow_state is not off",
    "kvguard_engine_preemptions_total": "of the same statistics as kvguard_batch_waiting_requests",
    "vllm:prompt_tokens_total": "of the same page as vllm:generation_tokens_total",
    "kube_pod_container_status_ready": "KvguardExitCodesAbsent",
    "kube_pod_container_status_last_terminated_exitcode": "begins with the first container that ended",
}
"""What alerts read and KvguardFiguresAbsent does not name, with what notices its absence, or why there is none to notice."""


def test_each_alert_is_paired_with_its_absent_case(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "generate"))
    from metric_names import used

    recorded = {rule["record"]: rule["expr"] for group in GROUPS for rule in group["rules"] if "record" in rule}

    def read(expression: str) -> set[str]:
        names = set(used(expression))
        return {found for name in names for found in (read(recorded[name]) if name in recorded else {name})}

    (absent,) = [rule for rule in ALERTS if rule["alert"] == "KvguardFiguresAbsent"]
    figures = set(re.findall(r'"figure", "([^"]+)"', absent["expr"]))
    assert figures == read(absent["expr"]) - {"kvguard_state"}
    everything = set()
    for rule in ALERTS:
        names = read(rule["expr"])
        assert names, rule["alert"]
        assert names <= figures | ABSENT_ELSEWHERE.keys(), rule["alert"]
        everything |= names
    assert ABSENT_ELSEWHERE.keys() <= everything, "no reason without its metric"


def test_each_figure_that_can_be_absent_has_a_runbook_line():
    (absent,) = [rule for rule in ALERTS if rule["alert"] == "KvguardFiguresAbsent"]
    text = (ROOT / absent["annotations"]["runbook_url"]).read_text("utf-8")
    for figure in re.findall(r'"figure", "([^"]+)"', absent["expr"]):
        assert f"`{figure}`" in text
