"""The other proxies of the benchmark: how each is had, without root, and how it is started in front of the same engine.

What cannot be had on this machine is skipped, and the report says why.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))

import toolbox  # type: ignore[import-not-found]

HERE = Path(__file__).parent
NGINX = toolbox.Package("deb", "nginx", (("nginx", "usr/sbin/nginx"),))
KEY = "sk-bench-4f6c1d0e8b7a9253"
_NGINX_CONFIGURATION = """
daemon off; master_process off; pid {directory}/nginx.pid; error_log {directory}/nginx.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 10000000;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  upstream engine {{ server unix:{uds}; keepalive 64; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""
_LITELLM_CONFIGURATION = """
model_list:
  - model_name: bench
    litellm_params: {{model: openai/bench, api_base: "http://127.0.0.1:{upstream}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
"""


@dataclass(frozen=True)
class Engine:
    """Where the engine listens, and a directory for files of the proxies."""

    uds: Path
    port: int
    directory: Path


@dataclass(frozen=True)
class Proxy:
    """A command, the port it serves on, and what is special about asking it."""

    name: str
    command: Sequence[str]
    port: int
    management_port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    slow: bool = False


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cache() -> Path:
    """Where peers are kept."""
    return Path(toolbox.directory()).with_name("peers")


def kvguard(engine: Engine, *more: str, name: str = "kvguard") -> Proxy:
    """kvguard's data plane, everything on."""
    port, management = free_port(), free_port()
    command = [sys.executable, str(HERE / "kvguard_relay.py"), str(engine.uds), str(port), str(management), *more]
    return Proxy(name, command, port, management)


def bare(engine: Engine) -> Proxy:
    """The bare relay on uvicorn and aiohttp."""
    port = free_port()
    return Proxy("bare", [sys.executable, str(HERE / "bare_relay.py"), str(engine.uds), str(port)], port)


def raw(engine: Engine) -> Proxy:
    """Bytes both ways on uvloop, which no proxy in Python gets below."""
    port = free_port()
    return Proxy("raw bytes", [sys.executable, str(HERE / "raw_relay.py"), str(engine.uds), str(port)], port)


def nginx(engine: Engine) -> Proxy:
    """Debian's nginx, one process, buffering off. Raises OSError or a subprocess's error when it cannot be had."""
    toolbox.directory().mkdir(parents=True, exist_ok=True)
    if toolbox.find("nginx") is None:
        toolbox.install(NGINX)
    port = free_port()
    configuration = engine.directory / "nginx.conf"
    configuration.write_text(_NGINX_CONFIGURATION.format(directory=engine.directory, uds=engine.uds, port=port))
    return Proxy(
        "nginx", [str(toolbox.find("nginx")), "-c", str(configuration), "-e", str(engine.directory / "nginx.log")], port
    )


def vllm_router(engine: Engine) -> Proxy:
    """vLLM's router, in Rust; it reaches engines over TCP only."""
    program = _installed("vllm-router", "vllm-router")
    port = free_port()
    command = [str(program), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"]
    command += ["--worker-urls", f"http://127.0.0.1:{engine.port}", "--prometheus-port", str(free_port())]
    return Proxy("vllm-router", command, port)


def litellm(engine: Engine) -> Proxy:
    """LiteLLM's proxy, one worker."""
    program = _installed("litellm", "litellm[proxy]")
    port = free_port()
    configuration = engine.directory / "litellm.yaml"
    configuration.write_text(_LITELLM_CONFIGURATION.format(upstream=engine.port, key=KEY))
    command = [str(program), "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "DISABLE_ADMIN_UI": "True"}
    return Proxy("LiteLLM", command, port, environment=quiet, key=KEY, slow=True)


def _installed(program: str, requirement: str) -> Path:
    """A program of a package in an environment of its own."""
    home = cache() / program
    found = home / "bin" / program
    if not found.is_file():
        home.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True, text=True, timeout=300)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=900)
    if not found.is_file():
        raise OSError(f"{requirement} holds no program {program}")
    return found


def start(proxy: Proxy, directory: Path) -> subprocess.Popen[bytes]:
    """Run it; what it says goes to a file."""
    said = (directory / f"{proxy.name}.log").open("wb")
    environment = {**os.environ, **proxy.environment, "TMPDIR": tempfile.gettempdir()}
    return subprocess.Popen(proxy.command, stdout=said, stderr=said, env=environment)
