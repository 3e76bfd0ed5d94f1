"""The data plane's server: sockets, TLS, and stopping in steps."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from proxy_fakes import WAIT_S, Call, Proxy

from kvguard.proxy.server import TLS, bind
from kvguard.proxy.upstream import Upstream
from kvguard.vocabulary import UsageError


async def ok(call: Call) -> None:
    await call.json(b"{}")


async def streams_until_told(call: Call) -> None:
    await call.start_stream()
    await call.chunk(b"data: 1\n\n")
    await call.reader.readexactly(1)
    await call.chunk(b"data: 2\n\n")
    await call.send(b"0\r\n\r\n")


def test_bind_names_a_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}: another process has this port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("no-such-host.invalid", 0, "the host has no address"),
        ("192.0.2.1", 0, "no interface of this machine has that address"),
        ("127.0.0.1", 70000, "127.0.0.1:70000: ports go from 0 to 65535"),
        ("127.0.0.1", -1, "ports go from 0 to 65535"),
        ("a" * 70 + ".example", 0, "the host has no address"),
    ],
)
def test_bind_explains_what_cannot_be(host, port, text):
    with pytest.raises(UsageError, match=text) as caught:
        bind(host, port)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("host", "family"), [(None, socket.AF_INET), ("", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_bind_families(host, family):
    if family is socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with bind(host, 0) as listener:
        assert listener.family is family
        assert listener.getsockname()[1] > 0


def test_stream_continues_after_new_connections_are_refused(serve):
    proxy, engine = serve(streams_until_told)
    idle, late = proxy.client(), proxy.client()
    with proxy.client() as known:
        known.send("OPTIONS", "/_kvguard")
        assert known.answer().status == 404, "both idle connections were accepted before this one"
    with proxy.client() as client:
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        client.head()
        assert client.read_chunk() == b"data: 1\n\n"
        proxy.plane.stop_accepting()
        with suppress(ConnectionError):
            late.send("GET", "/v1/models")
        assert late.at_end(), "no request begins after this returns"
        assert idle.at_end(), "idle connections are closed"
        with pytest.raises(ConnectionRefusedError):
            proxy.client()
        assert proxy.plane.alive
        assert not proxy.plane.wait_idle(0.01)
        engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
        assert client.read_chunk() == b"data: 2\n\n"
        assert client.read_chunk() == b""
        assert proxy.plane.wait_idle(WAIT_S)
        assert client.at_end()
    idle.close()
    late.close()
    assert len(engine.calls) == 1
    proxy.plane.stop_accepting()
    proxy.plane.close()
    assert not proxy.plane.alive
    proxy.plane.stop_accepting()


def test_close_cuts_what_still_runs_and_frees_the_engine(serve, caplog):
    proxy, engine = serve(lambda call: call.wait_closed())
    with proxy.client() as client, proxy.client() as other, caplog.at_level(logging.ERROR):
        client.send("POST", "/v1/completions", body=b"{}")
        call = engine.next_call()
        other.send("POST", "/v1/completions", ("content-length: 5",))
        proxy.plane.close(flush_s=0.05)
        assert not proxy.plane.alive
        assert call.closed.wait(WAIT_S)
        assert client.at_end()
        assert other.at_end()
    assert proxy.forwarder.in_flight.count == 0
    assert caplog.records == []


def test_in_flight_is_counted(serve):
    proxy, engine = serve(streams_until_told)
    assert proxy.plane.wait_idle(0)
    clients = [proxy.client() for _ in range(3)]
    calls = []
    for client in clients:
        client.send("POST", "/v1/completions", body=b"{}")
        calls.append(engine.next_call())
    assert proxy.forwarder.in_flight.count == 3
    for call in calls:
        engine._loop.call_soon_threadsafe(call.reader.feed_data, b".")
    assert proxy.plane.wait_idle(WAIT_S)
    for client in clients:
        assert client.answer().complete
        client.close()


def test_cut_responses_leave_no_traceback_in_the_log(serve, caplog):
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")
        call.writer.close()

    proxy, _ = serve(script)
    with proxy.client() as client, caplog.at_level(logging.INFO):
        assert not client.ask("GET", "/v1/models").complete
        proxy.observer.next_end()
        assert proxy.plane.wait_idle(WAIT_S)
    assert [record for record in caplog.records if record.exc_info] == []


def test_signal_handlers_stay_as_they_were(serve):
    import signal

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    proxy, _ = serve(ok)
    with proxy.client() as client:
        assert client.ask("GET", "/v1/models").status == 200
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert "kvguard-data-plane" in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(
        [*command, "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    return key, cert


def test_tls(short_dir, certificate):
    from proxy_fakes import FakeEngine

    key, cert = certificate
    with (
        FakeEngine(ok, short_dir / "e") as engine,
        Proxy(Upstream(str(engine.uds)), tls=TLS(str(key), str(cert))) as proxy,
        socket.create_connection(proxy.address, timeout=WAIT_S) as plain,
        ssl.create_default_context(cafile=cert).wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        received = b""
        while part := secure.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.endswith(b"\r\n\r\n{}")


def test_unusable_certificate_is_a_usage_error(tmp_path):
    broken = tmp_path / "cert.pem"
    broken.write_text("no certificate")
    for cert in (broken, tmp_path / "absent.pem"):
        proxy = Proxy(Upstream("/nowhere"), tls=TLS(None, str(cert)))
        with pytest.raises(UsageError, match=r"cannot use the TLS files .*cert|cannot use the TLS files .*absent"):
            proxy.plane.start()
        proxy.plane.close()


def test_port_taken_between_bind_and_listen_is_a_usage_error():
    first = bind("127.0.0.1", 0)
    with Proxy(Upstream("/nowhere")) as holder:
        first.close()
        proxy = Proxy(Upstream("/nowhere"))
        proxy.plane._sockets[0].close()
        with pytest.raises(UsageError, match="cannot serve on the API port"):
            proxy.plane.start()
        proxy.plane.close()
        assert holder.plane.alive
