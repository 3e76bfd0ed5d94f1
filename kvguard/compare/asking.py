"""One arm's questions: every item, the divergence texts, the load, each answered once and written as it comes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvguard.compare.models import Answered, Forced, Generated, Item, Plan, Scored, Streamed, Throughput
from kvguard.compare.planning import text_id
from kvguard.compare.reading import broken, right
from kvguard.compare.results import Rows
from kvguard.compare.streams import arrived_as_one
from kvguard.engine.client import Answer, EngineClient
from kvguard.reference.external import run_teacher_forced
from kvguard.reference.models import EXACT, Decode
from kvguard.shadow.candidate import Candidate, Kind
from kvguard.shadow.replay import Problem, probe_body, read_decode
from kvguard.shadow.scoring import score, token_deltas
from kvguard.vocabulary import EngineFailed, UsageError

DEADLINE = 3600.0
_STREAMED_TOKENS = 64
Told = Callable[[str, int, int], None]
"""Called with what is being done, how many are done, and of how many."""


@dataclass(slots=True)
class Asker:
    """Asks one engine. `sampled` are the tasks that are sampled at the model's own temperature, `plan.samples` times."""

    client: EngineClient
    model: str
    chat: bool
    plan: Plan
    rows: Rows
    told: Told
    sampled: frozenset[str] = frozenset()
    concurrency: int = 4

    async def items(self) -> None:
        """Every item, in the plan's order, `concurrency` at a time. Raises EngineFailed when the engine does not answer."""
        done = {(row.task, row.item, row.sample) for row in self.rows.rows if isinstance(row, Answered)}
        todo = [
            (item, sample)
            for item in self.plan.items
            for sample in range(self._samples(item))
            if (item.task, item.id, sample) not in done
        ]
        total = len(todo) + len(done)

        await self._all("items", [partial(self._item, item, sample) for item, sample in todo], total)

    async def generate(self) -> None:
        """The arm's own greedy continuation of each divergence text, with logprobs."""
        done = {row.text for row in self.rows.rows if isinstance(row, Generated)}
        todo = [(number, text) for number, text in enumerate(self.plan.texts) if text_id(number) not in done]
        work = [partial(self._generate, number, text) for number, text in todo]
        await self._all("divergence: decode", work, len(self.plan.texts))

    async def force(self, reference: Sequence[Generated]) -> None:
        """This arm's logprobs at the tokens that the 16-bit arm generated."""
        done = {row.text for row in self.rows.rows if isinstance(row, Forced)}
        todo = [one for one in reference if one.text not in done and not one.problem]
        await self._all("divergence: teacher forced", [partial(self._force, one) for one in todo], len(reference))

    async def score(self, arms: Mapping[str, Sequence[Generated]]) -> None:
        """On the 16-bit engine: what each arm decoded, against this engine's pass over the same tokens."""
        done = {(row.arm, row.text) for row in self.rows.rows if isinstance(row, Scored)}
        todo = [(arm, one) for arm, many in arms.items() for one in many if (arm, one.text) not in done]
        work = [partial(self._score, arm, one) for arm, one in todo]
        await self._all("divergence: scoring decodes", work, len(todo) + len(done))

    async def saturate(self) -> None:
        """`throughput_requests` requests at once, as often as planned."""
        done = sum(isinstance(row, Throughput) for row in self.rows.rows)
        for run in range(done, self.plan.throughput_runs):
            self.told("throughput", run, self.plan.throughput_runs)
            self.rows.add(await self._load(run))

    async def stream(self) -> None:
        """The planned prompts, each streamed alone `throughput_runs` times."""
        done = sum(isinstance(row, Streamed) for row in self.rows.rows)
        todo = [(f"stream-{place}", text) for place, text in enumerate(self.plan.streams)] * self.plan.throughput_runs
        for number, (name, text) in enumerate(todo):
            self.told("prefill and decode", number, len(todo))
            if number >= done:
                self.rows.add(await self._stream(name, text))

    # ---- one request each

    def _samples(self, item: Item) -> int:
        return self.plan.samples if item.task in self.sampled else 1

    async def _item(self, item: Item, sample: int) -> Answered:
        """Greedy; sampled at the model's own temperature where several samples are asked for. Never from a warm cache."""
        drawn = self._samples(item) > 1
        body: dict[str, Any] = {
            "model": self.model,
            "cache_salt": secrets.token_hex(16),
            "seed": request_seed(self.plan.seed, item.id, sample),
            **({} if drawn else {"temperature": 0}),
        }
        if self.chat:
            body |= {"messages": [turn.model_dump() for turn in item.messages], "max_completion_tokens": item.max_tokens}
            answer = await self.client.post("/v1/chat/completions", body, deadline=DEADLINE)
        else:
            prompt = "\n\n".join(turn.content for turn in item.messages) + "\n\nAnswer:"
            answer = await self.client.post(
                "/v1/completions", body | {"prompt": prompt, "max_tokens": item.max_tokens}, deadline=DEADLINE
            )
        if answer.status is None:
            raise EngineFailed(f"item {item.id}: {answer.problem}")
        try:
            choice = answer.body["choices"][0]
            text = (choice["message"]["content"] if self.chat else choice["text"]) or ""
            usage = answer.body["usage"]
            return Answered(
                task=item.task,
                item=item.id,
                sample=sample,
                text=text,
                score=float(right(item, text)),
                finish=str(choice["finish_reason"]),
                tokens=usage["completion_tokens"],
                prompt_tokens=usage["prompt_tokens"],
                collapse=broken(text),
            )
        except (KeyError, IndexError, TypeError):
            return Answered(task=item.task, item=item.id, sample=sample, problem=answer.problem or "answer not understood")

    async def _generate(self, number: int, text: str) -> Generated:
        kind: Kind = "chat" if self.chat else "completion"
        question: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        path, body = probe_body(
            Candidate(kind=kind, body=question, turns=1, adapter="", prompt_chars=len(text), size=len(text)),
            served_model=self.model,
            max_tokens=self.plan.new_tokens,
            greedy=True,
            salt=secrets.token_hex(16),
        )
        answer = await self.client.post(path, body, deadline=DEADLINE)
        if answer.status is None:
            raise EngineFailed(f"divergence text {number}: {answer.problem}")
        found = read_decode(kind, answer.body)
        if isinstance(found, Problem):
            return Generated(text=text_id(number), prompt_ids=(), ids=(), logprobs=(), top=(), problem=str(found))
        return Generated(
            text=text_id(number), prompt_ids=found.prompt_ids, ids=found.ids, logprobs=found.logprobs, top=found.top
        )

    async def _force(self, given: Generated) -> Forced:
        result = await run_teacher_forced(self.client, self.model, _decode(given), (EXACT,))
        if result.problem:
            return Forced(text=given.text, problem=result.problem)
        found = result.passes[0]
        return Forced(text=given.text, logprobs=found.logprobs, top1=found.top1)

    async def _score(self, arm: str, given: Generated) -> Scored:
        if given.problem:
            return Scored(arm=arm, text=given.text, problem=given.problem)
        decode = _decode(given)
        result = await run_teacher_forced(self.client, self.model, decode, (EXACT,))
        if result.problem:
            return Scored(arm=arm, text=given.text, problem=result.problem)
        try:
            found = score(decode, result.passes[0])
        except UsageError as error:
            return Scored(arm=arm, text=given.text, problem=str(error))
        return Scored(
            arm=arm,
            text=given.text,
            tokens=found.tokens,
            sum_abs_delta=found.sum_abs_delta,
            flips=found.flips,
            kl_low=found.kl_low,
            collapse=found.collapse,
            deltas=token_deltas(decode, result.passes[0], found.tokens),
        )

    async def _stream(self, name: str, text: str) -> Streamed:
        body = {
            "model": self.model,
            "prompt": text,
            "max_tokens": _STREAMED_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": secrets.token_hex(16),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        found = await self.client.arrivals("/v1/completions", body, deadline=DEADLINE)
        usage = found.usage
        if found.problem or not found.times or usage is None:
            raise EngineFailed(f"stream {name}: {found.problem or 'no events, or no usage'}")
        return Streamed(
            text=name,
            prompt_tokens=usage["prompt_tokens"],
            tokens=usage["completion_tokens"],
            first=found.times[0],
            last=found.times[-1],
            buffered=arrived_as_one(found.times),
        )

    async def _load(self, run: int) -> Throughput:
        prompt = "Describe a walk through a small town, house by house."

        async def one(number: int) -> Answer:
            body = {
                "model": self.model,
                "prompt": f"{number}. {prompt}",
                "max_tokens": self.plan.throughput_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "cache_salt": secrets.token_hex(16),
            }
            return await self.client.post("/v1/completions", body, deadline=DEADLINE)

        begun = time.monotonic()
        answers = await asyncio.gather(*(one(number) for number in range(self.plan.throughput_requests)))
        seconds = time.monotonic() - begun
        if problems := [answer.problem for answer in answers if not answer.ok]:
            raise EngineFailed(f"throughput run {run}: {len(problems)} of {len(answers)} requests failed: {problems[0]}")
        usage = [answer.body["usage"] for answer in answers]
        return Throughput(
            requests=len(answers),
            tokens=sum(each["completion_tokens"] for each in usage),
            prompt_tokens=sum(each["prompt_tokens"] for each in usage),
            seconds=seconds,
        )

    async def _all(self, what: str, work: Sequence[Callable[[], Coroutine[Any, Any, Any]]], total: int) -> None:
        """Run all, at most `concurrency` at a time; each result is written as it comes."""
        gate = asyncio.Semaphore(self.concurrency)
        finished = total - len(work)
        self.told(what, finished, total)

        async def one(make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
            nonlocal finished
            async with gate:
                self.rows.add(await make())
            finished += 1
            self.told(what, finished, total)

        tasks = [asyncio.create_task(one(make)) for make in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def request_seed(seed: int, item: str, sample: int) -> int:
    """A request's seed, the same in every arm."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{item}/{sample}".encode()).digest()[:4], "big")


async def tokens_per_hundred(client: EngineClient, model: str, text: str) -> int:
    """How many tokens the model's tokenizer makes of `text`, which is 100 sentences."""
    answer = await client.post("/tokenize", {"model": model, "prompt": text})
    count = answer.body.get("count") if answer.ok and isinstance(answer.body, dict) else None
    if not isinstance(count, int) or count < 1:
        raise EngineFailed(f"the engine could not tokenize a text: {answer.problem or 'no count in its answer'}")
    return count


def _decode(given: Generated) -> Decode:
    return Decode(given.prompt_ids, given.ids, given.logprobs, given.top)
