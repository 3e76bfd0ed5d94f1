"""Writes what is made from other files: the chart's schema, README and copies, the dashboards, the rules' tests.

`python deploy/generate` writes, `python deploy/generate --check` says what is not as it would be written, and exits 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from chart_readme import chart_readme
from chart_schema import chart_schema
from chart_values import needed, read_values
from dashboards import DASHBOARDS, UnknownMetric, render
from metric_names import defined, recorded, rules, undefined
from rule_tests import rule_tests

ROOT = Path(__file__).resolve().parents[2]
_CHART = ROOT / "helm" / "kvguard"
_DEPLOY = ROOT / "deploy"
_RULES = _DEPLOY / "prometheus" / "rules.yaml"


def generated() -> dict[Path, str]:
    """Every generated file with its content. Raises UnknownMetric for a rule or panel that asks for what nobody defines."""
    known = defined() | recorded(_RULES)
    for rule in rules(_RULES):
        if missing := undefined(rule["expr"], known):
            raise UnknownMetric(f"{rule.get('alert') or rule['record']}: no metric {', '.join(missing)}")
    values = read_values(_CHART / "values.yaml")
    alerts = tuple(rule["alert"] for rule in rules(_RULES) if "alert" in rule)
    files = {
        _CHART / "values.schema.json": json.dumps(chart_schema(values, alerts), indent=1) + "\n",
        _CHART / "README.md": chart_readme(values),
        _CHART / "files" / "keys.txt": "".join(f"{name}\n" for name in needed(values)),
        # A chart can only hold files of its own.
        _CHART / "files" / "rules.yaml": _RULES.read_text("utf-8"),
        _CHART / "files" / "admission.yaml": (_DEPLOY / "admission" / "validating-admission-policy.yaml").read_text("utf-8"),
        _DEPLOY / "prometheus" / "rules_test.yaml": rule_tests(),
    }
    for dashboard in DASHBOARDS:
        text = render(dashboard, known)
        files[_DEPLOY / "grafana" / f"{dashboard.uid}.json"] = text
        files[_CHART / "files" / "dashboards" / f"{dashboard.uid}.json"] = text
    return files


def main(arguments: list[str]) -> int:
    """Write or check."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python deploy/generate [--check]\n")
        return 2
    try:
        files = generated()
    except UnknownMetric as error:
        sys.stderr.write(f"{error}\n")
        return 1
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if arguments:
            sys.stderr.write(f"{name}: not as generated; run python deploy/generate\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], "utf-8")
            print(name)
    return int(bool(stale and arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
