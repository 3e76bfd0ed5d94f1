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
import time
from typing import Any

PATH = "/_kvguard/inside/"
_METHODS = {"evidence": "kvguard_read", "inexact": "kvguard_inexact", "reference": "kvguard_reference"}
_WITH_QUESTION = {"kvguard_reference"}
_MAX_QUESTION = 8 * 1024 * 1024  # bytes of a question's body
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
            sliding_window=_config(layer, "sliding_window"),
            num_kv_heads=_config(layer, "num_kv_heads"),
            head_size=_config(layer, "head_size"),
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
    """A plain value of a config or layer; None for objects, which the reply could not carry."""
    value = getattr(config, name, None)
    return value if isinstance(value, (int, float, str, bool)) else None


# ---- The reference pass: exact 16-bit attention over the pass's own keys and values, in the engine's own weights ----

_E4M3_MAX, _E5M2_MAX, _INT8_MAX = 448.0, 57344.0, 127.0
_LARGEST = {"fp8_e4m3": _E4M3_MAX, "fp8_e5m2": _E5M2_MAX, "int8": _INT8_MAX}
_QUERY_ROWS = 256  # rows of queries attended at a time, so that a long sequence needs no n × n × heads at once
_LOGIT_ROWS = 64  # rows of logits held at a time: 64 × 128k vocabulary × 4 bytes are 33 MB


def _fake_quantize(tensor: Any, scale: Any, form: str, rounding: str) -> Any:
    """`tensor` as it would come back out of a cache of this format. `scale` is a float, or one value for each head.

    Nearest rounds half to even; truncate rounds toward zero, as vLLM 0.32.0's CPU kernel does (measured).
    """
    import torch  # noqa: PLC0415 (the engine's own)

    limit = _LARGEST[form]
    scaled = (tensor.float() / scale).clamp(-limit, limit)
    if form == "int8":
        return (scaled.trunc() if rounding == "truncate" else scaled.round()) * scale
    dtype = torch.float8_e4m3fn if form == "fp8_e4m3" else torch.float8_e5m2
    stored = scaled.to(dtype)
    if rounding == "truncate":
        over = stored.float().abs() > scaled.abs()
        codes = stored.view(torch.uint8)
        # One code towards zero: sign and magnitude are separate bits, so the magnitude is simply one less.
        stored = torch.where(over, codes - over.to(torch.uint8), codes).view(dtype)
    return stored.float() * scale


class _ExactAttention:
    """Stands in for a layer's `impl` during one pass: exact causal attention, nothing read from or written to the cache.

    Everything else about the implementation is the original's.
    """

    def __init__(self, layer: Any, original: Any, choice: dict[str, Any], index: int, ranges: dict[str, Any] | None) -> None:
        self._layer = layer
        self._original = original
        self._choice = choice
        self._index = index
        self._ranges = ranges

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, _cache: Any, _metadata: Any, output: Any, *_: Any, **__: Any
    ) -> Any:
        """query [tokens, heads, size], key and value [tokens, KV heads, size]; writes output [tokens, heads, size]."""
        import torch  # noqa: PLC0415

        original, choice = self._original, self._choice
        q, k, v = query.float(), key.float(), value.float()
        if self._ranges is not None:
            self._ranges[layer.layer_name] = {"k": _range(k), "v": _range(v)}
        if choice.get("format"):
            k_scale, v_scale = self._scales(k, v)
            k = _fake_quantize(k, k_scale, choice["format"], choice.get("rounding", "nearest"))
            v = _fake_quantize(v, v_scale, choice["format"], choice.get("rounding", "nearest"))
            if choice.get("compute") == "16bit":  # kernels dequantize into the model's dtype before they multiply
                k, v = k.to(key.dtype).float(), v.to(value.dtype).float()
        if choice.get("query"):
            q = _fake_quantize(q, self._query_scale(), choice["format"] or "fp8_e4m3", choice.get("rounding", "nearest"))
        tokens, heads, _size = q.shape
        groups = heads // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        window = _window(layer, original)
        cap = float(getattr(original, "logits_soft_cap", 0.0) or 0.0)
        sinks = getattr(original, "sinks", None)
        columns = torch.arange(tokens, device=q.device)
        for begin in range(0, tokens, _QUERY_ROWS):
            rows = columns[begin : begin + _QUERY_ROWS]
            scores = torch.einsum("qhd,khd->hqk", q[begin : begin + _QUERY_ROWS], k) * float(original.scale)
            if cap:
                scores = cap * torch.tanh(scores / cap)
            hidden = columns[None, :] > rows[:, None]
            if window is not None:
                hidden = hidden | (columns[None, :] <= rows[:, None] - window)
            scores = scores.masked_fill(hidden[None], float("-inf"))
            if sinks is not None:
                sink = sinks.float().reshape(-1, 1, 1).expand(heads, len(rows), 1)
                weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
            else:
                weights = torch.softmax(scores, dim=-1)
            if choice.get("probabilities"):
                weights = _fake_quantize(weights, 1.0 / _E4M3_MAX, "fp8_e4m3", choice.get("rounding", "nearest"))
            attended = torch.einsum("hqk,khd->qhd", weights, v)
            output[begin : begin + len(rows)].copy_(attended.to(output.dtype).view(len(rows), heads, -1))
        return output

    def _scales(self, k: Any, v: Any) -> tuple[Any, Any]:
        """Scales of keys and values: the engine's own, 1.0, of each token and head, or given for each layer (and head)."""
        scales = self._choice.get("scales", "engine")
        if scales == "per_token_head":
            limit = _LARGEST[self._choice["format"]]
            smallest = 1e-12  # a head of zeros stays zeros
            return tuple(one.abs().amax(dim=-1, keepdim=True).clamp_min(smallest) / limit for one in (k, v))
        if scales == "unit":
            return 1.0, 1.0
        if scales == "engine":
            return _broadcast(self._layer._k_scale), _broadcast(self._layer._v_scale)
        return _given(scales["k"][self._index], k), _given(scales["v"][self._index], v)

    def _query_scale(self) -> Any:
        own = getattr(self._layer, "_q_scale", None)
        return 1.0 if own is None else _broadcast(own)


