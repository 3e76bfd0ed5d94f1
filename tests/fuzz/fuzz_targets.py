"""Every parser of what others wrote, each as a function of bytes that may refuse them and may not break."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn
from uvicorn.server import ServerState

from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.geometry import bytes_per_token
from kvguard.checkpoint.json_config import parse_object
from kvguard.checkpoint.models import CheckpointFiles
from kvguard.checkpoint.safetensors_header import decode_floats, parse_header
from kvguard.cli.probe import read_prompts, read_scales
from kvguard.compare.counters import read_counters
from kvguard.compare.gate import load_gate
from kvguard.compare.own_tasks import own_items
from kvguard.compare.results import Rows, read_arm
from kvguard.compare.streams import arrived_as_one
from kvguard.engine.checkpoint_files import gather
from kvguard.engine.client import Answer, Arrivals, EngineClient
from kvguard.engine.command import parse_command, requested_claims, split_words
from kvguard.evidence import metrics, tensors
from kvguard.evidence.log import LogReader, read_log
from kvguard.evidence.prediction import predict
from kvguard.evidence.replies import parse_replies
from kvguard.facts.scale_names import scale_name
from kvguard.policy.parse import parse_policy
from kvguard.proxy.connection import Connection
from kvguard.proxy.headers import response_headers, takes_plain_text
from kvguard.proxy.protocol import Protocol
from kvguard.proxy.upstream import Limits
from kvguard.record.diff import diff_records
from kvguard.record.equality import beyond_the_cache
from kvguard.record.statement import Statement
from kvguard.record.store import parse_record
from kvguard.reference.inside import ask_exactness, measure_ranges, run_passes
from kvguard.reference.models import EXACT, Decode
from kvguard.reference.prompts import parse_prompts
from kvguard.reference.scales import parse_scales
from kvguard.shadow.candidate import read_request
from kvguard.shadow.replay import read_decode
from kvguard.vocabulary import Effective, KvguardError

CORPUS = Path(__file__).parent / "corpus"
CONFIG = b'{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}'
NONCE = "n0nce"


@dataclasses.dataclass(frozen=True)
class Target:
    """`parse` may raise KvguardError of one line (with `lines`: of several, each naming the file), and nothing else."""

    name: str
    parse: Callable[[bytes], object]
    lines: bool = False

    def seeds(self) -> list[bytes]:
        """The files of the corpus, in order of their names."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]


def broken_by(target: Target, data: bytes) -> BaseException | None:
    """What escaped from the parser, None when it read or refused the input as it should."""
    try:
        target.parse(data)
    except KvguardError as error:
        lines = str(error).splitlines()
        fine = len(lines) == 1 or (target.lines and lines and all(line.startswith("policy.yaml") for line in lines))
        return None if fine else AssertionError(f"an error not of one line: {str(error)!r}")
    except Exception as error:
        return error
    return None


# --- files of a checkpoint ---


def _checkpoint(config: bytes | None = CONFIG, params: bytes | None = None, sidecar: bytes | None = None) -> None:
    files = CheckpointFiles(directory="m", config_json=config, params_json=params, hf_quant_config_json=sidecar)
    declared = declare(files)
    for version in ("0.12.0", "0.16.0", "0.32.0", "1.2.3"):
        for typed in (None, "fp8", "bfloat16"):
            found = predict(version, typed, declared)
            bytes_per_token(declared.geometry, found.dtype)


def _config(data: bytes) -> None:
    _checkpoint(config=data)


def _params(data: bytes) -> None:
    _checkpoint(params=data)


def _sidecar(data: bytes) -> None:
    _checkpoint(sidecar=data)


def _overrides(data: bytes) -> None:
    files = CheckpointFiles(directory="m", config_json=CONFIG)
    declare(files, parse_object(data, "--hf-overrides"))


