"""`kvguard policy`: what a policy file may say, what one says, and three to start from."""

from __future__ import annotations

import json
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from kvguard.policy.models import MODEL_DTYPE, OnDrift, OnViolation, Policy, ScalesRule, ShadowPolicy, policy_digest
from kvguard.policy.parse import load_policy
from kvguard.policy.schema import policy_schema
from kvguard.vocabulary import Confidence, ExitCode, UsageError

app = typer.Typer(no_args_is_help=True, help="What a policy file may say, what one says, and examples.")

_SCALES = {
    ScalesRule.ANY: "from anywhere, but every layer has them, finite and positive",
    ScalesRule.CHECKPOINT: "calibrated values loaded from the checkpoint in every layer; 1.0 does not count",
    ScalesRule.UNIT: "exactly 1.0 in every layer",
    ScalesRule.RUNTIME: "computed by the running engine",
}
_CONFIDENCE = {
    Confidence.PROVEN: "read from the cache tensors of every layer",
    Confidence.CORROBORATED: "at least the memory arithmetic agrees",
    Confidence.ECHOED: "the engine's log or metrics saying so is enough",
}
_ACTION = {
    OnViolation.REFUSE: "stop the engine and exit 3",
    OnViolation.HOLD: "stop the engine and stay up, unready, for the record to be read",
    OnViolation.WARN: "serve all the same, and say so in record, log and metrics",
}
_DRIFT = {
    OnDrift.ALERT: "say so in state, metrics, log and a new record, and serve on",
    OnDrift.UNREADY: "the same, and fail readiness after two verifications in a row with {} evidence",
}


@app.command()
def schema() -> None:
    """Print the JSON schema of the policy file, for editors.

    Example: kvguard policy schema > policy.schema.json
    """
    typer.echo(json.dumps(policy_schema(), indent=2))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The policy file, YAML.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say in words what a policy requires, or list its errors by line and exit 2.

    Example: kvguard policy check policy.yaml
    """
    try:
        policy = load_policy(file)
    except UsageError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"ok": False, "errors": str(error).splitlines()}, indent=2))
        raise typer.Exit(ExitCode.USAGE) from None
    if as_json:
        valid = {"ok": True, "policy": policy.model_dump(mode="json"), "digest": policy_digest(policy)}
        typer.echo(json.dumps(valid, indent=2))
        return
    for topic, words in in_words(policy):
        typer.echo(f"{topic + ':':<20}{words}")
    typer.echo(f"{'digest:':<20}{policy_digest(policy)}")


@app.command()
def example(
    name: Annotated[str, typer.Argument(help="fp8-calibrated, fp8-unit-scales or sixteen-bit.", show_default=False)],
) -> None:
    """Print a commented example policy.

    Example: kvguard policy example fp8-calibrated > policy.yaml
    """
    if name not in example_names():
        raise UsageError(f"policy example {name!r}: no such example; there are {', '.join(example_names())}")
    typer.echo(_examples().joinpath(f"{name}.yaml").read_text("utf-8"), nl=False)


def example_names() -> list[str]:
    """The packaged examples' names, sorted."""
    return sorted(file.name.removesuffix(".yaml") for file in _examples().iterdir() if file.name.endswith(".yaml"))


def in_words(policy: Policy) -> list[tuple[str, str]]:
    """Every requirement of a policy as (topic, sentence); nothing is left out, defaults included."""
    kv_cache, engine = policy.kv_cache, policy.engine
    names = ["the model's own dtype, not quantized" if name == MODEL_DTYPE else name for name in kv_cache.dtype]
    confidence = Confidence(kv_cache.min_confidence)
    return [
        ("KV cache dtype", " or ".join(names) or "any; only its integrity is checked"),
        ("scales", f"{kv_cache.scales.value}: {_SCALES[kv_cache.scales]}"),
        ("layers left 16-bit", ", ".join(kv_cache.skip_layers) or "none"),
        ("evidence", f"{confidence.value}: {_CONFIDENCE[confidence]}"),
        ("engine version", f"vLLM {engine.version}" if engine.version else "any"),
        ("attention backend", " or ".join(engine.attention_backend) or "any"),
        ("on drift", f"{policy.drift.action.value}: {_DRIFT[policy.drift.action].format(policy.drift.min_confidence)}"),
        ("on violation", f"{policy.on_violation.value}: {_ACTION[policy.on_violation]}"),
        ("shadow probes", _shadow(policy.shadow)),
    ]


def _shadow(shadow: ShadowPolicy) -> str:
    """What the policy says of probes, where they are on."""
    baseline = "each start's self-check" if shadow.baseline is None else f"{shadow.baseline:g} nats by token"
    tolerance = "half of it, at least 0.02" if shadow.tolerance is None else f"{shadow.tolerance:g}"
    who = "requests that opt in" if shadow.require_opt_in else "every request that does not opt out"
    ranges = "; what keys and values span may be measured" if shadow.measure_ranges else ""
    return f"{shadow.on_regression.value} on a regression; baseline {baseline}, tolerance {tolerance}; of {who}{ranges}"


def _examples() -> Traversable:
    return resources.files("kvguard.policy") / "examples"
