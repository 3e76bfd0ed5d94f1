"""Fixtures of the proxy's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from proxy_fakes import FakeEngine, Proxy, Script

from kvguard.proxy.upstream import Limits, Upstream

Serve = Callable[..., tuple[Proxy, FakeEngine]]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a path short enough for Unix sockets."""
    with TemporaryDirectory(prefix="kg") as directory:
        yield Path(directory)


@pytest.fixture
def serve(short_dir: Path) -> Iterator[Serve]:
    """Start a fake engine with a script, and a proxy in front of it."""
    with ExitStack() as stack:

        def start(script: Script, limits: Limits | None = None) -> tuple[Proxy, FakeEngine]:
            engine = stack.enter_context(FakeEngine(script, short_dir / "e"))
            proxy = stack.enter_context(Proxy(Upstream(str(engine.uds)), limits))
            return proxy, engine

        yield start