def _range(values: Any) -> dict[str, Any]:
    """What a calibration needs of keys or values [tokens, heads, size]: max |x| of each head, and how many numbers
    e4m3 at scale 1.0 would saturate (above 448), lose (not zero, below its smallest number 2^-9) or keep with fewer
    than three bits of mantissa (below 2^-6)."""
    size = values.abs()
    return {
        "amax": [_number(value) for value in size.amax(dim=(0, 2)).tolist()],
        "count": size.numel(),
        "saturated": int((size > _E4M3_MAX).sum()),
        "underflowed": int(((size > 0) & (size < 2.0**-9)).sum()),
        "subnormal": int(((size > 0) & (size < 2.0**-6)).sum()),
    }


def _given(scale: Any, tensor: Any) -> Any:
    """A given scale: a number, or one for each KV head of `tensor` [tokens, KV heads, size]."""
    if not isinstance(scale, list):
        return float(scale)
    if len(scale) != tensor.shape[1]:
        raise ValueError(f"{len(scale)} scales given for {tensor.shape[1]} KV heads")
    return tensor.new_tensor(scale).reshape(1, -1, 1)


def _broadcast(scale: Any) -> Any:
    """A scale tensor as a float, or shaped to multiply [tokens, KV heads, size]."""
    if scale.numel() == 1:
        return float(scale)
    return scale.detach().float().reshape(1, -1, 1)


def _window(layer: Any, impl: Any) -> int | None:
    """Tokens a query sees, itself included; None without a sliding window."""
    window = getattr(layer, "sliding_window", None)
    if window is None:
        window = getattr(impl, "sliding_window", None)
    if isinstance(window, (tuple, list)):
        window = window[0] + 1 if window and window[0] is not None and window[0] >= 0 else None
    return int(window) if isinstance(window, int) and window > 0 else None


def _inexact(worker: Any) -> list[str]:
    """Why this model's attention would not be reproduced exactly, by layer and class; empty when it would."""
    config = worker.vllm_config
    reasons = []
    if config.parallel_config.pipeline_parallel_size > 1:
        reasons.append("pipeline parallel: ranks without logits")
    if config.parallel_config.data_parallel_size > 1:
        reasons.append("data parallel: ranks would have to enter the pass together")
    if getattr(config, "lora_config", None) is not None:
        reasons.append("LoRA enabled: a forward outside the runner keeps the last request's adapter")
    if getattr(config.model_config, "uses_mrope", False):
        reasons.append("multimodal rotary positions")
    layers = _attention_layers(worker.model_runner)
    if not layers:
        reasons.append("no attention layer with a KV cache was found")
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        kind = type(layer).__name__
        if kind != "Attention" or impl is None:
            reasons.append(f"{name}: {kind} is not plain attention")
            continue
        if getattr(impl, "alibi_slopes", None) is not None:
            reasons.append(f"{name}: ALiBi slopes")
        if getattr(layer, "kv_sharing_target_layer_name", None):
            reasons.append(f"{name}: shares another layer's KV cache")
        kind_of_attention = str(getattr(layer, "attn_type", "decoder")).rpartition(".")[2].lower()
        if kind_of_attention != "decoder":
            reasons.append(f"{name}: {kind_of_attention} attention")
        if getattr(layer, "head_size_v", getattr(layer, "head_size", None)) != getattr(layer, "head_size", None):
            reasons.append(f"{name}: keys and values of different sizes")
    return reasons


