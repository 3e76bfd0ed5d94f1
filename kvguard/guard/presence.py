"""Whether an engine that is not ours is there, and still the same run of it."""

from __future__ import annotations

import asyncio

from kvguard.engine.client import EngineClient, socket_path
from kvguard.engine.peer import peer_of
from kvguard.evidence import metrics as metrics_evidence
from kvguard.evidence.metrics import Marks, MetricsPage
from kvguard.files import printable
from kvguard.vocabulary import Frozen, UsageError

_GONE_AFTER = 2
_DEAD_AFTER = 3


_TOO_MANY = 429
_SERVERS_FAULT = 500


def is_strange(status: int | None) -> bool:
    """Whether this answer to /health, other than 200, is one that vLLM never gives, and no proxy before it for a while."""
    return status is not None and status < _SERVERS_FAULT and status != _TOO_MANY


def not_vllm(address: str, problem: str) -> UsageError:
    """The error for a server that answers /health so."""
    return UsageError(
        f"{printable(address)}: what answers there is not vLLM, whose /health says 200 or 503: {printable(problem)}; required "
        "is a running vLLM server"
    )


class Seen(Frozen):
    """One look. `lost` is why the engine that was verified is not there any more, "" when it is, or may only be busy.

    `problem` is what /health gave instead of 200, with its HTTP `status` if it gave one.
    """

    lost: str = ""
    answers: bool = False
    problem: str = ""
    status: int | None = None


class Presence:
    """Looks at one run of an engine. Made anew for each run."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._marks = Marks()
        self._pid: int | None = None
        self._gone = self._dead = 0
        self.page: MetricsPage | None = None

    async def look(self) -> Seen:
        """Ask for health and metrics. An engine that answers nothing in time is busy; one that nobody listens for is gone."""
        health = await self._client.health()
        self._gone = self._gone + 1 if health.nobody else 0
        self._dead = self._dead + 1 if health.status == 503 else 0
        problem = f"nobody listens at {self._client.target}" if health.nobody else health.problem
        if self._gone >= _GONE_AFTER:
            return Seen(lost=problem, problem=problem)
        if self._dead >= _DEAD_AFTER:
            return Seen(lost="it answered /health with an error three times", problem=problem, status=health.status)
        if not health.ok:
            return Seen(problem=problem, status=health.status)
        return Seen(lost=await self._other_run(), answers=True)

    async def _other_run(self) -> str:
        answer = await self._client.metrics_text()
        try:
            self.page = metrics_evidence.parse_metrics(answer.body or b"") if answer.ok else None
        except UsageError:
            self.page = None
        if self.page is not None:
            now, before = metrics_evidence.marks(self.page), self._marks
            if why := before.other_run(now):
                return why
            self._marks = now
        return await self._other_process()

    async def _other_process(self) -> str:
        socket = socket_path(self._client.target)
        peer = await asyncio.to_thread(peer_of, socket) if socket else None
        if peer is None:
            return ""
        before, self._pid = self._pid, peer.pid
        return f"another process listens at {self._client.target}" if before not in (None, peer.pid) else ""
