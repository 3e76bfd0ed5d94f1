"""The same decodes of a real engine, scored by the pass inside it and by a 16-bit engine beside it."""

from __future__ import annotations

import asyncio

from guarded import Guarded
from kvguard.engine.client import EngineClient
from kvguard.reference.external import Primary, ask_reference, run_teacher_forced
from kvguard.reference.inside import run_passes
from kvguard.reference.models import EXACT, Decode
from kvguard.shadow.candidate import Candidate
from kvguard.shadow.prompts import SELF_CHECK
from kvguard.shadow.replay import probe_body, read_decode
from kvguard.shadow.scoring import score


def secret_of(served: Guarded) -> tuple[str, str]:
    """The engine's own socket and the secret of the file inside it, as only this user can read them."""
    (directory,) = served.run_base.iterdir()
    return str(directory / "engine.sock"), (directory / "secret").read_text()


async def greedy_decodes(served: Guarded, prompts: int = 8) -> list[Decode]:
    """The first self-check prompts, decoded greedily, 64 tokens each."""
    async with EngineClient(served.base_url) as client:
        found = []
        for prompt in SELF_CHECK[:prompts]:
            body = {"messages": [{"role": "user", "content": prompt}]}
            candidate = Candidate(kind="chat", body=body, turns=1, adapter="", prompt_chars=len(prompt), size=len(prompt))
            path, question = probe_body(candidate, served_model=served.model, max_tokens=64, greedy=True, salt="a")
            read = read_decode("chat", (await client.post(path, question)).body)
            assert isinstance(read, Decode), read
            found.append(read)
        return found


def inside_and_outside(primary: Guarded, reference: Guarded, version: str) -> tuple[float, float]:
    """Mean |Δ logprob| by token of the primary's decode against the pass inside it, and against the other engine."""

    async def both() -> tuple[float, float]:
        decodes = await greedy_decodes(primary)
        socket, secret = secret_of(primary)
        inside = outside = tokens = 0.0
        async with EngineClient(socket) as client, EngineClient(reference.base_url) as other:
            asked = await ask_reference(other, Primary(version))
            assert not asked.problem
            for decode in decodes:
                here = await run_passes(client, secret, decode, [EXACT])
                there = await run_teacher_forced(other, asked.model, decode, [EXACT], asked.record)
                assert not here.problem + there.problem
                inside += score(decode, here.passes[0]).sum_abs_delta
                outside += score(decode, there.passes[0]).sum_abs_delta
                tokens += len(decode.ids)
        return inside / tokens, outside / tokens

    return asyncio.run(both())
