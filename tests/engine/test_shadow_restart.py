"""A primary with ruined scales collapses in sight of its probes; restarted on 16-bit it falls to the noise floor."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guarded import KVGUARD, Guarded, probing
from kvguard.vocabulary import ExitCode

OPTIONS = probing("max-tokens=48")
SIXTEEN_BIT = "kv_cache: {dtype: 16bit}\nshadow: {measure_ranges: true}\n"
SUBJECTS = ("a lighthouse", "bread", "a violin", "rain", "chess", "the Moon", "a bridge", "tea", "a clock", "snow")
COST = 'kvguard_shadow_abs_delta_nats{bound="%s",comparison="cost"}'


def _report(served: Guarded) -> dict[str, Any]:
    report: dict[str, Any] = served.management("/shadow").json()
    return report


def _wait(served: Guarded, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 300
    while not reached(report := _report(served)):
        assert time.monotonic() < deadline, report
        time.sleep(0.5)
    return report


def _probed(served: Guarded, requests: int) -> dict[str, Any]:
    """The report once this many more clients' requests were probed."""
    report = _wait(served, lambda report: report["state"] != "checking")
    until = report["probes"] + requests
    for number in range(10 * requests):  # more than asked for, where a pause of the machine had some dropped
        if report["probes"] >= until:
            break
        question = f"Write two sentences about {SUBJECTS[number % len(SUBJECTS)]}."
        assert served.chat(question, max_tokens=48, temperature=1.0, seed=number).status_code == 200
        report = _wait(served, _nothing_waits)
    assert report["probes"] >= until, report
    return report


def _nothing_waits(report: dict[str, Any]) -> bool:
    return all(row["offered"] == row["done"] + sum(row["dropped"].values()) for row in report["coverage"])


def _exported(served: Guarded, name: str) -> float:
    lines = served.management("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


@pytest.fixture(scope="module")
def ruined_low(guarded: Callable[..., Guarded]) -> float:
    """Lower bound of what ruined scales cost, as the metrics of a primary that ran with them said."""
    served = guarded("kv_scheme_ruined_scales", "--kv-cache-dtype", "fp8_e4m3", options=OPTIONS).wait_ready()
    report = _probed(served, 5)
    assert report["collapsed"] >= 1, report
    assert (report["state"], report["alarm"]["status"]) == ("regression", "regression")
    assert _exported(served, "kvguard_shadow_collapsed_total") >= 1
    assert _exported(served, 'kvguard_shadow_state{state="regression"}') == 1
    _probed(served, 12)
    low = _exported(served, COST % "low")
    assert served.stop() == 0
    return low


@pytest.fixture(scope="module")
def restarted(guarded: Callable[..., Guarded], ruined_low: float) -> Guarded:
    """The same checkpoint and command, on 16-bit."""
    served = guarded("kv_scheme_ruined_scales", policy=SIXTEEN_BIT, options=OPTIONS).wait_ready()
    _wait(served, lambda report: report["state"] != "checking")
    return served


def test_ruined_scales_collapse_within_five_probes_and_sixteen_bit_is_at_the_noise_floor(
    ruined_low: float, restarted: Guarded
) -> None:
    report = _probed(restarted, 10)
    assert report["fidelity"]["explained_by"] == "16bit"
    assert ruined_low > 1.0
    floor = _exported(restarted, "kvguard_shadow_noise_floor_nats")
    assert _exported(restarted, COST % "low") <= floor < 0.1
    assert _exported(restarted, COST % "estimate") < 0.1
    assert report["state"] != "regression"


def _whatif(served: Guarded, *arguments: str) -> dict[str, Any]:
    command = [KVGUARD, "whatif", f"http://127.0.0.1:{served.management_port}", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["estimates"]
    return found


def test_what_if_with_given_scales(restarted: Guarded, tmp_path: Path) -> None:
    """Scales of 1.0 from a file are `unit`; by layer or by head is one; ruined ones cost what they cost the engine."""
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(f"Say something about {subject}." for subject in SUBJECTS[:4]))
    found: dict[str, dict[str, Any]] = {}
    for name, scales in (("unit", 1.0), ("heads", [1.0, 1.0, 1.0]), ("ruined", 0.002)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"k": [scales] * 30, "v": [scales] * 30}))
        found |= {
            f"{name}: {label}": one["abs_delta"]
            for label, one in _whatif(
                restarted, "--greedy", "--prompts", str(prompts), "--formats", "fp8_e4m3", "--scales", str(path)
            ).items()
        }
    asked = ("--greedy", "--prompts", str(prompts), "--formats", "fp8_e4m3,int8,int8_per_token_head")
    word = _whatif(restarted, *asked, "--scales", "unit")
    given = "fp8_e4m3 nearest, scales given"
    unit = word["fp8_e4m3 nearest, scales unit"]["abs_delta"]["value"]
    assert found[f"unit: {given}"]["value"] == pytest.approx(unit, rel=0.3), "greedy answers can differ in a near tie"
    assert found[f"heads: {given}"]["value"] == pytest.approx(found[f"unit: {given}"]["value"], rel=0.3)
    assert found[f"ruined: {given}"]["low"] > 1.0
    per_token = word["int8_per_token_head nearest"]["abs_delta"]["value"]
    assert per_token < unit < word["int8 nearest, scales unit"]["abs_delta"]["value"]
    own = _whatif(restarted, "--greedy", "--prompts", str(prompts), "--formats", "fp8_e4m3")
    foreseen = own["fp8_e4m3 nearest, scales engine"]["abs_delta"]["low"]
    assert foreseen > 1.0, "the checkpoint's own scales, before anybody switches"


