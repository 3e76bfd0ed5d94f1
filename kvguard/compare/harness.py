"""Tasks of lm-eval: the package's own command against an arm's endpoint, and each document's score from its samples."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvguard.canonical import sha256_of
from kvguard.compare.endpoint import Endpoint, endpoint
from kvguard.compare.models import HARNESS, Answered, Harness, Harnessed
from kvguard.engine.client import EngineClient
from kvguard.files import printable, read_regular_file
from kvguard.vocabulary import EngineFailed, UsageError

COMMAND = "lm_eval"
FILE_LIMIT = 1 << 30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}")
_SAMPLES = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b")
_OURS = ("--model", "--model_args", "--tasks", "--output_path", "--log_samples", "--seed", "--use_cache", "--predict_only")
_KNOWN = ("exact_match", "acc", "acc_norm", "em", "f1", "pass@1", "prompt_level_strict_acc")
"""Metrics by name, where the samples of an older version do not list them."""


def chosen_harness(named: str, arguments: Sequence[str]) -> Harness | None:
    """What lm-eval is asked; None without tasks. Raises UsageError for names that are none, and options that are ours."""
    names = tuple(dict.fromkeys(name.strip() for name in named.split(",") if name.strip()))
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(f"--lm-eval {printable(name)!r}: required are names of lm-eval's tasks, separated by commas")
    for word in arguments:
        if word.partition("=")[0] in _OURS:
            raise UsageError(f"--lm-eval-args {printable(word)!r}: kvguard sets it; leave it out")
    if arguments and not names:
        raise UsageError("--lm-eval-args: name the tasks with --lm-eval")
    return Harness(tasks=names, arguments=tuple(arguments)) if names else None


def harness_command(named: str, env: Mapping[str, str]) -> str:
    """The path of lm-eval's command: as named, beside our own interpreter, or on PATH. Raises UsageError without one."""
    beside = Path(sys.executable).parent / named
    found = str(beside) if os.sep not in named and os.access(beside, os.X_OK) else shutil.which(named, path=env.get("PATH"))
    if found is None:
        raise UsageError(
            f"--lm-eval-command {printable(named)!r}: no such command; install the extra, `pip install 'kvguard[lm-eval]'`, "
            "or name one"
        )
    return found


async def run_harness(
    asked: Harness,
    command: str,
    client: EngineClient,
    *,
    served_model: str,
    tokenizer: str,
    directory: Path,
    seed: int,
    concurrency: int,
) -> Harnessed:
    """Run lm-eval against this engine; its files and its log go to `directory`, which is emptied first.

    Raises UsageError when it fails, and for results without a score between 0 and 1 for each document; EngineFailed when
    the engine did not answer it.
    """
    _empty(directory)
    async with endpoint(client) as one:
        words = _words(asked, command, one, served_model, tokenizer, directory, seed, concurrency)
        code = await _run(words, {**os.environ, "OPENAI_API_KEY": one.key, "NO_PROXY": "127.0.0.1"}, directory / "log")
        if code:
            if not (await client.health()).ok:
                raise EngineFailed(f"the engine ended while lm-eval ran; {printable(str(directory / 'log'))}")
            raise UsageError(f"lm-eval ended with exit code {code}: {_last_line(directory / 'log')}; {directory / 'log'}")
        return _harnessed(directory, one)


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"{printable(str(directory))}: cannot be written: {error.strerror}") from None


def _words(
    asked: Harness,
    command: str,
    one: Endpoint,
    served_model: str,
    tokenizer: str,
    directory: Path,
    seed: int,
    concurrency: int,
) -> list[str]:
    values = {
        "model": served_model,
        "base_url": f"{one.url}/v1/completions",
        "tokenizer": tokenizer,
        "num_concurrent": concurrency,
        "tokenized_requests": False,
        "max_retries": 1,
        "timeout": 3600,
    }
    for name in ("model", "tokenizer"):
        if "," in str(values[name]):
            raise UsageError(f"lm-eval cannot be told the {name} {printable(str(values[name]))!r}: it has a comma")
    told = ",".join(f"{name}={value}" for name, value in values.items())
    words = [command, "--model", "local-completions", "--model_args", told, "--tasks", ",".join(asked.tasks)]
    return [*words, "--seed", str(seed), "--log_samples", "--output_path", str(directory), *asked.arguments]


async def _run(words: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """The command's exit code; it and what it started are ended when this is cancelled."""
    try:
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
            )
    except OSError as error:
        raise UsageError(f"lm-eval: {printable(words[0])}: {error.strerror}") from None
    try:
        return await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _last_line(log: Path) -> str:
    """What it ended with: the last exception's line, else the last line of all, which may be a progress bar's."""
    lines = log.read_text("utf-8", "replace").strip().splitlines() if log.exists() else []
    errors = [line for line in lines if _EXCEPTION.match(line)]
    return printable((errors or lines)[-1], 200) if lines else "it said nothing"


def _harnessed(directory: Path, one: Endpoint) -> Harnessed:
    answers: list[Answered] = []
    prompts: list[tuple[str, ...]] = []
    for path in sorted(directory.rglob("samples_*.jsonl")):
        match = _SAMPLES.fullmatch(path.name)
        if match is None or not _NAME.fullmatch(match["task"]):
            raise UsageError(f"lm-eval's samples {printable(str(path))}: the name is not understood")
        rows = _scores(path, HARNESS + match["task"])
        answers += [row for row, _ in rows]
        prompts += [key for _, key in rows]
    if not answers:
        raise UsageError(f"lm-eval left no samples in {printable(str(directory))}")
    return Harnessed(
        version=_version(directory),
        digest=sha256_of(sorted(map(list, prompts))),
        generated=one.generated,
        cut=one.cut,
        answers=tuple(answers),
    )


def _scores(path: Path, task: str) -> list[tuple[Answered, tuple[str, ...]]]:
    """Each document's score by the task's first metric and first filter, and what identifies its question."""
    found: list[tuple[Answered, tuple[str, ...]]] = []
    chosen_filter: Any = None
    for number, line in enumerate(read_regular_file(path, FILE_LIMIT, "lm-eval's samples").decode("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        where = f"lm-eval's samples {printable(str(path))} line {number}"
        try:
            sample = json.loads(line)
            chosen_filter = sample.get("filter") if not found else chosen_filter
            if sample.get("filter") != chosen_filter:
                continue
            score = _score(sample)
            item = f"{sample['doc_id']}"
            question = tuple(str(sample.get(name, "")) for name in ("doc_hash", "prompt_hash", "target_hash"))
            text = json.dumps(sample.get("filtered_resps"))
            found.append((Answered(task=task, item=item, text=text, score=score), (task, item, *question)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            said = str(error).partition("\n")[0] if isinstance(error, ValueError) else type(error).__name__
            raise UsageError(f"{where}: no score between 0 and 1 of a document: {printable(said)}") from None
    return found


def _score(sample: Mapping[str, Any]) -> float:
    names = sample.get("metrics") or [name for name in _KNOWN if name in sample]
    if not names:
        raise ValueError("no metric is listed")
    value = sample[names[0]]
    if not isinstance(value, bool | int | float):
        raise ValueError(f"metric {names[0]} is not a number")
    return float(value)


def _version(directory: Path) -> str:
    for path in sorted(directory.rglob("results_*.json")):
        with contextlib.suppress(ValueError, UsageError, AttributeError):
            return printable(str(json.loads(read_regular_file(path, FILE_LIMIT, "results")).get("lm_eval_version", "")), 40)
    return ""
