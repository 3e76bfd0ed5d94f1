"""Cases about speed, drafts and prefixes in a comparison, and about which path a divergence measures."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from compare_fakes import arm, arms, plan, with_divergence
from kvguard.compare.asking import Asker
from kvguard.compare.counters import Counters, counter_findings, read_counters
from kvguard.compare.judge import judge
from kvguard.compare.markdown import markdown
from kvguard.compare.models import AGAIN, REFERENCE, WEAK, Scored, Streamed
from kvguard.compare.outcome import ArmResult, Rules
from kvguard.compare.page import page
from kvguard.compare.results import Rows, Start
from kvguard.compare.statistics import percentile
from kvguard.compare.streams import arrived_as_one, changes, phases
from kvguard.engine.client import EngineClient
from kvguard.evidence.metrics import parse_metrics
from kvguard.vocabulary import EngineFailed

FP8 = "fp8_e4m3"


def counted(text: str) -> Counters:
    return read_counters(parse_metrics(text))


def judged(sixteen: Counters, quantized: Counters) -> ArmResult:
    """A comparison with these counters, rendered in every form."""
    asked = plan(items=60)
    files = [
        one.model_copy(update={"counters": quantized if one.arm == FP8 else sixteen}) for one in arms(asked, lambda _: 1.0)
    ]
    outcome = judge(files, Rules())
    found = next(one for one in outcome.arms if one.arm == FP8)
    text, shown = markdown(outcome), page(outcome)
    for finding in found.findings:
        assert finding.split(":")[0].split("%")[0] in text.replace("\\", "")
        assert finding.split("'")[0].split("%")[0] in shown
    return found


# --- drafts ---


def drafts(drafted: int, accepted: int) -> Counters:
    return counted(
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
    )


@pytest.mark.parametrize(("sixteen", "quantized"), [(21_600, 11_700), (22_000, 19_000)], ids=["29", "59"])
def test_29_59_fewer_drafted_tokens_are_accepted(sixteen: int, quantized: int):
    found = judged(drafts(30_000, sixteen), drafts(30_000, quantized))
    (finding,) = found.findings
    assert f"{quantized / 30_000:.1%} of drafted tokens are accepted, {sixteen / 30_000:.1%} in the 16-bit arm" in finding
    assert "scales of the draft model" in finding
    assert found.acceptance == pytest.approx(quantized / 30_000)
    assert found.verdict != "keep 16-bit", "quality is another verdict"


def test_59_no_drafts_and_few_drafts_say_nothing():
    assert counted("vllm:num_requests_running 1\n").acceptance is None
    assert judged(drafts(100, 90), drafts(100, 10)).findings == ()
    assert judged(Counters(), Counters()).acceptance is None


# --- prefixes ---


def prefixes(caching: str, queries: int, hits: int, block: int = 16) -> Counters:
    return counted(
        f'vllm:cache_config_info{{block_size="{block}",cache_dtype="auto",enable_prefix_caching="{caching}",engine="0"}} 1.0\n'
        f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}\n'
        f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}\n'
    )


def test_51_prefix_caching_in_one_arm_only_makes_speeds_incomparable():
    found = judged(prefixes("True", 50_000, 44_000), prefixes("False", 50_000, 0))
    assert "prefix caching is off, and on in the 16-bit arm" in found.findings[0]
    assert found.speed.void
    assert found.speed.changes == ()


def test_52_no_hits_at_all_are_no_finding():
    """A prefix shorter than a block is never found; kvguard's own questions share none."""
    same = prefixes("True", 12_000, 0, block=800)
    assert (same.hits, same.block_size) == (0.0, 800)
    assert judged(same, same).findings == ()


def test_78_a_warm_prefix_in_one_arm_is_found_and_questions_are_never_warm():
    found = judged(prefixes("True", 10_000, 0), prefixes("True", 10_000, 8_000))
    assert "80% of prompt tokens came from the prefix cache, 0% in the 16-bit arm" in found.findings[0]
    assert judged(prefixes("True", 10_000, 100), prefixes("True", 10_000, 120)).findings == ()
    assert counter_findings(prefixes("None", 0, 0), prefixes("True", 10, 9)) == ()


