"""`kvguard demo`: a real vLLM on the CPU, a small model, and the main job shown on them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvguard.demo.cache import say
from kvguard.demo.environment import ENGINE_VERSION, cpu_supports_fp8_kv, ensure_engine
from kvguard.demo.model import ensure_model
from kvguard.demo.variants import ensure_variants
from kvguard.engine.find import cache_directory
from kvguard.vocabulary import UsageError

app = typer.Typer(no_args_is_help=True, help="A real vLLM on the CPU, a small model, and the main job shown on them.")


@app.callback()
def _group() -> None:
    """Keep `demo` a group of commands."""


@app.command()
def setup(
    engine_version: Annotated[str, typer.Option(help="Which vLLM to install.")] = ENGINE_VERSION,
    if_supported: Annotated[
        bool, typer.Option("--if-supported", help="On a CPU that cannot run it, say so and succeed.")
    ] = False,
) -> None:
    """Set up the CPU engine, the model and its variants in the cache; what is there already is kept.

    Example: kvguard demo setup
    """
    supported, reason = cpu_supports_fp8_kv()
    if not supported:
        if not if_supported:
            raise UsageError(f"no engine is set up: {reason}")
        say(f"no engine is set up: {reason}")
        return
    cache = cache_directory(os.environ)
    vllm = ensure_engine(engine_version, cache)
    model = ensure_model(vllm.with_name("python"), cache)
    places = {f"vLLM {engine_version}": vllm, "model": model} | ensure_variants(model)
    width = max(len(name) for name in places)
    for name, path in places.items():
        typer.echo(f"{name:{width}}  {path}")
