"""The arms: one command each, equal but for the KV cache, the policy that proves it, and the controls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvguard.canonical import sha256_of
from kvguard.compare.models import AGAIN, EAGER, REFERENCE, WEAK
from kvguard.facts.calibration import pass_missing
from kvguard.guard.prepare import Prepared, prepare, understand
from kvguard.policy.models import MODEL_DTYPE, KVCachePolicy, Policy, ScalesRule
from kvguard.reference.artefact import Options, save_calibration
from kvguard.reference.overlay import attention_modules, why_dropped
from kvguard.reference.scales import Scales
from kvguard.verdict.checks import describe, violations
from kvguard.vocabulary import Confidence, KvguardError, PolicyRefusal, UsageError, canonical_dtype, is_quantized

WEAK_SCALE = 0.002
"""Scales of the weak arm: most keys and many values saturate, answers turn to noise and stay finite."""

_ARM = re.compile(r"(?P<dtype>[a-z0-9_]+)(?:@(?P<backend>[A-Za-z][A-Za-z0-9_]*))?(?:=(?P<scales>.+))?")
_LEFT_OUT = frozenset({"--kv-cache-dtype", "--kv-cache-dtype-skip-layers", "--calculate-kv-scales", "--seed"})
_WEAK_DTYPE = "fp8_e4m3"


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm that can be started. `scales` is a calibration overlay."""

    name: str
    argv: tuple[str, ...]
    policy: Policy
    scales: Path | None = None

    def prepared(self, env: Mapping[str, str]) -> Prepared:
        """The start, thought through. Raises PolicyRefusal where this engine and checkpoint cannot run the arm."""
        prepared = prepare(self.argv, self.policy, env, scales=self.scales)
        if problems := [describe(check) for check in violations(prepared.checks)]:
            raise PolicyRefusal(f"arm {self.name}: {'; '.join(problems)}")
        return prepared


def chosen_arms(named: str) -> tuple[str, ...]:
    """The arms of a list separated by commas, the 16-bit one first. Raises UsageError for what is no comparison."""
    names = list(dict.fromkeys(name.strip() for name in named.split(",") if name.strip()))
    for name in names:
        match = _ARM.fullmatch(name)
        if match is None or (match["dtype"] == REFERENCE and match["scales"]):
            wrong = True
        else:
            wrong = match["dtype"] != REFERENCE and is_quantized(match["dtype"]) is not True
        if wrong:
            raise UsageError(
                f"--arms {name!r}: required is {REFERENCE}, or a quantized KV dtype; @BACKEND and =CALIBRATION may follow"
            )
    first = [name for name in names if _parts(name)[0] == REFERENCE]
    if len(first) != 1 or len(names) < 2:
        raise UsageError(f"--arms {named!r}: required are one {REFERENCE} arm and at least one quantized one")
    return (*first, *(name for name in names if name not in first))


def arm_of(name: str, base: Sequence[str], env: Mapping[str, str], *, seed: int, production: bool) -> Arm:
    """The arm of this name: `base` ("vllm serve MODEL flags …") with everything pinned that arms share.

    A quantized arm takes the calibration that its name gives (`fp8_e4m3=PATH`), else what the checkpoint has. Raises
    UsageError for a base that sets the KV cache, since the arms could not differ from it.
    """
    dtype, backend, scales = _parts(name)
    words = _pinned(base, env, seed=seed, production=production)
    words += ("--attention-backend", backend) if backend else ()
    if dtype == REFERENCE:
        kv_cache = KVCachePolicy(dtype=(MODEL_DTYPE,), min_confidence=Confidence.PROVEN)
        return Arm(name, (*words, "--kv-cache-dtype", "auto"), Policy(kv_cache=kv_cache))
    rule = ScalesRule.RUNTIME if scales else ScalesRule.ANY
    kv_cache = KVCachePolicy(dtype=(canonical_dtype(dtype),), scales=rule, min_confidence=Confidence.PROVEN)
    return Arm(name, (*words, "--kv-cache-dtype", dtype), Policy(kv_cache=kv_cache), Path(scales) if scales else None)


