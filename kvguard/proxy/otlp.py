"""Whether spans are asked for, by flag or by OpenTelemetry's own environment variables, and where they go."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from kvguard.files import printable
from kvguard.vocabulary import UsageError

if TYPE_CHECKING:
    from kvguard.proxy.tracing import Tracing

log = structlog.get_logger("kvguard")

FLAG = "--otlp-endpoint"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "http/protobuf": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "kvguard[otel]"),
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "opentelemetry-exporter-otlp-proto-grpc"),
}


def tracing_from(endpoint: str | None, env: Mapping[str, str]) -> Tracing | None:
    """Spans to `endpoint`, the collector's base URL, else to where `env` says; None where neither asks for them.

    Everything else is OpenTelemetry's own variables', sampling and the service's name among them. Raises UsageError for an
    endpoint that is no URL, and for a flag that cannot be followed. Variables are often set for a whole cluster: what they
    ask for and cannot have is a warning, and requests pass as without it.
    """
    asked_by = FLAG if endpoint else next((name for name in _ENDPOINTS if env.get(name, "").strip()), "")
    if not asked_by or env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if not endpoint and env.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("otlp", ""):
        return None
    protocol = next((env[name].strip() for name in _PROTOCOLS if env.get(name, "").strip()), "http/protobuf")
    try:
        if endpoint:
            _check(endpoint)
        return _tracing(endpoint, protocol)
    except _Impossible as error:
        if endpoint:
            raise UsageError(f"{FLAG}: {error}") from error
        log.warning("no spans are sent", asked_by=asked_by, reason=str(error))
        return None


class _Impossible(Exception):
    """Why no spans can be sent, and what to do."""


def _check(endpoint: str) -> None:
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise _Impossible(f"required is an http or https URL, found {printable(endpoint)!r}; for example http://127.0.0.1:4318")


def _tracing(endpoint: str | None, protocol: str) -> Tracing:
    if protocol not in _EXPORTERS:
        raise _Impossible(f"{_PROTOCOLS[1]} is {printable(protocol)!r}; required is {' or '.join(_EXPORTERS)}")
    module, package = _EXPORTERS[protocol]
    tracing = _module("kvguard.proxy.tracing", "kvguard[otel]")
    exporter = _module(module, package)
    where: dict[str, Any] = {}
    if endpoint:
        where["endpoint"] = endpoint.rstrip("/") + "/v1/traces" if protocol == "http/protobuf" else endpoint
    try:
        made: Tracing = tracing.Tracing(tracing.provider_to(exporter.OTLPSpanExporter(**where)))
    except ValueError as error:  # of a variable's value
        raise _Impossible(f"an OTEL_* variable cannot be used: {printable(str(error))}") from error
    return made


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _Impossible(
            f"the OpenTelemetry packages are not installed for {sys.executable} (no module {error.name}); install them there: "
            f"pip install '{package}'"
        ) from error
