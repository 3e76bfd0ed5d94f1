"""Drains under load: a replica that stops loses nothing that it accepted, and the next one takes the rest."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from proxy_fakes import WAIT_S, Call, FakeEngine, Proxy, RawClient

from kvguard.proxy.upstream import Upstream


async def answers(call: Call) -> None:
    """A stream, or JSON, neither of them at once."""
    if b"stream" not in call.body:
        await call.json(b'{"ok": true}')
        return
    await call.start_stream()
    for number in range(5):
        await call.chunk(b"data: %d\n\n" % number)
    await call.chunk(b"data: [DONE]\n\n")
    await call.send(b"0\r\n\r\n")


class Replicas:
    """Two replicas behind one Service: requests go to the one that is ready, which changes at every drain."""

    def __init__(self, uds: Path) -> None:
        self._uds = uds
        self._lock = threading.Lock()
        self.ready = self._start()
        self.unaccepted = 0

    def _start(self) -> Proxy:
        proxy = Proxy(Upstream(str(self._uds)))
        proxy.plane.start()
        return proxy

    def ask(self, body: bytes) -> bool:
        """One request with a connection of its own. Whether it was answered whole; asked again only if never accepted."""
        while True:
            with self._lock:
                address = self.ready.address
            try:
                client = RawClient(address)
            except ConnectionError:
                self.unaccepted += 1
                continue
            with client:
                try:
                    client.send("POST", "/v1/completions", body=body)
                    answer = client.answer()
                except (ConnectionError, IndexError):
                    self.unaccepted += 1  # the connection was in the backlog of a socket that closed: nothing was read of it
                    continue
            whole = answer.complete and answer.status == 200
            return whole and (b"[DONE]" in answer.body or answer.body == b'{"ok": true}')

    def drain(self) -> None:
        """Unready first, then the phases in their order, while the other replica serves."""
        leaving, fresh = self.ready, self._start()
        with self._lock:
            self.ready = fresh
        leaving.plane.stop_accepting()
        assert leaving.plane.wait_idle(WAIT_S)
        leaving.plane.close()
        assert {end[3] for end in leaving.observer.ended} <= {"ok"}, "nothing that was accepted may be cut"
        assert leaving.forwarder.in_flight.count == 0


def lose_none(uds: Path, drains: int, requests: int) -> None:
    with FakeEngine(answers, uds) as engine:
        replicas = Replicas(uds)
        try:
            for _ in range(drains):
                with ThreadPoolExecutor(10) as pool:
                    asked = [pool.submit(replicas.ask, b'{"stream": 1}' if n % 2 else b"{}") for n in range(requests // drains)]
                    replicas.drain()
                    assert all(one.result(WAIT_S) for one in asked)
        finally:
            replicas.ready.plane.close()
        assert len(engine.calls) == requests, "every request was put to the engine once"


def test_no_request_is_lost_in_drains(short_dir: Path) -> None:
    lose_none(short_dir / "e", 5, 200)


@pytest.mark.long
def test_no_request_is_lost_in_many_drains(short_dir: Path) -> None:
    lose_none(short_dir / "e", 20, 200)
    lose_none(short_dir / "e", 20, 4000)
