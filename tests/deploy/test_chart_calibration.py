"""templates/calibration.yaml: scales measured once, mounted by all."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from typing import Any

import pytest
from charts import CHART, container, merged, of, one, with_least

VALUES: dict[str, Any] = {
    "model": {"cache": {"claim": "hub"}},
    "calibration": {"enabled": True, "claim": "scales", "name": "v1", "extraArgs": ["--headroom", "1.2"]},
    "engine": {"args": ["--max-model-len", "8192"], "gpus": 2},
}


def test_none_by_default():
    manifests = with_least({})
    assert not of(manifests, "Job")
    assert "--scales" not in container(one(manifests, "Deployment")["spec"]["template"]["spec"])["args"]


def test_the_job_writes_what_the_replicas_load():
    manifests = with_least(VALUES)
    job = one(manifests, "Job")["spec"]["template"]["spec"]
    args = container(job, "calibrate")["args"]
    folder = args[3]
    assert re.fullmatch("/scales/v1-[0-9a-f]{8}", folder)
    assert container(job, "calibrate")["command"][3:] == [folder, "python3", "-I", "-S", "/opt/kvguard"]
    assert args == [
        *("calibrate", "Qwen/Qwen3-8B", "--out", folder, "--headroom", "1.2", "--"),
        *("--tensor-parallel-size", "2", "--max-model-len", "8192"),
    ]
    spec = one(manifests, "Deployment")["spec"]["template"]["spec"]
    served = container(spec)["args"]
    assert served[served.index("--scales") + 1] == folder
    assert container(spec, "scales")["command"][3] == folder
    claims = [next(v for v in pod["volumes"] if v["name"] == "scales")["persistentVolumeClaim"] for pod in (job, spec)]
    assert [claim["claimName"] for claim in claims] == ["scales", "scales"]
    assert [claim.get("readOnly", False) for claim in claims] == [False, True]
    assert job["restartPolicy"] == "Never"


def test_its_name_changes_with_what_it_measures():
    def name(values: dict[str, Any]) -> str:
        return one(with_least(merged(VALUES, values)), "Job")["metadata"]["name"]

    assert name({}) == name({"replicas": 3})
    assert len({name({}), name({"calibration": {"name": "v2"}}), name({"engine": {"image": {"tag": "v0.33.0"}}})}) == 3


def test_its_folder_changes_with_what_is_measured_and_with_nothing_else():
    """Else replicas of a new engine would start on an old artefact, or another node would measure anew."""

    def folder(values: dict[str, Any]) -> str:
        job = one(with_least(merged(VALUES, values)), "Job")["spec"]["template"]["spec"]
        return str(container(job, "calibrate")["args"][3])

    same: list[dict[str, Any]] = [
        {"nodeSelector": {"gpu": "h100"}},
        {"tolerations": [{"operator": "Exists"}]},
        {"replicas": 3},
        {"engine": {"resources": {"requests": {"cpu": "8"}}}},
        {"env": [{"name": "A", "value": "b"}]},
    ]
    assert {folder(values) for values in same} == {folder({})}
    other: list[dict[str, Any]] = [
        {"engine": {"image": {"tag": "v0.33.0"}}},
        {"engine": {"image": {"digest": "sha256:" + "a" * 64}}},
        {"engine": {"args": ["--max-model-len", "4096"]}},
        {"model": {"name": "Qwen/Qwen3-4B"}},
        {"model": {"revision": "a" * 40}},
        {"calibration": {"extraArgs": []}},
        {"calibration": {"name": "v2"}},
    ]
    assert len({folder(values) for values in [{}, *other]}) == len(other) + 1


def test_a_job_measures_once(tmp_path):
    """A Job cannot be changed, so another node selector makes another Job; it leaves the artefact alone."""
    script = (CHART / "files" / "once.py").read_text("utf-8")
    scales = tmp_path / "v1"
    measure = [sys.executable, "-c", "import os, sys; os.mkdir(sys.argv[1]); print('measured')", str(scales)]
    said = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script, str(scales), *measure], capture_output=True, text=True, check=True)
        said.append(done.stdout)
    assert said[0] == "measured\n"
    assert "there already" in said[1]


def test_a_jobs_own_failure_is_the_jobs(tmp_path):
    script = (CHART / "files" / "once.py").read_text("utf-8")
    fails = [sys.executable, "-c", "raise SystemExit(4)"]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "v1"), *fails], check=False)
    assert done.returncode == 4


def test_replicas_wait_also_without_other_init_containers():
    built = merged(VALUES, {"kvguard": {"delivery": "builtin"}, "model": {"source": "pvc", "pvc": {"claim": "m"}}})
    spec = one(with_least(built), "Deployment")["spec"]["template"]["spec"]
    assert [item["name"] for item in spec["initContainers"]] == ["scales"]


def test_the_waiting_ends_with_the_folder_or_with_a_reason(tmp_path):
    script = (CHART / "files" / "wait.py").read_text("utf-8")
    scales = tmp_path / "v1"
    late = subprocess.run([sys.executable, "-c", script, str(scales), "0.2"], capture_output=True, text=True, check=False)
    assert late.returncode == 1
    assert "look at the calibration Job" in late.stderr
    timer = threading.Timer(0.5, scales.mkdir)
    timer.start()
    subprocess.run([sys.executable, "-c", script, str(scales), "60"], check=True, timeout=90)
    timer.join()


def test_every_option_is_one_that_kvguard_has():
    import typer

    from kvguard.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if "calibrate" not in commands:
        pytest.skip("this version has no `kvguard calibrate`")
    known = {name for parameter in commands["calibrate"].params for name in parameter.opts}
    assert {"--out", "--headroom"} <= known
    assert "--scales" in {name for parameter in commands["serve"].params for name in parameter.opts}
