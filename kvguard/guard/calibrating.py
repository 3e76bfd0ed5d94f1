"""Calibrating a checkpoint: a guarded 16-bit engine, reference passes over the prompts, and the artefact they give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvguard.canonical import sha256_of
from kvguard.engine.client import EngineClient, model_cards
from kvguard.engine.command import Command, as_int
from kvguard.engine.sealed import check_place
from kvguard.evidence.replies import Limits
from kvguard.facts.calibration import pass_missing
from kvguard.files import printable
from kvguard.guard.board import Board
from kvguard.guard.gate import Gate
from kvguard.guard.prepare import Prepared, prepare, understand
from kvguard.guard.private import run_privately
from kvguard.guard.reference_start import SIXTEEN_BIT
from kvguard.guard.settings import Settings
from kvguard.reference.artefact import Calibration, Options, overlays_directory, save_calibration
from kvguard.reference.calibrate import Measured, Progress, measure
from kvguard.reference.overlay import why_dropped
from kvguard.reference.prompts import PromptSet
from kvguard.reference.ranges import Spanned
from kvguard.reference.scales import Scales, report_layers, scales_from
from kvguard.vocabulary import ExitCode, Frozen, Json, PolicyRefusal, UsageError

_WEIGHTS = (".safetensors", ".bin", ".pt")
_CALCULATE = "--calculate-kv-scales"
_LEFT_OUT = frozenset({"--kv-cache-dtype", "--kv-cache-dtype-skip-layers", _CALCULATE})
_NO_PASS = {
    "--data-parallel-size": "data parallel: ranks would have to enter the pass together",
    "--pipeline-parallel-size": "pipeline parallel: ranks without logits",
}
_WITHOUT = "run `kvguard calibrate` without it, the scales are the same"


class Calibrated(Frozen):
    """A finished calibration and its report, as JSON."""

    calibration: Calibration
    report: dict[str, Json]


class Traffic(Frozen):
    """What clients' requests spanned in a guarded engine. `files` are its checkpoint's digests by name (sha256)."""

    origin: str
    engine: str
    spanned: Spanned
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """Of what was measured; it takes the place of a prompt set's."""
        return sha256_of(self.spanned.model_dump(mode="json"))


def calibrate(
    argv: Sequence[str],
    prompts: PromptSet,
    env: Mapping[str, str],
    *,
    headroom: float,
    settings: Settings,
    out: Path | None = None,
    outputs: tuple[int, int] = (1, 2),
    told: Callable[[Prepared], None] = lambda prepared: None,  # noqa: ARG005
    progress: Progress,
) -> Calibrated | int:
    """Start `argv`'s engine in 16 bit, measure, and write the artefact.

    Returns an exit code instead when the engine was not proven, and the guard has logged why; 0 when it was stopped first.
    `told` sees the start before it is made. Raises UsageError for a command that cannot be and for a place that cannot be
    written, both before the engine is started, PolicyRefusal for a checkpoint whose scales would not be loaded or whose
    attention the pass does not reproduce, EngineFailed for no answer.
    """
    words = sixteen_bit_words(argv, env)
    prepared = prepare(words, SIXTEEN_BIT, env, prompts=prompts)
    version, directory = prepared.engine.version, prepared.declared.directory
    if missing := pass_missing(version):
        raise PolicyRefusal(f"vLLM {version} cannot calibrate: {missing.reason} ({missing.source})")
    if reason := why_dropped(version, prepared.files, prepared.declared):
        raise PolicyRefusal(f"{directory}: {reason}")
    _refuse_parallel(prepared.command)
    check_place(out if out is not None else overlays_directory(env) / "<digest>")
    told(prepared)
    measured: list[Measured] = []

    async def work(client: EngineClient, secret: str, limits: Limits) -> None:
        card = next(iter(model_cards(await client.models())), {})
        found = await measure(
            client,
            secret,
            str(card.get("id", prepared.command.model)),
            prompts,
            chat_template=prepared.declared.has_chat_template,
            max_model_len=limits.max_model_len,
            progress=progress,
        )
        measured.append(found)

    try:
        code = run_privately(prepared, SIXTEEN_BIT, words, env, settings, Board(Gate()), work, outputs)
    except KeyboardInterrupt:
        if not measured:
            raise
        code = ExitCode.CLEAN  # stopped while the engine was ended: all was measured
    if code != ExitCode.CLEAN or not measured:
        return code
    texts: dict[str, Json] = {"digest": prompts.digest, "texts": len(prompts.prompts), "of": "texts"}
    return _written(prepared, texts, measured[0], headroom, out, env)


