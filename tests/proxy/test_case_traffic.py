"""Cases about requests on their way: what a client sends arrives, and a client that leaves is gone for the engine too."""

from __future__ import annotations

import json

import pytest
from proxy_fakes import WAIT_S, Call


async def ok(call: Call) -> None:
    await call.json(b'{"ok": true}')


async def never_answers(call: Call) -> None:
    await call.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
def test_90_a_client_that_leaves_is_gone_for_the_engine(serve, stream):
    proxy, engine = serve(never_answers)
    body = json.dumps({"messages": [], "stream": stream, "max_tokens": 3000}).encode()
    with proxy.client() as client:
        client.send("POST", "/v1/chat/completions", body=body)
        call = engine.next_call()
        client.close()
        assert call.closed.wait(WAIT_S), "the engine's connection stayed open"
    assert proxy.observer.next_end()[2:] == (499, "client_disconnected")


def test_94_five_stop_words_and_other_fields_arrive_byte_for_byte(serve):
    proxy, engine = serve(ok)
    body = b'{"model":"m", "prompt":"x","stop":["\\nA","\\nB","\\n#","\\nC","\\nD"],"top_k":1,"min_p":0.0,  "max_tokens":4}'
    with proxy.client() as client:
        assert client.ask("POST", "/v1/completions", body=body).status == 200
    assert engine.next_call().body == body
