"""templates/calibration.yaml: scales measured once, mounted by all."""

from __future__ import annotations

import re
import select
import subprocess
import sys
import threading
import time
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


def test_several_measure_once(tmp_path):
    """Replicas that measure for themselves: the first to lock does, also as the command it becomes; the others wait."""
    script = (CHART / "files" / "once.py").read_text("utf-8")
    scales, go = tmp_path / "v1", tmp_path / "go"
    measure = (
        "import os, sys, time\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "os.mkdir(sys.argv[1]); print('measured')"
    )
    command = [sys.executable, "-c", script, str(scales), sys.executable, "-c", measure, str(scales), str(go)]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    waiting = [process.stdout for process in several if process.stdout]
    ready: set[int] = set()
    deadline = time.monotonic() + 120
    while len(ready) < 2 and time.monotonic() < deadline:  # two say that they wait, and the third says nothing
        ready |= {stream.fileno() for stream in select.select(waiting, [], [], 1)[0]}
    go.touch()
    said = sorted(process.communicate(timeout=120)[0] for process in several)
    assert [process.returncode for process in several] == [0, 0, 0]
    assert sum("measured\n" in text for text in said) == 1
    assert sum("another one measures" in text and "there already" in text for text in said) == 2


def test_a_claim_that_cannot_be_written_is_named(tmp_path):
    script = (CHART / "files" / "once.py").read_text("utf-8")
    command = [sys.executable, "-c", script, str(tmp_path / "none" / "v1"), "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot write there (No such file or directory); look at the claim" in done.stderr


def test_replicas_that_measure_for_themselves_need_no_gpu_more():
    manifests = with_least(merged(VALUES, {"calibration": {"by": "replica"}}))
    assert not of(manifests, "Job")
    spec = one(manifests, "Deployment")["spec"]["template"]["spec"]
    measuring, serving = container(spec, "calibrate"), container(spec)
    job = container(one(with_least(VALUES), "Job")["spec"]["template"]["spec"], "calibrate")
    assert {name: measuring[name] for name in ("command", "args", "resources", "env")} == {
        name: job[name] for name in ("command", "args", "resources", "env")
    }
    # Init containers run before the others: the pod asks for the larger of both, which is what it serves with.
    assert measuring["resources"]["limits"] == serving["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert [item["name"] for item in spec["initContainers"]] == ["kvguard", "model", "calibrate"]
    assert serving["args"][serving["args"].index("--scales") + 1] == measuring["command"][3]
    (claim,) = [volume["persistentVolumeClaim"] for volume in spec["volumes"] if volume["name"] == "scales"]
    assert claim == {"claimName": "scales"}, "writable in the pod"
    assert {"name": "scales", "mountPath": "/scales", "readOnly": True} in serving["volumeMounts"]


def test_who_measures_has_the_users_volumes():
    extra = {
        "volumes": [{"name": "plugins", "emptyDir": {}}],
        "volumeMounts": [{"name": "plugins", "mountPath": "/plugins"}],
        "envFrom": [{"secretRef": {"name": "s"}}],
    }
    job = one(with_least(merged(VALUES, extra)), "Job")["spec"]["template"]["spec"]
    assert extra["volumes"][0] in job["volumes"]
    assert extra["volumeMounts"][0] in container(job, "calibrate")["volumeMounts"]
    assert container(job, "calibrate")["envFrom"] == extra["envFrom"]


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
