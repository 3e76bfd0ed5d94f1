"""The file that runs inside the engine: what it reads from a worker, and whom it answers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvguard.engine.client import EVIDENCE_PATH
from kvguard.evidence.replies import TensorReading, parse_replies
from kvguard.evidence.tensors import claims, disagreements, gaps, invalid_scales
from worker_fakes import Storage, Tensor, attention, model, scale, state

SECRET = "sesame-and-more"


@pytest.fixture(autouse=True)
def engine_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine's own package, and this start's secret."""
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv("KVGUARD_INSIDE_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.delenv("KVGUARD_INSIDE_EXTENSION", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))


def load() -> ModuleType:
    """The file as the engine imports it: alone, from its own directory."""
    path = resources.files("kvguard.engine.inside") / "kvguard_inside.py"
    spec = importlib.util.spec_from_file_location("kvguard_inside", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worker(layers: dict[str, Any], inside: ModuleType | None = None, **more: Any) -> Any:
    extension = (inside or load()).WorkerExtension()
    extension.__dict__.update(state(layers, **more))
    return extension


# What a worker says


def test_a_layer_is_read_from_its_tensors() -> None:
    reply = worker(model(2)).kvguard_read("n")
    assert (reply["nonce"], reply["error"], reply["engine_version"], reply["model_dtype"]) == ("n", None, "0.32.0", "bfloat16")
    assert (reply["rank"], reply["tp_rank"], reply["pp_rank"], reply["dp_rank"]) == (0, 0, 0, 0)
    assert reply["limits"]["num_blocks"] == 728
    assert reply["layers"][1] == {
        "name": "model.layers.1.self_attn.attn",
        "class": "Attention",
        "error": None,
        "backend": "CPU_ATTN",
        "kv_cache_dtype": "fp8_e4m3",
        "tensor_dtype": "torch.uint8",
        "shape": [728, 3, 128, 128],
        "k_scale": [0.05],
        "v_scale": [0.02],
        "q_scale": [1.0],
        "k_scale_float": 0.05,
        "v_scale_float": 0.02,
        "q_scale_float": 1.0,
        "sliding_window": None,
        "num_kv_heads": 3,
        "head_size": 64,
    }


def test_the_bytes_are_those_of_the_storages_each_once() -> None:
    shared = Storage(1000)
    layers = {
        "a": attention(kv_cache=Tensor([10, 10], "torch.uint8", shared)),
        "b": attention(kv_cache=Tensor([10, 10], "torch.uint8", shared)),
        "c": attention(kv_cache=[Tensor([4], "torch.bfloat16")]),
        "d": attention(kv_cache=[]),
        "e": attention(kv_cache=Tensor([0], "torch.uint8")),
        "f": attention(kv_cache=None),
    }
    reply = worker(layers).kvguard_read("n")
    assert reply["kv_bytes"] == 1000 + 8
    assert [layer["tensor_dtype"] for layer in reply["layers"]] == [
        "torch.uint8",
        "torch.uint8",
        "torch.bfloat16",
        None,
        None,
        None,
    ]


def test_what_json_cannot_hold_becomes_words() -> None:
    layers = {
        "a": attention(_k_scale=scale(float("nan"), float("inf"), float("-inf")), _k_scale_float=float("nan")),
        "b": attention(_k_scale=0.5, _v_scale=None, _q_scale=3, _v_scale_float=None),
        "c": attention(sliding_window=object(), kv_cache_dtype=None, attn_backend=None),
    }
    read = worker(layers).kvguard_read("n")
    a, b, c = read["layers"]
    assert (a["k_scale"], a["k_scale_float"]) == (["NaN", "Infinity", "-Infinity"], "NaN")
    assert (b["k_scale"], b["v_scale"], b["q_scale"], b["v_scale_float"]) == ([0.5], None, [3.0], None)
    assert (c["sliding_window"], c["kv_cache_dtype"], c["backend"], c["error"]) == (None, None, None, None)
    json.dumps(read, allow_nan=False)


def test_of_many_scales_the_first_are_reported() -> None:
    read = worker({"a": attention(_k_scale=scale(*[1.0] * 5000))}).kvguard_read("n")
    assert len(read["layers"][0]["k_scale"]) == 4096


def test_layers_without_a_cache_are_not_attention_layers() -> None:
    assert worker({"a": attention(), "mlp": SimpleNamespace()}).kvguard_read("n")["layers"][0]["name"] == "a"


def test_errors_are_values() -> None:
    class Broken:
        def get_name(self) -> str:
            raise RuntimeError("no name")

    reply = worker({"a": attention(attn_backend=Broken()), "b": attention(_k_scale="x")}).kvguard_read("n")
    assert reply["error"] is None
    assert reply["layers"][0]["error"] == "RuntimeError: no name"
    assert "AttributeError" in reply["layers"][1]["error"]
    nothing = load().WorkerExtension()
    assert "vllm_config" in nothing.kvguard_read("n")["error"]
    odd = worker({"a": attention()})
    odd.rank = None
    assert (odd.kvguard_read("n")["tp_rank"], odd.kvguard_read("n")["error"]) == (None, None)


def test_ranks_are_placed_by_their_number() -> None:
    reply = worker(model(1), rank=3, tensor_parallel_size=2, pipeline_parallel_size=2, world_size=4).kvguard_read("n")
    assert (reply["tp_rank"], reply["pp_rank"]) == (1, 1)


def test_a_reply_is_what_the_evidence_reader_expects() -> None:
    reply = worker(model(2)).kvguard_read("n0nce")
    reading = parse_replies(json.dumps({"replies": [reply], "expected_ranks": 1}).encode(), "n0nce")
    assert reading.replies[0].layers[0].k_scale == (0.05,)
    assert claims(reading)


def test_the_commands_own_extension_is_inherited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "their_extension.py").write_text("class Theirs:\n    def theirs(self):\n        return 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KVGUARD_INSIDE_EXTENSION", "their_extension.Theirs")
    both = worker(model(1), load())
    assert (both.theirs(), both.kvguard_read("n")["error"]) == ("theirs", None)


# Whom it answers


class Engine:
    """vLLM's engine client: one worker behind `collective_rpc`."""

    def __init__(self, *workers: Any, fails: Exception | None = None) -> None:
        self._workers = workers
        self._fails = fails
        self.asked = 0
        self.together = 0
        self.most_together = 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), **named: Any) -> list[Any]:
        assert "timeout" not in named, "a timeout that expires desynchronizes the engine"
        self.asked += 1
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        await asyncio.sleep(0)
        self.together -= 1
        if self._fails:
            raise self._fails
        return [getattr(one, method)(*args) for one in self._workers]


