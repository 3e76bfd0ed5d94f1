"""What the arms are asked: the items of each task, the texts, the load, from a seed and the first arm's limits."""

from __future__ import annotations

from collections.abc import Sequence

from kvguard.canonical import sha256_of
from kvguard.compare.conversation import TASK as CONVERSATION
from kvguard.compare.conversation import conversation
from kvguard.compare.draw import Draw
from kvguard.compare.models import Harness, Item, Plan
from kvguard.compare.reasoning import ARITHMETIC, STRINGS, arithmetic, strings
from kvguard.compare.retrieval import TASK as RETRIEVAL
from kvguard.compare.retrieval import filler, retrieval
from kvguard.compare.texts import divergence_texts
from kvguard.vocabulary import UsageError

DIVERGENCE = "divergence"
THROUGHPUT = "throughput"
OWN = "own"
SCORED = (RETRIEVAL, ARITHMETIC, STRINGS, CONVERSATION)
TASKS = (*SCORED, DIVERGENCE, THROUGHPUT)
REASONING = (ARITHMETIC, STRINGS)

FULL = {RETRIEVAL: 600, ARITHMETIC: 600, STRINGS: 600, CONVERSATION: 600, DIVERGENCE: 60}
QUICK = {RETRIEVAL: 20, ARITHMETIC: 16, STRINGS: 16, CONVERSATION: 16, DIVERGENCE: 8}
_LONG_TEXT = 256
_STREAMED = (64, 2048)
"""Prompt tokens of the streams that are timed."""


def chosen_tasks(named: str) -> tuple[str, ...]:
    """The tasks of a list separated by commas. Raises UsageError for a name that is none."""
    names = tuple(dict.fromkeys(name.strip() for name in named.split(",") if name.strip()))
    for name in names:
        if name not in TASKS:
            raise UsageError(f"--tasks {name!r}: required are some of {', '.join(TASKS)}")
    return names or TASKS


def make_plan(
    *,
    seed: int,
    quick: bool,
    tasks: Sequence[str],
    own: Sequence[Item],
    max_model_len: int,
    max_num_seqs: int | None,
    tokens_per_hundred: int,
    samples: int = 1,
    items: int | None = None,
    max_tokens: int | None = None,
    harness: Harness | None = None,
) -> Plan:
    """The plan. `items` overrides how many each generated task has, `max_tokens` how long an answer may be.

    `tokens_per_hundred` is what the model's tokenizer makes of 100 generated sentences.
    """
    counts = {name: items if items is not None else (QUICK if quick else FULL).get(name, 0) for name in tasks}
    made = {
        RETRIEVAL: lambda count: retrieval(seed, count, max_model_len, tokens_per_hundred),
        ARITHMETIC: lambda count: arithmetic(seed, count),
        STRINGS: lambda count: strings(seed, count),
        CONVERSATION: lambda count: conversation(seed, count),
    }
    questions = [item for name in tasks if name in made for item in made[name](counts[name])] + list(own)
    if max_tokens is not None:
        questions = [item.model_copy(update={"max_tokens": max_tokens}) for item in questions]
    texts: tuple[str, ...] = ()
    if DIVERGENCE in tasks:
        sentences = max(min(_LONG_TEXT, max_model_len // 2) * 100 // tokens_per_hundred, 2)
        texts = divergence_texts(seed, counts[DIVERGENCE], sentences)
    streams: tuple[str, ...] = ()
    if THROUGHPUT in tasks:
        rooms = sorted({max(min(size, max_model_len // 2), 64) for size in _STREAMED})
        many = [max(room * 100 // tokens_per_hundred, 2) for room in rooms]
        streams = tuple(filler(Draw(seed, "streams", place), sentences) for place, sentences in enumerate(many))
    load = min(2 * (max_num_seqs or 8), 16 if quick else 256) if THROUGHPUT in tasks else 0
    plan = Plan(
        seed=seed,
        quick=quick,
        samples=samples,
        items=tuple(questions),
        texts=texts,
        new_tokens=32 if quick else 64,
        throughput_requests=load,
        throughput_tokens=32 if quick else 128,
        throughput_runs=2 if load else 0,
        streams=streams,
        harness=harness,
        max_model_len=max_model_len,
        digest="",
    )
    return plan.model_copy(update={"digest": digest_of(plan)})


def digest_of(plan: Plan) -> str:
    """Over everything that is asked, and how."""
    absent = {"harness"} if plan.harness is None else set()
    return sha256_of(plan.model_dump(mode="json", exclude={"digest", *absent}))


def text_id(number: int) -> str:
    """The name of the divergence text of this place."""
    return f"text-{number:03d}"