def _header(data: bytes) -> None:
    header = parse_header(data, "model.safetensors", len(data))
    values = {}
    for name, info in header.tensors.items():
        body = data[header.header_bytes + info.start : header.header_bytes + info.end]
        if scale_name(name) is not None and (decoded := decode_floats(info, body)) is not None:
            values[name] = decoded
    declare(CheckpointFiles(directory="m", config_json=CONFIG, safetensors=(header,), scale_values=values))


def _index(data: bytes) -> None:
    names = ["config.json", "model.safetensors.index.json", "a.safetensors"]
    small = {"config.json": CONFIG, "model.safetensors.index.json": data}
    gather("m", names, lambda name, limit: small[name][:limit], lambda shards: [])


# --- what people write ---


def _policy(data: bytes) -> None:
    parse_policy(data, "policy.yaml")


def _in_a_file(read: Callable[[Path], object]) -> Callable[[bytes], None]:
    def parse(data: bytes) -> None:
        path = _directory() / "input"
        path.write_bytes(data)
        read(path)

    return parse


@cache
def _directory() -> Path:
    directory = tempfile.mkdtemp(prefix="kvguard-fuzz-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _prompts(data: bytes) -> None:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return
    parse_prompts(text, "prompts.jsonl")


def _scales(data: bytes) -> None:
    parse_scales(parse_object(data, "scales.json"), "scales.json")


def _command(data: bytes) -> None:
    """Words of a command, one a line, and after an empty line its --config file."""
    words, _, config = data.partition(b"\n\n")
    argv = tuple(words.decode("utf-8", "replace").split("\n"))
    for version in ("0.12.0", "0.32.0"):
        requested_claims(parse_command(split_words(("vllm", "serve", "m", *argv)), version, lambda _: config))


def _rows(path: Path) -> None:
    Rows(path)


# --- what an engine says ---


def _log(data: bytes) -> None:
    reader = read_log(data)
    reader.claims("0.32.0")
    reader.cause_of_death()
    pieces = LogReader()
    for start in range(0, len(data), 97):
        pieces.feed("stdout", data[start : start + 97])
    pieces.close("stdout")
    pieces.claims("0.12.0")


def _metrics(data: bytes) -> None:
    page = metrics.parse_metrics(data)
    metrics.claims(page)
    metrics.marks(page)
    metrics.gauges(page, Effective(), 8)
    counters = read_counters(page)
    assert counters.hits is None or counters.hits >= 0


def _evidence(data: bytes) -> None:
    reading = parse_replies(data, NONCE)
    tensors.gaps(reading)
    tensors.disagreements(reading)
    tensors.invalid_scales(reading)
    tensors.extent(tensors.claims(reading))


class _Engine:
    """A client whose engine answers every question with these bytes."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def ask(self, topic: str, secret: str, nonce: str, question: Any = None, *, deadline: float) -> Answer:
        return Answer(status=200, body=self._body.replace(NONCE.encode(), nonce.encode()))

    def close_channel(self, reason: str) -> str:
        return reason


_DECODE = Decode((1, 2), (3, 4), (-1.0, -2.0), (((3, -1.0), (5, -2.0)), ((4, -2.0), (5, -3.0))))


def _passes(data: bytes) -> None:
    async def all_three() -> None:
        engine = cast(Any, _Engine(data))
        await run_passes(engine, "s", _DECODE, (EXACT,))
        await ask_exactness(engine, "s")
        await measure_ranges(engine, "s", (1, 2, 3))

    _loop().run_until_complete(all_three())


def _answer(data: bytes) -> None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    for kind in ("chat", "completion"):
        read_decode(cast(Any, kind), body)


@cache
def _client_of_ours() -> EngineClient:
    client = EngineClient("http://127.0.0.1:1")
    _loop().run_until_complete(client.close())
    return client


def _events(data: bytes) -> None:
    """A stream's events, and the counts at its end, as an engine sends them to a client of ours."""

    client = _client_of_ours()

    async def ask() -> Arrivals:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=data))
        async with httpx.AsyncClient(base_url="http://engine", transport=transport, trust_env=False) as answering:
            client._http = answering
            return await client.arrivals("/v1/completions", {})

    found = _loop().run_until_complete(ask())
    arrived_as_one(found.times)
    assert found.usage is None or found.usage["completion_tokens"] is not None