class Caller:
    """Calls the middleware as uvicorn would."""

    def __init__(self, engine: Engine, inside: ModuleType) -> None:
        self._app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        self.passed: list[tuple[Any, Any, Any]] = []
        self.middleware = inside.EvidenceMiddleware(self._engine_app)

    async def _engine_app(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append((scope, receive, send))

    async def get(self, path: str, headers: dict[bytes, bytes], kind: str = "http") -> tuple[int, dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": kind, "method": "GET", "path": path, "headers": list(headers.items()), "app": self._app}
        await self.middleware(scope, receive, send)
        if not sent:
            return 0, {}
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        body = sent[1]["body"]
        assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
        return int(sent[0]["status"]), json.loads(body)


KEY = {b"x-kvguard-secret": SECRET.encode(), b"x-kvguard-nonce": b"n1"}


def ask(
    engine: Engine, headers: dict[bytes, bytes], inside: ModuleType, path: str = EVIDENCE_PATH
) -> tuple[int, dict[str, Any]]:
    return asyncio.run(Caller(engine, inside).get(path, headers))


def test_whoever_knows_the_secret_is_answered() -> None:
    inside = load()
    ranks = [worker(model(1), inside, rank=rank, tensor_parallel_size=2, world_size=2) for rank in range(2)]
    status, document = ask(Engine(*ranks), KEY, inside)
    assert (status, document["expected_ranks"]) == (200, 2)
    assert [(reply["rank"], reply["nonce"]) for reply in document["replies"]] == [(0, "n1"), (1, "n1")]


@pytest.mark.parametrize(
    "headers",
    [{}, {b"x-kvguard-secret": b""}, {b"x-kvguard-secret": b"wrong"}, {b"x-kvguard-secret": "sésame".encode()}],
)
def test_nobody_else_learns_that_the_path_exists(headers: dict[bytes, bytes]) -> None:
    inside = load()
    engine = Engine(worker(model(1), inside))
    assert ask(engine, headers, inside) == (404, {"detail": "Not Found"})
    assert engine.asked == 0


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", "http"),
        ("/", "http"),
        ("/_kvguard", "http"),
        ("/v1" + EVIDENCE_PATH, "http"),
        (EVIDENCE_PATH, "websocket"),
        ("", "lifespan"),
    ],
)
def test_everything_else_passes_untouched(path: str, kind: str) -> None:
    inside = load()
    caller = Caller(Engine(), inside)
    asyncio.run(caller.get(path, KEY, kind))
    [(scope, _, _)] = caller.passed
    assert (scope["path"], scope["type"], scope["headers"]) == (path, kind, list(KEY.items()))


