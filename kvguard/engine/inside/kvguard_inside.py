"""Runs inside vLLM: reads what every attention layer's KV cache really is, and answers on a private path.

Two official hooks carry it: `--worker-extension-cls kvguard_inside.WorkerExtension` adds one method to each
worker, `--middleware kvguard_inside.EvidenceMiddleware` adds one path to the API server. This file imports
nothing but the standard library (torch is the engine's own, met through its tensors).

Two rules come from the sources. A worker method that raises, or a `collective_rpc` timeout that expires,
leaves replies queued that the next step reads as its own (0.32.0 v1/executor/multiproc_executor.py:433), so
methods here return errors as values and no timeout is ever passed. A middleware must never delay or change
other requests, so it compares one path and hands everything else on.
"""

import asyncio
import hmac
import importlib
import json
import math
import os
from typing import Any

PATH = "/_kvguard/inside/evidence"
_MAX_SCALES = 4096  # values of one scale tensor that are reported


def _user_extension() -> Any:
    """The worker extension that the wrapped command itself asked for; ours inherits from it."""
    name = os.environ.get("KVGUARD_INSIDE_EXTENSION", "")
    if not name:
        return object
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _number(value: Any) -> Any:
    """A float that survives JSON: NaN and infinities become strings."""
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _scale(tensor: Any) -> Any:
    """Values of a scale that is a tensor, a float or absent."""
    if tensor is None:
        return None
    if isinstance(tensor, (int, float)):
        return [_number(tensor)]
    flat = tensor.detach().float().reshape(-1).cpu().tolist()
    return [_number(value) for value in flat[:_MAX_SCALES]]


def _host(value: Any) -> Any:
    return None if value is None else _number(value)


def _cache_tensors(layer: Any) -> list[Any]:
    """Tensors of a layer's cache: one tensor, or a list by virtual engine in older versions."""
    cache = getattr(layer, "kv_cache", None)
    if cache is None:
        return []
    items = cache if isinstance(cache, (list, tuple)) else [cache]
    return [item for item in items if hasattr(item, "dtype") and item.numel() > 0]


def _layer(name: str, layer: Any) -> dict[str, Any]:
    """What one attention layer holds; `error` instead of an exception."""
    entry: dict[str, Any] = {"name": name, "class": type(layer).__name__, "error": None}
    try:
        tensors = _cache_tensors(layer)
        backend = getattr(layer, "attn_backend", None)
        entry.update(
            backend=backend.get_name() if backend is not None else None,
            kv_cache_dtype=None if getattr(layer, "kv_cache_dtype", None) is None else str(layer.kv_cache_dtype),
            tensor_dtype=str(tensors[0].dtype) if tensors else None,
            shape=list(tensors[0].shape) if tensors else None,
            k_scale=_scale(getattr(layer, "_k_scale", None)),
            v_scale=_scale(getattr(layer, "_v_scale", None)),
            q_scale=_scale(getattr(layer, "_q_scale", None)),
            k_scale_float=_host(getattr(layer, "_k_scale_float", None)),
            v_scale_float=_host(getattr(layer, "_v_scale_float", None)),
            q_scale_float=_host(getattr(layer, "_q_scale_float", None)),
            sliding_window=getattr(layer, "sliding_window", None),
            num_kv_heads=getattr(layer, "num_kv_heads", None),
            head_size=getattr(layer, "head_size", None),
        )
    except Exception as error:  # an error here must be an answer, see the module's first rule
        entry["error"] = f"{type(error).__name__}: {error}"
    return entry


def _attention_layers(runner: Any) -> dict[str, Any]:
    """Layers with a KV cache, by name, from the compiled model's forward context."""
    context = runner.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "kv_cache")}


def _bytes(layers: dict[str, Any]) -> int:
    """Storage bytes of all cache tensors, each storage once (layers may share one allocation)."""
    storages: dict[int, int] = {}
    for layer in layers.values():
        for tensor in _cache_tensors(layer):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _config(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    return value if isinstance(value, (int, float, str, bool)) else None


_BASE = _user_extension()


class WorkerExtension(_BASE):  # type: ignore[misc,valid-type]
    """One method added to each worker."""

    def kvguard_read(self, nonce: str) -> dict[str, Any]:
        """This rank's account of its KV cache: a dict of plain values, `error` set when it could not be read."""
        reply: dict[str, Any] = {
            "nonce": nonce,
            "rank": getattr(self, "rank", None),
            "pid": os.getpid(),
            "error": None,
            "layers": [],
        }
        try:
            vllm_config = self.vllm_config
            parallel = vllm_config.parallel_config
            cache = vllm_config.cache_config
            scheduler = vllm_config.scheduler_config
            layers = _attention_layers(self.model_runner)
            tp_size = parallel.tensor_parallel_size
            reply.update(
                tp_rank=reply["rank"] % tp_size if isinstance(reply["rank"], int) else None,
                pp_rank=reply["rank"] // tp_size if isinstance(reply["rank"], int) else None,
                dp_rank=_config(parallel, "data_parallel_rank"),
                world_size=_config(parallel, "world_size"),
                tp_size=tp_size,
                pp_size=_config(parallel, "pipeline_parallel_size"),
                dp_size=_config(parallel, "data_parallel_size"),
                engine_version=_engine_version(),
                model_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
                cache_dtype_config=str(cache.cache_dtype),
                limits={
                    "max_num_seqs": _config(scheduler, "max_num_seqs"),
                    "max_num_batched_tokens": _config(scheduler, "max_num_batched_tokens"),
                    "max_model_len": _config(vllm_config.model_config, "max_model_len"),
                    "num_blocks": _config(cache, "num_gpu_blocks"),
                    "block_size": _config(cache, "block_size"),
                },
                kv_bytes=_bytes(layers),
                layers=[_layer(name, layer) for name, layer in layers.items()],
            )
        except Exception as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        return reply


def _engine_version() -> str:
    import vllm  # noqa: PLC0415 (the engine has it loaded already; the API server's import of this file stays light)

    return str(vllm.__version__)


def _expected_ranks(replies: Any) -> int | None:
    for reply in replies:
        if isinstance(reply, dict) and isinstance(reply.get("tp_size"), int):
            sizes = [reply.get(name) or 1 for name in ("tp_size", "pp_size", "dp_size")]
            return int(sizes[0] * sizes[1] * sizes[2])
    return None


def _secret() -> str:
    with open(os.environ["KVGUARD_INSIDE_SECRET_FILE"], encoding="ascii") as file:
        return file.read().strip()


class EvidenceMiddleware:
    """Answers the private path when the caller knows this start's secret; everything else passes untouched."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.secret = _secret()
        self.busy = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-kvguard-secret", b"")
        if not hmac.compare_digest(given, self.secret.encode()):
            await _answer(send, 404, {"detail": "Not Found"})
            return
        nonce = headers.get(b"x-kvguard-nonce", b"").decode("ascii", "replace")
        async with self.busy:
            try:
                client = scope["app"].state.engine_client
                replies = await client.collective_rpc("kvguard_read", args=(nonce,))
            except Exception as error:
                await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
                return
        await _answer(send, 200, {"replies": list(replies), "expected_ranks": _expected_ranks(replies)})


async def _answer(send: Any, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