def _parts(name: str) -> tuple[str, str, str]:
    """The dtype, the backend and the calibration of an arm's name."""
    match = _ARM.fullmatch(name)
    return (match["dtype"], match["backend"] or "", match["scales"] or "") if match else (name, "", "")


def again(reference: Arm) -> Arm:
    """The A/A arm: the 16-bit arm once more."""
    return Arm(AGAIN, reference.argv, reference.policy)


def weak_arm(name: str, base: Sequence[str], env: Mapping[str, str], directory: Path, *, seed: int, production: bool) -> Arm:
    """The weak arm: e4m3 with scales so small that the cache saturates, as an overlay of the checkpoint in `directory`.

    `name` is the arm whose backend it takes. Raises PolicyRefusal where this checkpoint's scales would not be loaded.
    """
    backend = _parts(name)[1]
    plain = arm_of(f"{_WEAK_DTYPE}@{backend}" if backend else _WEAK_DTYPE, base, env, seed=seed, production=production)
    prepared = prepare(plain.argv, plain.policy, env)
    version, files, declared = prepared.engine.version, prepared.files, prepared.declared
    if missing := pass_missing(version):
        raise PolicyRefusal(f"vLLM {version}: {missing.reason}")
    if reason := why_dropped(version, files, declared):
        raise PolicyRefusal(reason)
    layers = declared.geometry.layer_indices or tuple(sorted(attention_modules(version, files, declared)))
    scales = Scales(k=dict.fromkeys(layers, WEAK_SCALE), v=dict.fromkeys(layers, WEAK_SCALE))
    saved = save_calibration(
        files=files,
        declared=declared,
        digests=prepared.digests,
        engine=version,
        prompts=sha256_of("kvguard compare: weak arm"),
        options=Options(headroom=WEAK_SCALE, model_dtype=prepared.resolution.model_dtype or "unknown"),
        scales=scales,
        report={"what": "scales ruined on purpose: the weak arm of kvguard compare; never serve with them"},
        directory=directory,
    )
    kv_cache = KVCachePolicy(dtype=(_WEAK_DTYPE,), scales=ScalesRule.RUNTIME, min_confidence=Confidence.PROVEN)
    return Arm(WEAK, plain.argv, Policy(kv_cache=kv_cache), Path(saved.path))


def weak_or_why(
    name: str, base: Sequence[str], env: Mapping[str, str], directory: Path, *, seed: int, production: bool
) -> tuple[Arm | None, str]:
    """The weak arm, or why there is none; without it no task can say `free win`."""
    try:
        return weak_arm(name, base, env, directory, seed=seed, production=production), ""
    except KvguardError as error:
        return None, str(error)


def _pinned(base: Sequence[str], env: Mapping[str, str], *, seed: int, production: bool) -> tuple[str, ...]:
    _, command = understand(base, env)
    gone: set[int] = set()
    for use in command.uses:
        if use.name.replace("--no-", "--", 1) in _LEFT_OUT:
            if not use.count:
                raise UsageError(f"{use.where}: belongs to the arms; compare with a command that does not set it")
            gone.update(range(use.start, use.start + use.count))
    if any(use.name == "--kv-cache-dtype" for use in command.uses):
        raise UsageError("--kv-cache-dtype: the arms set it; name the caches to compare with --arms")
    kept = tuple(word for place, word in enumerate(command.words.arguments) if place not in gone)
    if production and command.present(EAGER):
        raise UsageError(f"{EAGER}: with --production the other pair would be eager too; leave one of them out")
    eager = () if production or command.present(EAGER) else (EAGER,)
    return (*command.words.prefix, *kept, "--seed", str(seed % (1 << 32)), *eager)