def test_an_engine_that_cannot_be_asked_is_an_answer() -> None:
    inside = load()
    status, document = ask(Engine(fails=RuntimeError("engine is dead")), KEY, inside)
    assert (status, document) == (500, {"error": "RuntimeError: engine is dead"})
    assert ask(Engine(), KEY, inside) == (200, {"replies": [], "expected_ranks": None})


def test_one_question_at_a_time() -> None:
    inside = load()
    engine = Engine(worker(model(1), inside))
    caller = Caller(engine, inside)

    async def several() -> None:
        await asyncio.gather(*(caller.get(EVIDENCE_PATH, KEY) for _ in range(4)))

    asyncio.run(several())
    assert (engine.asked, engine.most_together) == (4, 1)


# Data parallelism


class Engines:
    """vLLM's client of several engines (0.32.0 v1/engine/core_client.py: DPLBAsyncMPClient): `collective_rpc` asks each of
    them and returns what the first one answers; each can be asked by itself."""

    def __init__(self, *engines: list[Any], configured: int | None = None) -> None:
        self.core_engines = [number.to_bytes(2, "little") for number in range(len(engines))]
        self.engine_core = self
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=configured or len(engines)))
        self._workers = dict(zip(self.core_engines, engines, strict=True))
        self.fails: dict[bytes, Exception] = {}
        self.answered: list[bytes] = []

    async def _call_utility_async(self, utility: str, *args: Any, engine: bytes) -> Any:
        method, timeout, arguments, keywords = args
        assert (utility, timeout, keywords) == ("collective_rpc", None, None)
        await asyncio.sleep(0)
        self.answered.append(engine)
        if engine in self.fails:
            raise self.fails[engine]
        return [getattr(one, method)(*arguments) for one in self._workers[engine]]

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        calls = [self._call_utility_async("collective_rpc", method, None, args, None, engine=e) for e in self.core_engines]
        return (await asyncio.gather(*calls))[0]


def ask_engines(engines: Engines, inside: ModuleType) -> tuple[int, TensorReading | None, dict[str, Any]]:
    status, document = asyncio.run(Caller(engines, inside).get(EVIDENCE_PATH, KEY))  # type: ignore[arg-type]
    return status, parse_replies(document, "n1") if status == 200 else None, document


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "moe"])
def test_every_data_parallel_engine_is_asked(dense: bool) -> None:
    """Engines of a dense model each think they are alone; those of a mixture of experts know their number."""
    inside = load()
    more = [{} if dense else {"data_parallel_size": 2, "data_parallel_rank": number} for number in range(2)]
    engines = Engines(
        *([worker(model(2, dtype), inside, **known)] for dtype, known in zip(("fp8_e4m3", "bfloat16"), more, strict=True))
    )
    status, reading, _ = ask_engines(engines, inside)
    assert status == 200
    assert reading is not None
    assert (reading.engines, reading.expected_ranks) == (2, 2)
    assert [reply.who for reply in reading.replies] == ["DP 0 rank 0", "DP 1 rank 0"]
    assert gaps(reading) == ()
    assert any("kv_cache_dtype" in text for text in disagreements(reading))


def test_an_engine_that_this_server_does_not_reach_is_missing() -> None:
    inside = load()
    engines = Engines([worker(model(1), inside)], [worker(model(1), inside)], configured=3)
    _, reading, _ = ask_engines(engines, inside)
    assert reading is not None
    assert gaps(reading) == ("2 of 3 ranks answered",)


def test_one_engine_that_fails_is_an_error_and_all_are_waited_for() -> None:
    inside = load()
    engines = Engines([worker(model(1), inside)], [worker(model(1), inside)])
    engines.fails = {engines.core_engines[0]: RuntimeError("worker died")}
    status, _, document = ask_engines(engines, inside)
    assert (status, document) == (500, {"error": "RuntimeError: worker died"})
    assert engines.answered == engines.core_engines


def test_scales_that_differ_between_device_and_host_are_invalid() -> None:
    """Waking from sleep sets the device's scales to 1.0 and leaves the host's (0.12.0..0.28.0, V1 runner)."""
    inside = load()
    woken = worker(model(1, _k_scale=scale(1.0)), inside)
    _, reading, _ = ask_engines(Engines([worker(model(1), inside)], [woken]), inside)
    assert reading is not None
    assert invalid_scales(reading) == (
        "DP 1 rank 0 layer model.layers.0.self_attn.attn: k_scale is 1.0 on the device and 0.05 on the host",
    )