def test_67_preemptions_stand_beside_the_throughput():
    sixteen, quantized = (counted(f'vllm:num_preemptions_total{{engine="0"}} {count}\n') for count in (97.0, 0.0))
    (finding,) = judged(sixteen, quantized).findings
    assert "preempted 0 times, 97 in the 16-bit arm" in finding
    assert "not the kernels' speed alone" in finding
    asked = plan(items=20)
    outcome = judge([arm(REFERENCE, asked, preemptions=97.0), arm(FP8, asked), arm(WEAK, asked), arm(AGAIN, asked)], Rules())
    assert "97 preemptions" in markdown(outcome)


# --- prefill and decode ---


def streamed(text: str, prompt: int, first: float, rate: float, tokens: int = 64, *, buffered: bool = False) -> Streamed:
    last = first + (tokens - 1) / rate
    return Streamed(text=text, prompt_tokens=prompt, tokens=tokens, first=first, last=last, buffered=buffered)


def test_72_prefill_and_decode_are_never_one_number():
    """Slower prefill and faster decode: end to end they cancel out."""
    sixteen = phases([streamed("a", 1000, 0.5, 200.0), streamed("b", 8000, 5.0, 190.0)])
    quantized = phases([streamed("a", 1000, 0.525, 201.0), streamed("b", 8000, 5.2, 200.0)])
    assert changes(quantized, sixteen) == (
        "1,000 prompt tokens: prefill -4.8 %, decode +0.5 %",
        "8,000 prompt tokens: prefill -3.8 %, decode +5.3 %",
    )
    asked = plan(items=20)
    streams = {REFERENCE: (streamed("a", 1000, 0.5, 200.0),), FP8: (streamed("a", 1000, 0.525, 201.0),)}
    files = [arm(name, asked, streamed=streams.get(name, ())) for name in (REFERENCE, FP8, WEAK, AGAIN)]
    outcome = judge(files, Rules())
    assert "prefill -4.8 %, decode +0.5 %" in page(outcome)


def test_73_a_rate_of_few_tokens_is_left_out_and_says_why():
    (short,) = phases([streamed("a", 32_000, 20.0, 20.0, tokens=4)])
    assert (short.decode, short.prefill) == (None, 1600.0)
    assert short.why == "4 tokens, fewer than the 32 that a rate takes"
    (just,) = phases([streamed("a", 32_000, 20.0, 20.0, tokens=32)])
    assert just.decode == pytest.approx(20.0)
    assert "decode not told (4 tokens" in changes((short,), (just,))[0]


def test_92_a_stream_that_arrives_in_one_block_has_no_rates():
    assert arrived_as_one([1.74, 1.74, 1.7401, 1.7401])
    assert not arrived_as_one([0.272, 0.296, 0.320])
    assert not arrived_as_one([0.1])
    (held,) = phases([streamed("a", 100, 1.74, 1e6, buffered=True)])
    assert (held.prefill, held.decode) == (None, None)
    assert "buffered" in held.why
    (once,) = phases([streamed("a", 100, 1.74, 1e6, buffered=True), streamed("a", 100, 0.25, 50.0)])
    assert once.decode == pytest.approx(50.0), "one stall of the machine is not a buffer"


