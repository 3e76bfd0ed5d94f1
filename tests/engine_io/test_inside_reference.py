"""The reference pass's side of the file inside the engine, as far as it needs no torch."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from importlib import resources
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from worker_fakes import attention, model, state

PATH = "/_kvguard/inside/"
IMPL = SimpleNamespace(alibi_slopes=None)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    (tmp_path / "secret").write_text("sesame")
    monkeypatch.setenv("KVGUARD_INSIDE_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.delenv("KVGUARD_INSIDE_EXTENSION", raising=False)
    path = resources.files("kvguard.engine.inside") / "kvguard_inside.py"
    spec = importlib.util.spec_from_file_location("kvguard_inside", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worker(inside: ModuleType, layers: dict[str, Any] | None = None, **parallel: Any) -> Any:
    made = inside.WorkerExtension()
    made.__dict__.update(state(model(2, impl=IMPL) if layers is None else layers, **parallel))
    return made


class MLAAttention:
    def __init__(self) -> None:
        self.kv_cache: list[Any] = []
        self.impl = IMPL


# --- where the pass is exact ---


def test_plain_attention_is_exact(inside: ModuleType) -> None:
    reply = worker(inside, rank=1, tensor_parallel_size=2).kvguard_inexact("n")
    expected = {"nonce": "n", "rank": 1, "error": None, "reasons": [], "tp_size": 2, "max_tokens": 2048}
    assert reply == expected


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (MLAAttention(), "a: MLAAttention is not plain attention"),
        (attention(), "a: Attention is not plain attention"),
        (attention(impl=SimpleNamespace(alibi_slopes=[0.5])), "a: ALiBi slopes"),
        (attention(impl=IMPL, kv_sharing_target_layer_name="b"), "a: shares another layer's KV cache"),
        (attention(impl=IMPL, attn_type="AttentionType.ENCODER_ONLY"), "a: encoder_only attention"),
        (attention(impl=IMPL, attn_type="encoder_decoder"), "a: encoder_decoder attention"),
        (attention(impl=IMPL, head_size_v=128), "a: keys and values of different sizes"),
    ],
)
def test_layers_that_the_pass_does_not_reproduce(inside: ModuleType, layer: Any, reason: str) -> None:
    fine = attention(impl=IMPL, attn_type="decoder", head_size_v=64)
    assert worker(inside, {"fine": fine, "a": layer}).kvguard_inexact("n")["reasons"] == [reason]


def test_engines_that_the_pass_does_not_reproduce(inside: ModuleType) -> None:
    several = worker(inside, pipeline_parallel_size=2, data_parallel_size=2)
    several.vllm_config.lora_config = object()
    several.vllm_config.model_config.uses_mrope = True
    reasons = several.kvguard_inexact("n")["reasons"]
    assert [reason.split(":")[0] for reason in reasons] == [
        "pipeline parallel",
        "data parallel",
        "LoRA enabled",
        "multimodal rotary positions",
    ]
    assert worker(inside, {}).kvguard_inexact("n")["reasons"] == ["no attention layer with a KV cache was found"]


def test_errors_are_values(inside: ModuleType) -> None:
    nothing = inside.WorkerExtension()
    assert "vllm_config" in nothing.kvguard_inexact("n")["error"]
    assert "vllm_config" in nothing.kvguard_reference("n", {})["error"]
    for question in ({}, {"start": "1", "ids": [1, 2]}, {"start": 1, "ids": 3}):
        reply = worker(inside).kvguard_reference("n", question)
        assert reply["error"]
        assert (reply["nonce"], reply["passes"]) == ("n", [])
        assert reply["seconds"] >= 0


@pytest.mark.parametrize(("start", "tokens"), [(0, 5), (-1, 5), (5, 5), (6, 5), (1, 2049)])
def test_a_sequence_that_is_no_batch(inside: ModuleType, start: int, tokens: int) -> None:
    question = {"ids": [1] * tokens, "start": start, "at": [], "passes": [{"label": "16bit"}]}
    reply = worker(inside).kvguard_reference("n", question)
    assert reply["error"] == f"{tokens} tokens from {start}: at most 2048 in one batch"


def test_a_model_that_is_not_exact_is_not_scored(inside: ModuleType) -> None:
    reply = worker(inside, {"a": MLAAttention()}).kvguard_reference("n", {"ids": [1, 2], "start": 1, "at": [], "passes": []})
    assert reply["error"] == "not exact: a: MLAAttention is not plain attention"


# --- windows ---


@pytest.mark.parametrize(
    ("of_layer", "of_impl", "window"),
    [
        (None, None, None),
        (128, None, 128),
        (128, (63, 0), 128),
        (None, 256, 256),
        (None, (127, 0), 128),
        (None, [127, 0], 128),
        (None, (-1, -1), None),
        (None, (None, None), None),
        (None, (), None),
        (0, None, None),
        (-1, None, None),
    ],
)
def test_windows_count_the_query_itself(inside: ModuleType, of_layer: Any, of_impl: Any, window: int | None) -> None:
    layer, impl = SimpleNamespace(sliding_window=of_layer), SimpleNamespace(sliding_window=of_impl)
    assert inside._window(layer, impl) == window
    assert inside._window(SimpleNamespace(), SimpleNamespace()) is None


# --- the private paths ---


class Caller:
    """Asks the middleware of an engine with one worker."""

    def __init__(self, inside: ModuleType) -> None:
        self.inside = inside
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self.passed = 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.called.append((method, args))
        return [getattr(worker(self.inside), method)(*args)]

    async def _app(self, *_: Any) -> None:
        self.passed += 1

    def ask(self, method: str, path: str, *pieces: bytes, secret: bytes = b"sesame", leaves: bool = False) -> tuple[int, Any]:
        sent: list[dict[str, Any]] = []
        messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        if not leaves:
            messages.append({"type": "http.request", "body": b""})
        messages.append({"type": "http.disconnect"})

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(b"x-kvguard-secret", secret), (b"x-kvguard-nonce", b"n1")],
            "app": SimpleNamespace(state=SimpleNamespace(engine_client=self)),
        }
        asyncio.run(self.inside.EvidenceMiddleware(self._app)(scope, receive, send))
        return (int(sent[0]["status"]), json.loads(sent[1]["body"])) if sent else (0, None)


def test_each_topic_has_its_method(inside: ModuleType) -> None:
    caller = Caller(inside)
    status, document = caller.ask("GET", PATH + "inexact")
    assert (status, document["replies"][0]["reasons"], document["expected_ranks"]) == (200, [], 1)
    status, document = caller.ask("POST", PATH + "reference", b'{"ids": [1, 2], ', b'"start": 0}')
    assert (status, document["replies"][0]["nonce"]) == (200, "n1")
    assert "0: at most" in document["replies"][0]["error"]
    question = {"ids": [1, 2], "start": 0}
    assert caller.called == [("kvguard_inexact", ("n1",)), ("kvguard_reference", ("n1", question))]


@pytest.mark.parametrize("path", ["", "other", "evidence/", "../v1/models", "kvguard_reference"])
def test_there_are_no_other_topics(inside: ModuleType, path: str) -> None:
    caller = Caller(inside)
    assert caller.ask("GET", PATH + path) == (404, {"detail": "Not Found"})
    assert (caller.called, caller.passed) == ([], 0)


def test_without_the_secret_no_topic_exists_and_no_body_is_read(inside: ModuleType) -> None:
    caller = Caller(inside)
    assert caller.ask("POST", PATH + "reference", b"{", secret=b"guess") == (404, {"detail": "Not Found"})
    assert caller.called == []


@pytest.mark.parametrize(
    ("method", "topic", "body"),
    [
        ("GET", "reference", b""),
        ("POST", "reference", b"null"),
        ("POST", "reference", b"[1]"),
        ("POST", "reference", b"{"),
        ("POST", "reference", b"\xff"),
        ("POST", "reference", b"[" * 100_000),
        ("POST", "evidence", b"{}"),
        ("POST", "inexact", b"{}"),
    ],
)
def test_a_question_that_a_worker_would_raise_on_is_not_passed_to_it(
    inside: ModuleType, method: str, topic: str, body: bytes
) -> None:
    caller = Caller(inside)
    assert caller.ask(method, PATH + topic, body)[0] == 400
    assert caller.called == []


def test_a_question_is_bounded_and_whole(inside: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "_MAX_QUESTION", 64)
    caller = Caller(inside)
    refused = (400, {"error": "the question was not received whole"})
    assert caller.ask("POST", PATH + "reference", b'{"a": "', b"x" * 60, b'"}') == refused
    assert caller.ask("POST", PATH + "reference", b'{"ids": [1]', leaves=True) == refused
    assert caller.called == []
    assert caller.ask("POST", PATH + "reference", b'{"a": 1}')[0] == 200


@pytest.mark.parametrize("name", ["k", "v"])
def test_scales_for_another_number_of_layers_are_named(inside: ModuleType, name: str) -> None:
    scales = {"k": [1.0, 1.0], "v": [1.0, 1.0], name: [1.0]}
    request = {"ids": [1, 2, 3], "start": 1, "at": [], "passes": [{"label": "a", "format": "fp8_e4m3", "scales": scales}]}
    reply = worker(inside, rank=0).kvguard_reference("n", request)
    assert reply["error"] == f"{name} scales are given for 1 layers, the engine has 2"