def _request(data: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        read_request(path, data, [(b"x-kvguard-probe", b"yes")])


def _record(data: bytes) -> None:
    """Records are sealed by a digest; without it, what is compared of two of them."""
    with contextlib.suppress(KvguardError):
        parse_record(data, "record.json")
    try:
        document = Statement.model_validate_json(data).model_dump(mode="json", by_alias=True)
        json.dumps(document, allow_nan=False)
    except ValueError:
        return
    other = json.loads((CORPUS / "record" / "fp8.json").read_bytes())
    diff_records(document, other)
    beyond_the_cache(other, document)


# --- HTTP heads ---


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


NOISY = logging.getLogger("uvicorn.error")
"""Logs requests that are ended halfway, each with its traceback; whoever drives many turns it off."""


class _Transport(asyncio.Transport):
    """Takes what is written, and goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def write(self, data: Any) -> None:
        assert isinstance(data, bytes | bytearray | memoryview)

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Never full."""

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """No limits."""


class _Listener:
    """Hears a response, and makes of its head what a client gets."""

    def response_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        response_headers(headers, status, ((b"x-kvguard-record", b"r"),), b"id")
        takes_plain_text(headers)

    def response_body(self, data: bytes) -> None:
        """Heard."""

    def response_read(self) -> None:
        """Heard."""

    response_end = response_read

    def response_failed(self, detail: str, *, untouched: bool) -> None:
        assert "\n" not in detail

    def response_upgraded(self, headers: Any, rest: bytes) -> None:
        """Heard."""


def _response(data: bytes) -> None:
    """An engine's response, whole and in pieces."""

    async def read(size: int) -> None:
        connection = Connection(lambda _: None)
        connection.connection_made(_Transport())
        connection.ask(cast(Any, _Listener()), b"GET / HTTP/1.1\r\n\r\n", b"", head_only=size == 3)
        for start in range(0, len(data), size):
            if connection.closing:
                break
            connection.data_received(data[start : start + size])
        connection.connection_lost(None)

    for size in (1 << 20, 17, 3):
        _loop().run_until_complete(read(size))


async def _application(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _client(data: bytes) -> None:
    """A client's request, whole and in pieces."""
    raised: list[BaseException] = []

    async def read(size: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context.get("exception")))  # type: ignore[arg-type]
        config = uvicorn.Config(cast(Any, _application), http="httptools", log_config=None, lifespan="off", proxy_headers=False)
        config.load()
        state = ServerState()
        protocol = Protocol(config=config, server_state=state, app_state={}, limits=Limits(head_bytes=4096))
        transport = _Transport()
        protocol.connection_made(transport)
        for start in range(0, len(data), size):
            if transport.closed:
                break
            protocol.data_received(data[start : start + size])
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)

    for size in (1 << 20, 11):
        _loop().run_until_complete(read(size))
    for error in raised:
        raise error


def _all() -> Iterable[tuple[str, Callable[[bytes], object]]]:
    yield from {
        "policy": _policy,
        "config": _config,
        "params": _params,
        "sidecar": _sidecar,
        "overrides": _overrides,
        "header": _header,
        "index": _index,
        "log": _log,
        "metrics": _metrics,
        "evidence": _evidence,
        "passes": _passes,
        "answer": _answer,
        "events": _events,
        "request": _request,
        "record": _record,
        "prompts": _prompts,
        "scales": _scales,
        "command": _command,
        "tasks": _in_a_file(own_items),
        "probe_prompts": _in_a_file(read_prompts),
        "probe_scales": _in_a_file(read_scales),
        "gate": _in_a_file(load_gate),
        "arm": _in_a_file(read_arm),
        "rows": _in_a_file(_rows),
        "response": _response,
        "client": _client,
    }.items()


TARGETS: Mapping[str, Target] = {name: Target(name, parse, lines=name == "policy") for name, parse in _all()}