def _wrong_scales(choices: list[dict[str, Any]], layers: int) -> str:
    """Why scales given for a pass cannot be this model's, "" when they can."""
    for choice in choices:
        scales = choice.get("scales")
        given = scales if isinstance(scales, dict) else {}
        for name, values in given.items():
            if len(values) != layers:
                return f"{name} scales are given for {len(values)} layers, the engine has {layers}"
    return ""


def _swap(layers: dict[str, Any], choice: dict[str, Any], ranges: dict[str, Any] | None) -> list[tuple[Any, Any, Any]]:
    """Put exact attention into every layer; returns what `_restore` needs. Query quantization is off meanwhile."""
    before = []
    for index, layer in enumerate(layers.values()):
        before.append((layer, layer.impl, getattr(layer, "query_quant", None)))
        layer.impl = _ExactAttention(layer, layer.impl, choice, index, ranges)
        if before[-1][2] is not None:
            layer.query_quant = None
    return before


def _restore(before: list[tuple[Any, Any, Any]]) -> None:
    for layer, impl, query_quant in before:
        layer.impl = impl
        if query_quant is not None:
            layer.query_quant = query_quant


def _run_pass(worker: Any, request: dict[str, Any], choice: dict[str, Any], ranges: dict[str, Any] | None) -> dict[str, Any]:
    """One forward over the whole sequence; logits only for the positions that predict the scored tokens."""
    import torch  # noqa: PLC0415
    from vllm.forward_context import set_forward_context  # noqa: PLC0415

    runner, ids, start = worker.model_runner, request["ids"], request["start"]
    model = runner.get_model() if hasattr(runner, "get_model") else runner.model
    input_ids = torch.tensor(ids, dtype=torch.int32, device=runner.device)
    positions = torch.arange(len(ids), dtype=torch.int64, device=runner.device)
    before = _swap(_attention_layers(runner), choice, ranges)
    try:
        context = set_forward_context(None, worker.vllm_config, num_tokens=len(ids), slot_mapping={}, skip_compiled=True)
        with torch.inference_mode(), context:
            hidden = model(input_ids=input_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
            result: dict[str, Any] = {"label": choice.get("label", ""), "logprobs": [], "top1": [], "at": []}
            for begin in range(start, len(ids), _LOGIT_ROWS):
                end = min(begin + _LOGIT_ROWS, len(ids))
                logits = model.compute_logits(hidden[begin - 1 : end - 1])
                if logits is None:  # another rank of the group has them
                    return {}
                _read_logits(logits, ids[begin:end], request["at"][begin - start : end - start], result)
            return result
    finally:
        _restore(before)


def _read_logits(logits: Any, ids: list[int], at: list[list[int]], result: dict[str, Any]) -> None:
    """Log probabilities of the tokens that came, of the ids asked for, and the most likely id, by position."""
    import torch  # noqa: PLC0415

    logprobs = torch.log_softmax(logits.float(), dim=-1)
    result["top1"] += logprobs.argmax(dim=-1).tolist()
    for row, (token, wanted) in enumerate(zip(ids, at, strict=True)):
        values = logprobs[row, torch.tensor([token, *wanted], device=logprobs.device)].tolist()
        result["logprobs"].append(_number(values[0]))
        result["at"].append([_number(value) for value in values[1:]])


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

    def kvguard_inexact(self, nonce: str) -> dict[str, Any]:
        """Why the reference pass would not be exact on this rank (`reasons`, empty when it would), and its limits."""
        reply: dict[str, Any] = {"nonce": nonce, "rank": getattr(self, "rank", None), "error": None, "reasons": []}
        try:
            reply["tp_size"] = int(self.vllm_config.parallel_config.tensor_parallel_size)
            reply["reasons"] = _inexact(self)
            reply["max_tokens"] = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
        except Exception as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        return reply

    def kvguard_reference(self, nonce: str, request: dict[str, Any]) -> dict[str, Any]:
        """Score `request["ids"]` from position `request["start"]` on, once for each choice in `request["passes"]`.

        A choice: {label, format: null|"fp8_e4m3"|"fp8_e5m2"|"int8", rounding,
        scales: "engine"|"unit"|"per_token_head"|{k: […], v: […]}, query, probabilities}. `at` lists, for each scored
        position, further ids whose log probabilities are wanted.
        With `ranges`, the reply's `ranges` say what each layer's keys and values span (`_range`).
        """
        begun = time.perf_counter()
        reply: dict[str, Any] = {"nonce": nonce, "rank": getattr(self, "rank", None), "error": None, "passes": []}
        try:
            reply["tp_size"] = int(self.vllm_config.parallel_config.tensor_parallel_size)
            reasons = _inexact(self)
            limit = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
            wrong = _wrong_scales(request.get("passes", []), len(_attention_layers(self.model_runner)))
            if reasons or wrong:
                reply["error"] = wrong or "not exact: " + "; ".join(reasons[:4])
            elif not 0 < request["start"] < len(request["ids"]) <= limit:
                reply["error"] = f"{len(request['ids'])} tokens from {request['start']}: at most {limit} in one batch"
            else:
                ranges: dict[str, Any] | None = {} if request.get("ranges") else None
                reply["passes"] = [_run_pass(self, request, choice, ranges) for choice in request["passes"]]
                reply["ranges"] = ranges
        except Exception as error:
            reply["error"] = f"{type(error).__name__}: {error}"
        reply["seconds"] = time.perf_counter() - begun
        return reply


def _engine_version() -> str:
    import vllm  # noqa: PLC0415 (the engine has it loaded already; the API server's import of this file stays light)

    return str(vllm.__version__)


def _expected_ranks(client: Any, replies: Any) -> int | None:
    """TP × PP × DP, by the replies; the front end's own configuration may know of more engines."""
    parallel = getattr(getattr(client, "vllm_config", None), "parallel_config", None)
    configured = _config(parallel, "data_parallel_size") if parallel is not None else None
    for reply in replies:
        if isinstance(reply, dict) and isinstance(reply.get("tp_size"), int):
            tp, pp, dp = (reply.get(name) or 1 for name in ("tp_size", "pp_size", "dp_size"))
            return int(tp * pp * max(dp, configured if isinstance(configured, int) else 1))
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
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-kvguard-secret", b"")
        method = _METHODS.get(scope["path"][len(PATH) :])
        if method is None or not hmac.compare_digest(given, self.secret.encode()):
            await _answer(send, 404, {"detail": "Not Found"})
            return
        nonce = headers.get(b"x-kvguard-nonce", b"").decode("ascii", "replace")
        try:
            question = json.loads(await _body(receive)) if scope["method"] == "POST" else None
            if isinstance(question, dict) != (method in _WITH_QUESTION):  # the method would raise in the worker
                raise ValueError("POST a question as a JSON object, or GET what takes none")
        except (ValueError, RecursionError) as error:
            await _answer(send, 400, {"error": str(error)})
            return
        async with self.busy:
            try:
                client = scope["app"].state.engine_client
                arguments = (nonce,) if question is None else (nonce, question)
                ask = _every_engine if method == "kvguard_read" else _first_engine
                replies = await ask(client, method, arguments)
            except Exception as error:
                await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
                return
        await _answer(send, 200, {"replies": replies, "expected_ranks": _expected_ranks(client, replies)})


async def _first_engine(client: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """The replies of an engine's ranks; with data parallelism of the first engine's only."""
    return list(await client.collective_rpc(method, args=arguments))


async def _every_engine(client: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """The replies of every data-parallel engine that this API server balances over, each with its engine's number.

    collective_rpc asks all of them and returns one's answer (0.8.5..0.32.0 v1/engine/core_client.py), so each is asked by
    itself. A dense model's engines think that they are alone (0.32.0 v1/engine/core.py: data_parallel_size = 1), so their
    own ranks would all look like the first's.
    """
    core: Any = getattr(client, "engine_core", None)
    engines = getattr(core, "core_engines", None) or ()
    if len(engines) < 2:
        return await _first_engine(client, method, arguments)
    call = core._call_utility_async
    asked = [call("collective_rpc", method, None, arguments, None, engine=engine) for engine in engines]
    # All are waited for, whatever one of them answers: a reply left behind would be the next question's.
    answers = await asyncio.gather(*asked, return_exceptions=True)
    replies = []
    for number, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            raise answer
        for reply in answer:
            size = max(reply.get("dp_size") or 1, len(engines))
            replies.append(
                {**reply, "dp_rank": reply["dp_rank"] if (reply.get("dp_size") or 1) > 1 else number, "dp_size": size}
            )
    return replies


async def _body(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or len(body) > _MAX_QUESTION:
            raise ValueError("the question was not received whole")
        if not message.get("more_body"):
            return bytes(body)


async def _answer(send: Any, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
