"""kvguard's own requests to the engine: errors are values, and the channel to the workers keeps its step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvguard.engine.client import EVIDENCE_PATH, Answer, EngineClient, model_cards, socket_path

Handler = Callable[[str, str, dict[str, str], bytes], Awaitable[tuple[int, bytes]]]


@asynccontextmanager
async def engine(path: Path, handler: Handler):
    """A fake engine on a Unix socket; `handler(method, path, headers, body)` answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            method, target, _ = first.split(" ")
            status, answer = await handler(method, target, headers, body)
            if status:
                writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(answer)}\r\n\r\n".encode())
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    async with server:
        yield server


def run(tmp_path: Path, handler: Handler, use: Callable[[EngineClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        path = tmp_path / "s"
        async with engine(path, handler), EngineClient(f"unix:{path}", **options) as client:
            return await use(client)

    return asyncio.run(main())


def replies(nonce: str) -> bytes:
    return json.dumps({"replies": [{"nonce": nonce, "rank": 0, "layers": []}], "expected_ranks": 1}).encode()


async def healthy(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    answers = {
        "/health": b"",
        "/version": b'{"version": "0.32.0"}',
        "/metrics": b"vllm:x 1\n",
        "/v1/models": b'{"data": [{"id": "m", "root": "/models/m"}, 3]}',
    }
    if path == "/v1/completions":
        return 200, json.dumps({"echo": json.loads(body), "key": headers.get("authorization")}).encode()
    return (200, answers[path]) if path in answers else (404, b'{"error": {"message": "no\\n such"}}')


def test_answers_over_a_unix_socket(tmp_path: Path) -> None:
    async def use(client: EngineClient) -> None:
        assert (await client.health()).ok
        assert await client.version() == "0.32.0"
        assert (await client.metrics_text()).body == b"vllm:x 1\n"
        assert model_cards(await client.models()) == ({"id": "m", "root": "/models/m"},)
        answer = await client.post("/v1/completions", {"prompt": [1]})
        assert answer.body == {"echo": {"prompt": [1]}, "key": "Bearer secret"}

    run(tmp_path, healthy, use, key="secret")


def test_errors_are_values(tmp_path: Path) -> None:
    async def use(client: EngineClient) -> None:
        answer = await client.get_json("/nothing")
        assert (answer.ok, answer.status, answer.problem) == (False, 404, "HTTP 404: no such")

    run(tmp_path, healthy, use)


def test_nobody_listens(tmp_path: Path) -> None:
    async def main() -> None:
        async with EngineClient(str(tmp_path / "none")) as client:
            answer = await client.health()
            assert answer.status is None
            assert answer.problem.startswith("/health: ConnectError")
            assert await client.version() is None

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"not json", b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_json(tmp_path: Path, body: bytes) -> None:
    async def handler(*_: Any) -> tuple[int, bytes]:
        return 200, body

    answer = run(tmp_path, handler, lambda client: client.models())
    assert answer.problem.startswith("HTTP 200 with a body that is not JSON")
    assert model_cards(answer) == ()


def test_a_connection_that_ends_early(tmp_path: Path) -> None:
    async def handler(*_: Any) -> tuple[int, bytes]:
        return 0, b""

    assert run(tmp_path, handler, lambda client: client.health()).status is None


def test_a_deadline(tmp_path: Path) -> None:
    async def handler(*_: Any) -> tuple[int, bytes]:
        await asyncio.Event().wait()
        return 200, b""

    answer = run(tmp_path, handler, lambda client: client.post("/v1/completions", {}, deadline=0.05))
    assert answer.problem == "/v1/completions: no answer within 0.05 s"


class TestEvidence:
    def test_secret_and_nonce_are_headers(self, tmp_path: Path) -> None:
        async def handler(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
            assert (method, path, headers["x-kvguard-secret"]) == ("GET", EVIDENCE_PATH, "s3cret")
            return 200, replies(headers["x-kvguard-nonce"])

        answer = run(tmp_path, handler, lambda client: client.evidence("s3cret", "n1"))
        assert answer.reading.replies[0].nonce == "n1"

    @pytest.mark.parametrize(
        ("status", "body", "problem"),
        [
            (404, b'{"detail": "Not Found"}', "no reader of kvguard's"),
            (500, b'{"error": "KeyError: x"}', "the workers could not be read: HTTP 500: KeyError: x"),
            (200, b"nonsense", "evidence reply: "),
        ],
    )
    def test_no_reading(self, tmp_path: Path, status: int, body: bytes, problem: str) -> None:
        async def handler(*_: Any) -> tuple[int, bytes]:
            return status, body

        answer = run(tmp_path, handler, lambda client: client.evidence("s", "n"))
        assert answer.reading is None
        assert problem in answer.problem

    def test_one_call_in_flight_and_late_answers_are_discarded(self, tmp_path: Path) -> None:
        release = asyncio.Event()
        asked: list[str] = []

        async def handler(_: str, __: str, headers: dict[str, str], ___: bytes) -> tuple[int, bytes]:
            asked.append(headers["x-kvguard-nonce"])
            if len(asked) == 1:
                await release.wait()
            return 200, replies(headers["x-kvguard-nonce"])

        async def use(client: EngineClient) -> None:
            late = await client.evidence("s", "n1", deadline=1.0)
            assert late.problem == "the workers did not answer within 1 s"
            busy = await client.evidence("s", "n2", deadline=0.05)
            assert busy.problem == "an earlier question to the workers is still unanswered"
            assert asked == ["n1"]
            release.set()
            assert client._pending is not None
            await client._pending
            third = await client.evidence("s", "n3")
            assert third.reading is not None
            assert third.reading.replies[0].nonce == "n3"

        run(tmp_path, handler, use)

    def test_a_question_put_as_the_answer_comes_takes_nobodys_answer(self, tmp_path: Path) -> None:
        async def handler(_: str, __: str, headers: dict[str, str], ___: bytes) -> tuple[int, bytes]:
            return 200, replies(headers["x-kvguard-nonce"])

        async def use(client: EngineClient) -> None:
            async def the_moment_it_is_answered() -> Any:
                while client._pending is None or not client._pending.done():
                    await asyncio.sleep(0)
                return await client.evidence("s", "n2")

            one, other = await asyncio.gather(client.evidence("s", "n1"), the_moment_it_is_answered())
            assert [answer.reading.replies[0].nonce for answer in (one, other)] == ["n1", "n2"]

        run(tmp_path, handler, use)

    def test_another_nonce_closes_the_channel(self, tmp_path: Path) -> None:
        asked = []

        async def handler(*_: Any) -> tuple[int, bytes]:
            asked.append(1)
            return 200, replies("an older question")

        async def use(client: EngineClient) -> None:
            for _ in range(2):
                answer = await client.evidence("s", "n")
                assert answer.reading is None
                assert "stays closed until the engine is restarted" in answer.problem

        run(tmp_path, handler, use)
        assert asked == [1]

    def test_closing_ends_a_call_that_waits(self, tmp_path: Path) -> None:
        async def handler(*_: Any) -> tuple[int, bytes]:
            await asyncio.Event().wait()
            return 200, b""

        async def use(client: EngineClient) -> asyncio.Task[Answer] | None:
            await client.evidence("s", "n", deadline=0.2)
            return client._pending

        assert run(tmp_path, handler, use).cancelled()


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://h:1", None),
        ("https://h", None),
        ("/run/s", "/run/s"),
        ("unix:/run/s", "/run/s"),
        ("unix:///run/s", "/run/s"),
        ("./s", "./s"),
    ],
)
def test_targets(target: str, path: str | None) -> None:
    assert socket_path(target) == path