@contextmanager
def streaming(gate: threading.Event | None, *, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An engine that streams 40 tokens: all at once, or one after the other when `gate` is set after each."""
    asked: list[dict[str, Any]] = []

    class Engine(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Silent."""

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            if status != 200:
                self.wfile.write(b'{"error": {"message": "no room"}}')
                return
            events = [{"choices": [{"text": "x"}]}] * 40
            end = {"choices": [], "usage": {"prompt_tokens": 70, "completion_tokens": 40}}
            lines = [f"data: {json.dumps(event)}\n\n".encode() for event in (*events, end)] + [b"data: [DONE]\n\n"]
            if gate is None:
                self.wfile.write(b"".join(lines))
                return
            for line in lines:
                self.wfile.write(line)
                self.wfile.flush()
                gate.wait(0.002)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def asker(client: EngineClient, directory: Path) -> Asker:
    asked = plan(("throughput",), items=1)
    rows = Rows(directory / "arm.jsonl")
    rows.begin(Start(record_digest="sha256:r", plan_digest=asked.digest))
    return Asker(client=client, model="m", chat=True, plan=asked, rows=rows, told=lambda *_: None)


def stream_all(target: str, directory: Path) -> list[Streamed]:
    async def work() -> list[Streamed]:
        async with EngineClient(target) as client:
            one = asker(client, directory)
            try:
                await one.stream()
                await one.stream()  # all there: nothing is asked again
            finally:
                one.rows.close()
            return [row for row in one.rows.rows if isinstance(row, Streamed)]

    return asyncio.run(work())


def test_92_streams_are_timed_and_what_holds_them_back_is_seen(tmp_path: Path):
    with streaming(None) as (target, asked):
        held = stream_all(target, tmp_path / "held")
        assert len(held) == len(asked) == 4, "two prompts, two runs"
        assert all(row.buffered and (row.prompt_tokens, row.tokens) == (70, 40) for row in held)
        assert all(body["stream"] and body["ignore_eos"] and body["max_tokens"] >= 32 for body in asked)
        assert len({body["cache_salt"] for body in asked}) == 4
        assert [len(body["prompt"]) for body in asked[:2]] == sorted(len(body["prompt"]) for body in asked[:2])
    with streaming(threading.Event()) as (target, _):
        flowing = stream_all(target, tmp_path / "flowing")
    assert not all(row.buffered for row in flowing)
    assert all(row.last > row.first for row in flowing)


def test_92_an_engine_that_does_not_stream_ends_the_arm(tmp_path: Path):
    with streaming(None, status=503) as (target, _), pytest.raises(EngineFailed, match="HTTP 503: no room"):
        stream_all(target, tmp_path)


# --- divergence ---


def test_75_each_figure_says_which_path_it_measures():
    files = with_divergence(arms(plan(items=20), lambda _: 1.0), {REFERENCE: 0.0, FP8: 0.2, WEAK: 3.0, AGAIN: 0.01})
    outcome = judge(files, Rules())
    found = next(one for one in outcome.arms if one.arm == FP8).divergence
    assert found.scoring_path == {
        "decode": "decode",
        "flips": "decode",
        "kl": "decode",
        "forced": "prefill",
        "forced_flips": "prefill",
    }
    assert json.loads(outcome.model_dump_json())["arms"][1]["divergence"]["scoring_path"]["forced"] == "prefill"


def test_87_the_tail_is_told_as_well_as_the_mean():
    """A few tokens far off, in a mean that looks well."""
    asked = plan(items=20)
    deltas = (0.0,) * 93 + (2.0,) * 7
    scored = (Scored(arm=FP8, text="text-000", tokens=100, sum_abs_delta=sum(deltas), flips=7, deltas=deltas),)
    files = [one.model_copy(update={"scored": scored if one.arm == AGAIN else ()}) for one in arms(asked, lambda _: 1.0)]
    outcome = judge(files, Rules())
    found = next(one for one in outcome.arms if one.arm == FP8).divergence
    assert found.decode.value == pytest.approx(0.14)
    assert found.tail == (2.0, 2.0)
    assert "2.000 / 2.000" in page(outcome)


def test_87_percentiles_of_too_few_tokens_are_not_told():
    assert percentile([1.0] * 19, 0.95) is None
    assert percentile([0.0] * 19 + [1.0], 0.95) == 0.0
    assert percentile(list(range(100)), 0.99) == 98
    assert percentile(list(range(99)), 0.99) is None
    assert percentile([], 0.5) is None
