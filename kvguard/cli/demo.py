"""`kvguard demo`: a real vLLM on the CPU, a small model, and the main job shown on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvguard.demo.cache import say
from kvguard.demo.environment import ENGINE_VERSION, cpu_supports_fp8_kv, ensure_engine
from kvguard.demo.model import ensure_model
from kvguard.demo.story import replace_by_serve, story
from kvguard.demo.variants import ensure_variants
from kvguard.engine.find import cache_directory
from kvguard.vocabulary import UsageError

TRAP = "kv_scheme_scales"
"""The variant whose config.json makes vLLM run FP8 without saying so."""

app = typer.Typer(no_args_is_help=True, help="A real vLLM on the CPU, a small model, and the main job shown on them.")


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
    vllm, places = _places(engine_version)
    width = max(len(name) for name in places)
    typer.echo(f"{'vLLM ' + engine_version:{width}}  {vllm}")
    for name, path in places.items():
        typer.echo(f"{name:{width}}  {path}")


@app.command()
def run() -> None:
    """Show the main job on a checkpoint with a trap: FP8 that log and metrics call `auto`, found, refused and cured.

    Takes about two minutes on two cores. Example: kvguard demo run
    """
    vllm, places = _supported_places()
    with story(vllm, places[TRAP]) as told:
        told.tell()


@app.command()
def serve() -> None:
    """Serve the trap checkpoint behind kvguard on 127.0.0.1:8000 until it is stopped.

    Example: kvguard demo serve
    """
    vllm, places = _supported_places()
    replace_by_serve(vllm, places[TRAP])


def _supported_places() -> tuple[Path, dict[str, Path]]:
    supported, reason = cpu_supports_fp8_kv()
    if not supported:
        raise UsageError(f"the demo needs an engine: {reason}")
    return _places(ENGINE_VERSION)


def _places(engine_version: str) -> tuple[Path, dict[str, Path]]:
    """The engine's `vllm`, and the model and its variants by name; made when they are not there."""
    cache = cache_directory(os.environ)
    vllm = ensure_engine(engine_version, cache)
    model = ensure_model(vllm.with_name("python"), cache)
    return vllm, {"model": model} | ensure_variants(model)
