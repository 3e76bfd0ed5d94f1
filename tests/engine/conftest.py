"""A real vLLM on the CPU and a small real model, set up once in the cache and shared by all tests here."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from beside import Plain

from guarded import Guarded
from kvguard.demo.environment import ENGINE_VERSION, cpu_supports_fp8_kv, ensure_engine
from kvguard.demo.model import ensure_model
from kvguard.demo.variants import ensure_variants
from kvguard.engine.find import cache_directory

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs an engine."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def engine_cache() -> Path:
    """kvguard's cache; skips with the reason on a CPU that cannot run an FP8 KV cache."""
    supported, reason = cpu_supports_fp8_kv()
    if not supported:
        pytest.skip(reason)
    return cache_directory(os.environ)


@pytest.fixture(scope="session")
def engine_bin(engine_cache: Path) -> Path:
    """The engine's `vllm`."""
    return ensure_engine(ENGINE_VERSION, engine_cache)


@pytest.fixture(scope="session")
def engine_python(engine_bin: Path) -> Path:
    """The engine's own interpreter."""
    return engine_bin.with_name("python")


@pytest.fixture(scope="session")
def model(engine_python: Path, engine_cache: Path) -> Path:
    """SmolLM2-135M-Instruct, bfloat16."""
    return ensure_model(engine_python, engine_cache)


@pytest.fixture(scope="session")
def variant(model: Path) -> Callable[[str], Path]:
    """The directory of a variant of the model, by kind (see kvguard.demo.variants.VARIANTS)."""
    return ensure_variants(model).__getitem__


@pytest.fixture(scope="module")
def guarded(
    engine_bin: Path, variant: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Guarded]]:
    """Starts `kvguard serve` on a variant; everything started is ended with the module."""
    started: list[Guarded] = []

    def start(
        kind: str, *flags: str, policy: str = "", options: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Guarded:
        directory = tmp_path_factory.mktemp(kind)
        one = Guarded(directory, variant(kind), *flags, vllm=str(engine_bin), policy=policy, options=options, env=env)
        started.append(one)
        return one

    yield start
    for one in started:
        one.close()


@pytest.fixture
def plain(engine_bin: Path, model: Path) -> Iterator[Callable[..., Plain]]:
    """Starts plain engines, as somebody else would; ended with the test."""
    started: list[Plain] = []

    def start(log: Path, *flags: str) -> Plain:
        started.append(Plain(engine_bin, model, log, *flags))
        return started[-1]

    yield start
    for one in started:
        one.kill()