def calibrate_from_traffic(
    argv: Sequence[str], traffic: Traffic, env: Mapping[str, str], *, headroom: float, out: Path | None = None
) -> Calibrated:
    """Write the artefact from what clients' requests spanned; no engine is started.

    Raises UsageError when they were served from other weights or by another version, PolicyRefusal as `calibrate`.
    """
    prepared = prepare(sixteen_bit_words(argv, env), SIXTEEN_BIT, env)
    version, directory = prepared.engine.version, prepared.declared.directory
    if reason := why_dropped(version, prepared.files, prepared.declared):
        raise PolicyRefusal(f"{directory}: {reason}")
    if traffic.engine.partition("+")[0] != version.partition("+")[0]:
        raise UsageError(f"{traffic.origin}: measured on vLLM {traffic.engine}, the engine here is vLLM {version}")
    here = {item.name: item.sha256.removeprefix("sha256:") for item in prepared.digests}
    weights = [name for name in here.keys() & traffic.files.keys() if name.endswith(_WEIGHTS)]
    other = sorted(name for name in weights if here[name] != traffic.files[name])
    if other or not weights:
        raise UsageError(
            f"{traffic.origin}: serves other weights than {directory}: {', '.join(other[:4]) or 'no file in common'}"
        )
    spanned = traffic.spanned
    texts: dict[str, Json] = {"digest": traffic.digest, "texts": spanned.sequences, "of": "clients' requests"}
    measured = Measured(ranges=spanned.ranges, tokens=spanned.tokens, sequences=spanned.sequences)
    return _written(prepared, texts, measured, headroom, out, env)


def sixteen_bit_words(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command without what it says about a quantized cache; what a --config file says of it is overruled."""
    words = (word for word in argv if _plain(word.partition("=")[0]) != _CALCULATE)  # a version without it would reject it
    _, command = understand(tuple(words), env)
    _refuse_two_models(command)
    gone = {index for use in command.uses if _plain(use.name) in _LEFT_OUT for index in range(use.start, use.start + use.count)}
    kept = tuple(word for index, word in enumerate(command.words.arguments) if index not in gone)
    for use in command.uses:
        if not use.count and use.name in _LEFT_OUT - {"--kv-cache-dtype"}:
            raise UsageError(f"{use.where}: belongs to a quantized cache; calibrate with a command that does not set it")
    return (*command.words.prefix, *kept, "--kv-cache-dtype", "auto")


def _plain(flag: str) -> str:
    """A flag as spelled, in its positive form with dashes."""
    return flag.replace("_", "-").replace("--no-", "--", 1)


def _refuse_two_models(command: Command) -> None:
    """UsageError for --model beside the model: vLLM ignores it, and it may be another."""
    taken = {index for use in command.uses for index in range(use.start, use.start + use.count)}
    named = next((use for use in command.uses if use.name == "--model" and use.count), None)
    if named is not None and len(taken) < len(command.words.arguments):
        raise UsageError(f"{named.where}: the model to calibrate is {printable(command.model)}; leave --model out")


def _refuse_parallel(command: Command) -> None:
    """UsageError for what no reference pass runs under, as far as the command says it."""
    for flag, reason in _NO_PASS.items():
        use = command.last(flag)
        size = as_int(command.value(flag))
        if use is not None and size is not None and size > 1:
            raise UsageError(f"{use.where}: {flag} {size} cannot be calibrated: {reason}; {_WITHOUT}")
    if (use := command.last("--enable-lora")) is not None and command.present("--enable-lora"):
        raise UsageError(
            f"{use.where}: LoRA cannot be calibrated: a forward outside the runner keeps the last request's adapter; {_WITHOUT}"
        )


def _written(
    prepared: Prepared,
    texts: dict[str, Json],
    measured: Measured,
    headroom: float,
    out: Path | None,
    env: Mapping[str, str],
) -> Calibrated:
    scales: Scales = scales_from(measured.ranges, headroom)
    dtype = prepared.resolution.model_dtype or "unknown"
    report: dict[str, Json] = {
        "model": os.path.basename(os.path.abspath(prepared.declared.directory)),
        "engine": prepared.engine.full_version,
        "prompts": {**texts, "tokens": measured.tokens},
        "formula": f"scale = max|x| × {headroom:g} ÷ 448, rounded up to 8 significant bits",
        "layers": report_layers(measured.ranges, scales),
    }
    calibration = save_calibration(
        files=prepared.files,
        declared=prepared.declared,
        digests=prepared.digests,
        engine=prepared.engine.version,
        prompts=str(texts["digest"]),
        options=Options(headroom=headroom, model_dtype=dtype),
        scales=scales,
        report=report,
        directory=overlays_directory(env),
        out=out,
    )
    return Calibrated(calibration=calibration, report=report)
