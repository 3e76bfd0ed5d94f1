"""The page for people: what it says, that it says it safely, and that a narrow screen can show it."""

from __future__ import annotations

import asyncio
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvguard.evidence.metrics import EngineFigures
from kvguard.guard.gate import Status
from kvguard.guard.state import State
from kvguard.proxy.management import management_app
from kvguard.proxy.status_page import MAX_ROWS, content_security_policy, status_page
from kvguard.vocabulary import Check, CheckResult, Claim, Confidence, Effective, ScaleState, Source, Stage

TENSORS = Claim(
    stage=Stage.OBSERVED, source=Source.TENSORS, field="kv_cache_dtype", value="fp8_e4m3", where="rank 0 layer model.layers.0"
)
CLAIMS = [
    TENSORS.model_dump(mode="json"),
    Claim(
        stage=Stage.OBSERVED,
        source=Source.METRICS,
        field="kv_cache_dtype",
        where="metric vllm:cache_config_info label cache_dtype",
        note="auto: no information",
    ).model_dump(mode="json"),
    Claim(
        stage=Stage.DECLARED, source=Source.CONFIG_JSON, field="kv_cache_scheme", value={"num_bits": 8}, where="config.json"
    ).model_dump(mode="json"),
]
PASSED = Check(name="kv_cache_dtype", result=CheckResult.PASS, required="fp8_e4m3", found="fp8_e4m3", where="tensors")
FAILED = Check(
    name="kv_scales",
    result=CheckResult.FAIL,
    required="checkpoint scales",
    found="unit_default",
    where="model.layers.0.self_attn",
    action="add scale tensors to the checkpoint",
)
SERVING = Status(
    state=State.SERVING,
    reason="serving",
    effective=Effective(
        dtype="fp8_e4m3",
        confidence=Confidence.PROVEN,
        scales=ScaleState.CHECKPOINT,
        attention_backends=("FLASH_ATTN",),
        supported_by=(TENSORS,),
    ),
    checks=(PASSED,),
    last_verified=1_700_000_000.0,
    record_digest="sha256:44f9981a6bc6",
    record_path="/var/lib/kvguard/kvguard/records/a.json",
    engine_version="0.32.0",
    model="Qwen/Qwen3-8B",
    on_violation="hold",
    gauges=EngineFigures(
        kv_bytes_total=24 << 30,
        kv_bytes_used=float(6 << 30),
        kv_tokens_total=180_000,
        bytes_per_token=73_728.0,
        running=12.0,
        limit=48,
    ),
)
SHADOW: dict[str, Any] = {
    "state": "regression",
    "reason": "the mean is above its bound",
    "baseline": 0.075,
    "alarm": {"status": "regression", "reason": "evidence 1200", "evidence": 1200.0},
    "estimates": {
        "cost": {
            "requests": 41,
            "abs_delta": {"value": 0.11, "low": 0.09, "high": 0.13},
            "flip_rate": {"value": 0.07, "low": 0.05, "high": 0.09},
        },
        "unexplained": {"requests": 0, "abs_delta": {"value": None, "low": None}, "flip_rate": {"value": None, "low": None}},
    },
}


def page(status: Status = SERVING, claims: list[dict[str, Any]] | None = None, **given_: Any) -> str:
    return status_page(status, CLAIMS if claims is None else claims, **{"has_policy": True, "shadow": None, **given_})