def test_scales_for_another_model_are_named(restarted: Guarded, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text('{"k": [1.0], "v": [1.0]}')
    command = [KVGUARD, "whatif", f"http://127.0.0.1:{restarted.management_port}", "--scales", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == ExitCode.ENGINE_FAILED_TO_START
    assert "no prompt could be probed: prompt 1: " in done.stderr
    assert "k scales are given for 1 layers, the engine has 30" in done.stderr


def test_live_what_if_is_about_clients_requests(restarted: Guarded) -> None:
    asked = subprocess.Popen(
        [
            KVGUARD,
            "whatif",
            f"http://127.0.0.1:{restarted.management_port}",
            "--live",
            "--probes",
            "4",
            "--json",
            "--scales",
            "unit",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _wait(restarted, lambda report: bool(report["whatif"]))
        _probed(restarted, 4)
        found = json.loads(asked.communicate(timeout=300)[0])
    finally:
        asked.kill()
        asked.wait()
    assert found["requests"] >= 4
    assert list(found["estimates"]) == ["cost", "fp8_e4m3 nearest, scales unit", "fp8_e5m2 nearest, scales unit"]
    values = [one["abs_delta"]["value"] for one in found["estimates"].values()]
    assert values == sorted(values), "noise, e4m3, e5m2"
    assert _report(restarted)["whatif"] == {}


def test_a_calibration_from_what_clients_requests_spanned(restarted: Guarded, engine_bin: Path, tmp_path: Path) -> None:
    """Over the checkpoint's own, ruined scales; no engine is started, and no text has left the first one."""
    url = f"http://127.0.0.1:{restarted.management_port}"
    measured = restarted.management("/shadow/ranges").json()
    assert measured["sequences"] >= 10
    command = [KVGUARD, "calibrate", restarted.model, "--engine", str(engine_bin), "--from-traffic", url]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "calibration"), "--json"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["prompts"]["texts"], report["prompts"]["of"]) == (measured["sequences"], "clients' requests")
    layers = list(measured["ranges"].values())
    assert len(report["layers"]) == len(layers) == 30
    for row, layer in zip(report["layers"], layers, strict=True):
        assert row["k"]["amax_by_head"] == layer["k"]["amax"]
        assert row["k"]["scale"] == pytest.approx(2 * max(layer["k"]["amax"]) / 448, rel=0.01)
