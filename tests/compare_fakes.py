"""Finished arms of a comparison that never ran: answers as a test wants them, records as starts make them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvguard.compare.models import (
    AGAIN,
    REFERENCE,
    WEAK,
    Answered,
    ArmFile,
    Forced,
    Generated,
    Item,
    Plan,
    Scored,
    Throughput,
    is_sixteen_bit,
)
from kvguard.compare.planning import make_plan
from kvguard.record.build import build_record
from kvguard.record.statement import Statement
from kvguard.vocabulary import Effective, ScaleState
from record_samples import layer, sample

Score = Callable[[int], float]
LIMITS = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 2048}


def plan(tasks: Sequence[str] = ("arithmetic",), *, items: int = 50, quick: bool = False, seed: int = 0) -> Plan:
    return make_plan(
        seed=seed, quick=quick, tasks=tasks, own=(), max_model_len=2048, max_num_seqs=8, tokens_per_hundred=1200, items=items
    )


def record(dtype: str, scales: ScaleState, **more: Any) -> dict[str, Any]:
    tokens = 46592 if dtype == "bfloat16" else 93184
    layers = [layer(i, 1.0, dtype=dtype) for i in range(3)]
    return build_record(sample(dtype=dtype, scales=scales, tokens=tokens, layers=layers, size=1073479680, **more))


def arm(
    name: str,
    asked: Plan,
    score: Score = lambda place: 1.0,
    *,
    finish: str = "stop",
    tokens: int = 20,
    text: str = "",
    collapse: Score = lambda place: 0.0,
    dtype: str | None = None,
    backend: str = "CPU_ATTN",
    **more: Any,
) -> ArmFile:
    """`score` gives each item's score by its place in its task; every text differs by arm unless `text` is given."""
    sixteen = name == AGAIN or is_sixteen_bit(name)
    kind = dtype or ("bfloat16" if sixteen else "fp8_e4m3")
    scales = (
        ScaleState.NOT_QUANTIZED if kind == "bfloat16" else ScaleState.RUNTIME_ONCE if name == WEAK else ScaleState.UNIT_DEFAULT
    )
    document = more.pop("record", None) or record(kind, scales)
    statement = Statement.model_validate(document)
    effective: Effective = statement.effective
    places = _places(asked.items)
    answers = tuple(
        Answered(
            task=item.task,
            item=item.id,
            text=text or f"{name}: {item.id}",
            score=score(places[item.task, item.id]),
            finish=finish,
            tokens=tokens,
            prompt_tokens=100,
            collapse="repeated word" if collapse(places[item.task, item.id]) else "",
        )
        for item in asked.items
    )
    size = 1073479680
    given: dict[str, Any] = {
        "arm": name,
        "model": "models/small",
        "command": ("vllm", "serve", "models/small", "--enforce-eager"),
        "record": document,
        "record_digest": document["predicate"]["content_digest"],
        "effective": effective.model_copy(update={"attention_backends": (backend,), "kv_bytes": size}),
        "limits": LIMITS,
        "chat_template": True,
        "template_digest": "sha256:" + "0" * 64,
        "preemptions": 0.0,
        "plan": asked,
        "answers": answers,
        "generated": (),
        "forced": (),
        "scored": (),
        "throughput": (Throughput(requests=16, tokens=512, prompt_tokens=100, seconds=4.0),) * 2,
    }
    return ArmFile.model_validate({**given, **more})


def arms(asked: Plan, quantized: Score, reference: Score = lambda place: 1.0, weak: Score = lambda place: 0.0) -> list[ArmFile]:
    """The reference, fp8_e4m3 with these scores, the weak arm and the reference again."""
    return [
        arm(REFERENCE, asked, reference),
        arm("fp8_e4m3", asked, quantized),
        arm(WEAK, asked, weak),
        arm(AGAIN, asked, reference, text=""),
    ]


def with_divergence(files: Sequence[ArmFile], deltas: Mapping[str, float]) -> list[ArmFile]:
    """The arms with three decoded texts each, whose mean |Δ logprob| is as given by arm."""
    scored = tuple(
        Scored(arm=name, text=f"text-{n:03d}", tokens=10, sum_abs_delta=10 * value * (1 + n / 10), flips=n, kl_low=0.1)
        for name, value in deltas.items()
        for n in range(3)
    )
    decoded = tuple(
        Generated(text=f"text-{n:03d}", prompt_ids=(1, 2), ids=(3, 4), logprobs=(-1.0, -2.0), top=(((3, -1.0),), ((4, -2.0),)))
        for n in range(3)
    )
    return [
        one.model_copy(
            update={
                "generated": decoded,
                "forced": tuple(
                    Forced(text=f"text-{n:03d}", logprobs=(-1.0 - deltas[one.arm], -2.0), top1=(3, 4)) for n in range(3)
                ),
                "scored": scored if one.arm == AGAIN else (),
            }
        )
        for one in files
    ]


def _places(items: Sequence[Item]) -> dict[tuple[str, str], int]:
    counts: dict[str, int] = {}
    found: dict[tuple[str, str], int] = {}
    for item in items:
        found[item.task, item.id] = counts.setdefault(item.task, 0)
        counts[item.task] += 1
    return found


def wait_answered(process: subprocess.Popen[Any], rows: Path, count: int, limit: float = 120.0) -> None:
    """Until a running comparison has `count` answers of the arm in this file."""
    deadline = time.monotonic() + limit
    while not rows.exists() or rows.read_text().count('"answered"') < count:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


LM_EVAL = """\
import json, os, sys, urllib.request
from pathlib import Path
words = sys.argv[1:]
given = dict(zip(words, words[1:]))
model = dict(pair.split("=", 1) for pair in given["--model_args"].split(","))
print("asked", words, flush=True)
if "--boom" in words:
    print("ValueError: no such task", file=sys.stderr)
    sys.exit("Requesting: 0%")
place = Path(given["--output_path"]) / "model__name"
place.mkdir()
for task in given["--tasks"].split(","):
    rows = []
    for n in range(4):
        body = json.dumps({"prompt": f"question {n}", "max_tokens": 8, "model": model["model"]}).encode()
        headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
        answer = json.load(urllib.request.urlopen(urllib.request.Request(model["base_url"], body, headers)))
        text = answer["choices"][0]["text"]
        same = {"doc_id": n, "doc": {}, "doc_hash": f"d{n}", "prompt_hash": f"p{n}", "target_hash": f"t{n}"}
        for kind, score in (("strict", float(n % 2)), ("loose", 1.0)):
            rows.append({**same, "filter": kind, "metrics": ["exact_match"], "exact_match": score, "filtered_resps": [text]})
    lines = "".join(json.dumps(row) + "\\n" for row in rows)
    (place / f"samples_{task}_2026-01-02T03-04-05.678901.jsonl").write_text(lines)
(place / "results_2026-01-02T03-04-05.678901.json").write_text(json.dumps({"lm_eval_version": "0.4.9"}))
"""
"""lm-eval's command in miniature: four documents a task, asked of the endpoint it is given, scored by two filters."""


def install_lm_eval(directory: Path) -> Path:
    """Make the command in a directory; returns its path."""
    directory.mkdir()
    script = directory / "lm_eval"
    script.write_text(f"#!{sys.executable}\n{LM_EVAL}")
    script.chmod(0o755)
    return script