class Reader(HTMLParser):
    """What a browser would make of it: text, tags with attributes, and whether every tag is closed in order."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_a_serving_engine_in_one_look():
    read = Reader(page())
    assert read.open == []
    assert "serving ready" in read.text
    assert "KV cache fp8_e4m3 , proven; scales checkpoint" in read.text
    assert "Qwen/Qwen3-8B on vLLM 0.32.0, FLASH_ATTN" in read.text
    assert "Nothing: every check passes." in read.text
    assert "sha256:44f9981a6bc6" in read.text
    assert "2023-11-14 22:13:20+00:00" in read.text
    assert {"/record", "/evidence", "/metrics"} <= {attrs["href"] for tag, attrs in read.tags if tag == "a"}


def test_evidence_names_its_source_its_place_and_what_decides():
    text = Reader(page()).text
    assert "tensors kv_cache_dtype fp8_e4m3 decides rank 0 layer model.layers.0" in text
    assert "metrics kv_cache_dtype no information metric vllm:cache_config_info label cache_dtype auto: no information" in text
    assert "config_json kv_cache_scheme {'num_bits': 8} config.json" in text


def test_what_differs_from_policy_says_what_to_do():
    status = SERVING.model_copy(
        update={"state": State.REFUSED, "reason": "refused by policy: scales", "checks": (PASSED, FAILED)}
    )
    html = page(status)
    text = Reader(html).text
    assert "refused not ready" in text
    assert "refused by policy: scales" in text
    differs = text[text.index("What differs from policy") : text.index("KV memory")]
    assert "kv_scales fail checkpoint scales unit_default add scale tensors to the checkpoint" in differs
    assert "kv_cache_dtype" not in differs
    assert "badge bad" in html


def test_unready_while_serving_says_why():
    text = Reader(page(SERVING.model_copy(update={"unready": "quality regression: shown"}))).text
    assert "serving not ready" in text
    assert "quality regression: shown" in text


def test_drift_and_a_verification_that_failed_are_told():
    drifted = SERVING.model_copy(update={"state": State.DRIFTED, "drift": "kv_cache_dtype: was fp8_e4m3, is bfloat16"})
    assert "drifted ready" in Reader(page(drifted)).text
    assert "Drifted: kv_cache_dtype: was fp8_e4m3, is bfloat16" in Reader(page(drifted)).text
    stale = SERVING.model_copy(update={"stale": "no answer within 60 s"})
    assert "The last verification could not confirm this: no answer within 60 s" in Reader(page(stale)).text
    assert "could not confirm" not in Reader(page()).text


def test_figures_that_are_not_given_are_not_zero():
    text = Reader(page()).text
    memory = text[text.index("KV memory") : text.index("Checks")]
    assert "held 6.00 GiB capacity 24.00 GiB tokens held not given tokens it takes 180,000" in memory
    assert "running 12 waiting not given limit 48 occupancy 25.0 %" in memory


def test_nothing_known_yet():
    text = Reader(page(Status(), [], has_policy=False)).text
    assert "starting not ready" in text
    assert "Nothing has been checked yet." in text
    assert "no policy: only integrity is checked" in text
    assert "No run record yet" in text


def test_quality_has_intervals_or_says_there_is_none():
    assert "Shadow probes are off" in Reader(page()).text
    text = Reader(page(shadow=SHADOW)).text
    assert "regression the mean is above its bound — evidence 1200" in text
    assert "cost mean |Δ logprob| 0.1100 nats 0.0900 nats to 0.1300 nats 41" in text
    assert "unexplained mean |Δ logprob| not given no interval 0" in text
    assert "noise floor 0.0750 nats" in text


def test_many_claims_end_with_a_pointer():
    text = Reader(page(claims=CLAIMS[:1] * (MAX_ROWS + 7))).text
    assert "7 more in /evidence" in text


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


@given(st.one_of(st.just(HOSTILE), st.text(max_size=40)))
def test_nothing_an_engine_or_a_checkpoint_says_becomes_markup(text):
    check = Check(name=text, result=CheckResult.WARN, required=text, found=text, where=text, action=text)
    effective = Effective(
        dtype=text, scales_detail=text, attention_backends=(text,), contradictions=(text,), confidence=Confidence.ECHOED
    )
    status = Status(
        reason=text,
        unready=text,
        effective=effective,
        checks=(check,),
        record_digest=text,
        record_path=text,
        engine_version=text,
        model=text,
        on_violation=text,
        drift=text,
        stale=text,
    )
    claim = {"stage": "observed", "source": text, "field": text, "value": [text], "where": text, "note": text}
    shadow = {"state": text, "reason": text, "alarm": {"reason": text}, "estimates": {text: {"requests": 1}}}
    harmless = Reader(
        page(Status(), [{**claim, "source": "x", "field": "x", "value": 1, "where": "x", "note": "x"}], shadow=SHADOW)
    )
    read = Reader(page(status, [claim], shadow=shadow))
    assert read.open == []
    assert {tag for tag, _ in read.tags} <= {tag for tag, _ in harmless.tags} | {"code", "strong", "p", "caption"}
    assert {name for _, attrs in read.tags for name in attrs} <= {name for _, attrs in harmless.tags for name in attrs}


def test_the_page_is_served_with_a_policy_that_forbids_scripts():
    app = management_app(lambda: SERVING, lambda: None, lambda: None, lambda: CLAIMS, CollectorRegistry())

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://kvguard") as client:
            return await client.get("/")

    answer = asyncio.run(ask())
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == content_security_policy()
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "<script" not in answer.text
    assert not re.search(r'(src|href)="(?!/)', answer.text)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_it_without_sideways_scrolling(tmp_path, width):
    """The page is framed at the width of a phone and of a desk, and measured by a script of the frame's, not the page's."""
    refused = SERVING.model_copy(
        update={"state": State.REFUSED, "reason": "refused by policy: scales", "checks": (PASSED, FAILED)}
    )
    (tmp_path / "page.html").write_text(page(refused, shadow=SHADOW), "utf-8")
    frame = f"""<!doctype html><body style="margin:0">
<iframe id=f src=page.html style="border:0;width:{width}px;height:3000px"></iframe>
<script>f.onload = () => {{ const d = f.contentDocument.documentElement;
document.title = [d.scrollWidth, d.scrollHeight, d.querySelectorAll('td').length].join(' '); }}</script>"""
    (tmp_path / "frame.html").write_text(frame, "utf-8")
    assert CHROMIUM is not None
    common = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path}/profile",
        "--virtual-time-budget=5000",
    ]
    target = f"file://{tmp_path}/frame.html"
    seen = subprocess.run([*common, "--dump-dom", target], capture_output=True, text=True, timeout=120, check=True).stdout
    measured = re.search(r"<title>(\d+) (\d+) (\d+)</title>", seen)
    assert measured is not None, seen[:500]
    wide, high, cells = (int(number) for number in measured.groups())
    assert wide <= width
    assert high > 600
    assert cells > 20
    image = tmp_path / "page.png"
    shot = [*common, f"--screenshot={image}", f"--window-size={max(width, 500)},{high}", target]
    subprocess.run(shot, capture_output=True, timeout=120, check=True)
    assert _size(image) == (max(width, 500), high)


def _size(png: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height
