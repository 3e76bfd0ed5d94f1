"""A span for each request. Imported only where spans are asked for (see `otlp`): it needs `kvguard[otel]`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import kvguard
from kvguard.proxy.asgi import Headers, Scope
from kvguard.proxy.exchange import Exchange
from kvguard.proxy.span_attributes import (
    answer_attributes,
    asked_attributes,
    error_type,
    request_attributes,
    span_name,
    trace_context,
)
from kvguard.telemetry.backlog import Backlog

_CONTEXT = frozenset({b"traceparent", b"tracestate"})


@dataclass(frozen=True, slots=True)
class Traced:
    """A request's span. `began` in nanoseconds since the epoch."""

    span: Span
    route: str
    began: int


@dataclass(frozen=True, slots=True)
class _Ended:
    traced: Traced
    exchange: Exchange
    guard_headers: tuple[tuple[bytes, bytes], ...]
    at: int


def provider_to(exporter: SpanExporter) -> TracerProvider:
    """What makes spans and sends them in batches. Raises ValueError for an OTEL_* variable that cannot be used."""
    resource = Resource.create({"service.version": kvguard.__version__})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "kvguard"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Tracing:
    """`begin` and `end` on the data plane's loop; what a span takes from the request's body is read on a thread of its own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvguard", kvguard.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._backlog: Backlog[_Ended] = Backlog("kvguard-spans", _finish)
        self.start = self._backlog.start

    def begin(self, scope: Scope, route: str) -> tuple[Traced, Scope]:
        """A server span, child of the client's if it names one; and the request as the engine gets it, as its child."""
        began = time.time_ns()
        headers: Headers = scope["headers"]
        span = self._tracer.start_span(
            span_name(scope["method"], route),
            self._propagator.extract(trace_context(headers)),
            SpanKind.SERVER,
            request_attributes(scope, route),
            start_time=began,
        )
        passed_on: dict[str, str] = {}
        self._propagator.inject(passed_on, set_span_in_context(span))
        named = [(name.encode(), value.encode("latin-1")) for name, value in passed_on.items()]
        kept = [pair for pair in headers if pair[0] not in _CONTEXT]
        return Traced(span, route, began), {**scope, "headers": kept + named}

    def end(self, traced: Traced, exchange: Exchange, guard_headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """The request ended."""
        if traced.span.is_recording():
            self._backlog.put(_Ended(traced, exchange, guard_headers, traced.began + round(exchange.elapsed() * 1e9)))

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is left to whoever collects it, for about so long at most."""
        self._backlog.close(timeout_s)
        sending: Backlog[None] = Backlog("kvguard-last-spans", lambda _: self._provider.shutdown())
        sending.start()
        sending.put(None)
        sending.close(timeout_s)


def _finish(ended: _Ended) -> None:
    span, exchange = ended.traced.span, ended.exchange
    span.set_attributes(asked_attributes(ended.traced.route, exchange.body))
    span.set_attributes(answer_attributes(exchange, ended.guard_headers))
    if error_type(exchange):
        span.set_status(StatusCode.ERROR, exchange.failure or None)
    span.end(ended.at)
