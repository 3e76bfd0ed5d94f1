"""Whether spans are asked for, what is said where they cannot be sent, and that they arrive at a collector."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from proxy_fakes import Call, FakeEngine, Proxy
from structlog.testing import capture_logs

from kvguard.proxy.otlp import tracing_from
from kvguard.proxy.tracing import Tracing
from kvguard.proxy.upstream import Upstream
from kvguard.vocabulary import UsageError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the collectors nor the proxies of whoever runs this."""
    for name in (
        "OTEL_SERVICE_NAME",
        "OTEL_RESOURCE_ATTRIBUTES",
        ENDPOINT,
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `kvguard[otel]` was not installed."""
    monkeypatch.delitem(sys.modules, "kvguard.proxy.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)


class Collector:
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.append(self.path)
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def resources(self) -> list[Any]:
        return [one for body in self.bodies for one in ExportTraceServiceRequest.FromString(body).resource_spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


def test_off_is_the_default_and_loads_nothing() -> None:
    assert tracing_from(None, {}) is None
    program = (
        "import sys, kvguard.cli.main\n"
        "from kvguard.proxy.otlp import tracing_from\n"
        "assert tracing_from(None, {}) is None\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "env",
    [
        {ENDPOINT: " "},
        {ENDPOINT: "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"},
        {ENDPOINT: "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_SERVICE_NAME": "kvguard"},
    ],
)
def test_variables_that_ask_for_no_spans(env: dict[str, str]) -> None:
    with capture_logs() as logs:
        assert tracing_from(None, env) is None
    assert logs == []


@pytest.mark.usefixtures("without_extra")
def test_the_flag_without_the_extra_is_one_line_that_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"^--otlp-endpoint: .*are not installed for .*pip install 'kvguard\[otel\]'$"):
        tracing_from("http://127.0.0.1:4318", {})


@pytest.mark.usefixtures("without_extra")
def test_variables_without_the_extra_are_a_warning() -> None:
    with capture_logs() as logs:
        assert tracing_from(None, {ENDPOINT: "http://127.0.0.1:4318"}) is None
    [entry] = logs
    assert (entry["log_level"], entry["asked_by"]) == ("warning", ENDPOINT)
    assert "pip install 'kvguard[otel]'" in entry["reason"]


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://collector", "http://", "http://[", "http://h:99999"])
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"^--otlp-endpoint: required is an http or https URL, found "):
        tracing_from(endpoint, {})


@pytest.mark.parametrize(
    ("protocol", "says"),
    [("http/json", "required is http/protobuf or grpc"), ("grpc", "pip install 'opentelemetry-exporter-otlp-proto-grpc'")],
)
def test_protocols_that_cannot_be_spoken(protocol: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(UsageError, match=r"^--otlp-endpoint: ") as caught:
        tracing_from("http://127.0.0.1:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    assert says in str(caught.value)


def asked_through(tracing: Tracing | None, uds: Any) -> None:
    """One request through a proxy with these spans."""

    async def answers(call: Call) -> None:
        await call.json(b"{}")

    assert tracing is not None
    with FakeEngine(answers, uds) as engine, Proxy(Upstream(str(engine.uds)), tracing=tracing) as proxy:
        with proxy.client() as client:
            assert client.ask("GET", "/v1/models").status == 200
        proxy.plane.close()


@pytest.mark.parametrize(("named", "service"), [({}, "kvguard"), ({"OTEL_SERVICE_NAME": "llama"}, "llama")])
def test_spans_arrive_at_the_collector(
    collector: Collector, short_dir: Any, monkeypatch: pytest.MonkeyPatch, named: dict[str, str], service: str
) -> None:
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    asked_through(tracing_from(collector.url + "/", {}), short_dir / "e")
    assert collector.paths == ["/v1/traces"]
    [resource] = collector.resources()
    assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == service
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["GET /v1/models"]


def test_spans_go_where_the_variables_say(collector: Collector, short_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, collector.url)
    asked_through(tracing_from(None, {ENDPOINT: collector.url}), short_dir / "e")
    assert collector.paths == ["/v1/traces"]


def test_a_collector_that_is_not_there_is_no_requests_concern(short_dir: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked_through(tracing_from("http://127.0.0.1:9", {}), short_dir / "e")
    assert not any("Traceback" in text for text in caplog.messages)
